"""Choice among the implementations of one op: obeyed or refused, never swapped silently."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moebook.errors import nearest, refuse


def implementation(
    op: str, impl: str, table: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """Return the function that ``impl`` names for this op; ``"auto"`` is the fastest one.

    Args:
        op: Name of the op, for the message.
        impl: ``"auto"`` or a key of ``table``.
        table: The op's implementations by name, the fastest first.

    Raises:
        Refusal: E-IMPL when the op has no such implementation.
    """
    if impl == "auto":
        return next(iter(table.values()))
    if impl not in table:
        refuse("E-IMPL", f"{op}: no implementation '{impl}'; {nearest(impl, ['auto', *table])}")
    return table[impl]
