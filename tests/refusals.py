"""What every refusal is held to."""

import pytest

from moebook.errors import Refusal


def refused(message, call, *given, **named):
    """Expect a call to be refused in one line, which fits the pattern; return the refusal."""
    with pytest.raises(Refusal, match=message) as caught:
        call(*given, **named)
    assert "\n" not in str(caught.value)
    return caught.value
