"""Routers, what they decide, and the balance loss of all routers of a model.

Decisions are read by hooks for a batch, of any model's routers, or kept from a training pass.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from moebook import kernels
from moebook.errors import refuse
from moebook.kernels import Routing, route
from moebook.kernels.dispatch import Floating, shapes
from moebook.nn.batch import IDS, MASK, check_batch
from moebook.nn.passes import evaluating
from moebook.settings import Size, checked

Key = TypeVar("Key")
PROBES = 4  # random copies of a router that tell what its weights are
# Of the largest weight: what weights may differ from gates times a constant.
MISFIT = 1e-3


class Decision(NamedTuple):
    """What one router decides for the tokens of a pass."""

    logits: Tensor  # [..., E]
    ids: Tensor  # [..., K] chosen experts
    weights: Tensor  # [..., K] what the experts' outputs are multiplied by
    # [...] true where a token is real; a `Trace` holds one for all.
    mask: Tensor | None = None
    # Of the weights on the gates; NaN if they are no multiple of gates.
    factor: float = 1.0

    def real(self) -> Decision:
        """Return the decisions for the real tokens alone, ``[T, ...]``.

        Without a mask all count as real: those in a `Trace` have none, its `padding` tells theirs.
        """
        # No id is negative, so that without a mask every token is real.
        mask = self.ids[..., 0] >= 0 if self.mask is None else self.mask
        return Decision(
            logits=self.logits[mask],
            ids=self.ids[mask],
            weights=self.weights[mask],
            mask=mask[mask],
            factor=self.factor,
        )

    def gates(self) -> Tensor:
        """Return the gates ``[..., K]``, a token's sum at most 1: weights without the factor."""
        if math.isnan(self.factor):
            what = (
                "neither shares of the chosen experts nor probabilities by its logits"
            )
            refuse(
                "E-MODEL",
                f"the router's weights are {what}, times a constant: no gates",
            )
        return self.weights if self.factor == 1 else self.weights / self.factor


class Trace:
    """The decisions of a model's routers in its last forward pass, for the balance loss.

    Two hooks on the decoder open it before a pass and close it after: no graph outlives its step,
    and a layer's second run under gradient checkpointing finds it closed. The padding mask comes
    from the decoder's arguments: its layers hand none to their MLPs.
    """

    def __init__(self) -> None:
        self.decisions: dict[int, Decision] = {}
        self.attention_mask: Tensor | None = None
        self.batch: int | None = None  # B, rows of the pass, where its arguments tell
        self.open = False  # whether a pass is under way

    def __reduce__(self) -> tuple[type[Trace], tuple[()]]:
        """Copy as an empty trace: a copied model has not run yet."""
        return (Trace, ())

    def follow(self, decoder: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
        """Register the two hooks on a model's decoder; what takes them off again is returned."""
        begin = decoder.register_forward_pre_hook(self._begin, with_kwargs=True)
        end = decoder.register_forward_hook(self._end, always_call=True)
        return begin, end

    def _begin(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # Decoders of transformers take ids, then the mask; either may come by name.
        second = args[1] if len(args) > 1 else None
        mask = kwargs.get("attention_mask", second)
        self.attention_mask = mask if isinstance(mask, Tensor) else None
        inputs = [*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
        sizes = [len(part) for part in inputs if isinstance(part, Tensor)]
        self.batch = sizes[0] if sizes else None
        self.decisions = {}
        self.open = True

    def _end(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.open = False

    def padding(self, rows: int, attention_mask: Tensor | None = None) -> Tensor | None:
        """Return the mask ``[T]`` of the T = ``rows`` tokens of a pass, true where one is real.

        None where there is no mask ``[B, S]`` (packed sequences have a block mask and no padding).
        With a KV cache S covers the past too: the last columns belong to this pass.
        """
        mask = self.attention_mask if attention_mask is None else attention_mask
        is_block_mask = attention_mask is not None and attention_mask.dim() == 4
        if attention_mask is not None and not is_block_mask:
            shapes(
                "balance", {"attention_mask": (attention_mask, "B S", "real")}, empty=""
            )
        if mask is None or mask.dim() != 2:
            return None
        batch, columns = mask.shape
        length = rows // max(batch, 1)  # of each row in this pass
        fits = length * batch == rows and length <= columns
        if not fits or self.batch not in (None, batch):
            refuse(
                "E-SHAPE",
                f"attention_mask {tuple(mask.shape)} does not fit the last pass",
            )
        return mask[:, columns - length :].reshape(-1).bool()  # [T]


class Router(nn.Module):
    """A linear router without bias, kept in float32 or wider, whatever its host computes in.

    Its weight ``[E, D]`` starts kaiming-uniform with a = sqrt 5, so within 1/sqrt(D) either way
    (PESC as released; the paper: "randomly initialised"). Decisions of a pass go to ``trace``.
    """

    @checked
    def __init__(
        self,
        width: Size,
        experts: Size,
        top_k: Size,
        *,
        layer: Annotated[int, Field(ge=0)],
        trace: Trace | None = None,
        combine: Literal["renormalised", "probability"] = "renormalised",
        dtype: Floating = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if top_k > experts:
            refuse(
                "E-RANGE",
                f"Router: top_k is {top_k}, expected 1 to {experts} (experts)",
            )
        if dtype.itemsize < torch.float32.itemsize:
            refuse("E-DTYPE", f"Router: dtype is {dtype}, expected float32 or float64")
        self.top_k = top_k
        self.layer = layer
        self.trace = trace
        self.combine = combine
        self.weight = nn.Parameter(
            torch.empty(experts, width, dtype=dtype, device=device)
        )
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def logits(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        """Return ``W x``, plus ``more [T, E]`` if given, ``[T, E]`` for ``x [..., D]``."""
        named = {"x": (x, "... T D"), "the router's weight": (self.weight, "E D")}
        shapes("Router", named, empty="T")
        rows = x.flatten(0, -2)  # [T, D]
        if more is not None:
            shapes(
                "Router", {"x": (rows, "T D"), "more": (more, f"T {len(self.weight)}E")}
            )
        # Autocast would multiply in 16 bits, where close logits tie or change places.
        with torch.autocast(x.device.type, enabled=False):
            # [T, D] @ [D, E].
            logits = F.linear(rows.to(self.weight.dtype), self.weight)
            if more is not None:
                logits = logits + more
            return logits

    def forward(self, x: Tensor, more: Tensor | None = None) -> Routing:
        """Route the T tokens of ``x [..., D]`` by their `logits`."""
        logits = self.logits(x, more)
        # PESC Eq. 9, R(x) = Softmax(KeepTopK(W x)), or the probability over all E.
        routing = route(logits, self.top_k, combine=self.combine)
        if self.trace is not None and self.trace.open:
            # Only the balance loss takes a gradient through a trace, by the logits; in
            # evaluation mode nothing does, and no graph is kept.
            kept = logits if self.training else logits.detach()
            decision = Decision(kept, routing.ids, routing.weights.detach())
            self.trace.decisions[self.layer] = decision
        return routing


def routers(model: nn.Module) -> list[Router]:
    """Return the model's routers in the order of their layers."""
    parts = [module for module in model.modules() if isinstance(module, Router)]
    return sorted(parts, key=lambda router: router.layer)


def balance(
    routers: Sequence[Router],
    attention_mask: Tensor | None = None,
    *,
    first: bool = False,
    form: str = "live",
) -> Tensor:
    """Return ``sum over layers of E * sum_i f_i p_i`` of the last pass, padding left out.

    The number of layers when routing is uniform. Each layer has its own term: pooling f and p over
    layers would let one layer's imbalance cancel another's. Fits gradient accumulation.

    ``attention_mask [B, T]`` is by default the one that the model was called with. With ``first``
    a token's first choice alone counts in f (Switch), not all K; ``form`` is `balance_loss`'s.
    """
    if not routers:
        refuse(
            "E-MODEL",
            "no routers to balance: the model is dense, or its routers are not ours",
        )
    weight = routers[0].weight
    total = torch.zeros((), device=weight.device, dtype=weight.dtype)
    for router in routers:
        who = f"the router of layer {router.layer}"
        decision = None
        if router.trace is not None:
            decision = router.trace.decisions.get(router.layer)
        if router.trace is None or decision is None:
            refuse("E-MODEL", f"{who} has not run: do a forward pass first")
        # A pass without a graph leaves a loss that looks right and moves nothing.
        wanted = (
            router.training and router.weight.requires_grad and torch.is_grad_enabled()
        )
        if wanted and not decision.logits.requires_grad:
            refuse(
                "E-GRADIENT",
                f"{who} ran without a graph, so its balance loss would be dead: no"
                " torch.no_grad() around the forward pass, and gradient checkpointing with"
                " use_reentrant=False",
            )
        # Choices come best first.
        ids = decision.ids[:, :1] if first else decision.ids
        mask = router.trace.padding(len(decision.ids), attention_mask)
        if mask is not None:
            mask = mask.to(ids.device)
        # PESC Eq. 10 of one layer, without its alpha.
        term = kernels.balance_loss(decision.logits, ids, mask=mask, form=form)
        total = total + term.to(total.device)
    return total


@torch.no_grad()
def observe(
    model: nn.Module, routers: Mapping[Key, nn.Module], batch: Mapping[str, Tensor]
) -> dict[Key, Decision]:
    """Run a model on a batch, in evaluation mode, and return what each of its routers decides.

    ``model`` may be the decoder alone. ``routers``, of `moebook.nn` or of transformers, come by
    whatever tells them apart; one that the pass does not reach is left out. The batch has
    ``input_ids`` and, where padded, ``attention_mask`` ``[B, S]``; decisions are ``[B, S, ...]``.
    """
    check_batch("observe", model, batch)
    device = next(model.parameters()).device
    inputs = {}
    for name in (IDS, MASK):
        if name in batch:
            inputs[name] = batch[name].to(device)
    shape = inputs[IDS].shape  # [B, S]
    mask = inputs.get(MASK, torch.ones_like(inputs[IDS])).bool()
    decisions = {}

    def see(key: Key, arguments: tuple[Any, ...], output: Any) -> None:
        router = routers[key]
        logits, ids, weights = _decided(router, arguments, output)
        # The weights of our routers are the gates themselves.
        factor = 1.0 if isinstance(output, Routing) else _factor(router, arguments)
        decisions[key] = Decision(
            logits=logits.view(*shape, -1),  # [T, E] to [B, S, E]
            ids=ids.view(*shape, -1),
            weights=weights.view(*shape, -1),
            mask=mask,
            factor=factor,
        )

    with evaluating(model), hooked(routers, see):
        model(**inputs, use_cache=False)
    return decisions


def _decided(
    router: nn.Module, arguments: tuple[Any, ...], output: Any
) -> tuple[Tensor, ...]:
    """Return logits, ids and weights from a router of ours or of transformers."""
    if isinstance(output, Routing):
        # Ours put out no logits, so they are computed once more.
        return router.logits(*arguments), output.ids, output.weights
    if isinstance(output, tuple) and len(output) == 3:
        logits, weights, ids = output
        if weights.shape == ids.shape and not ids.is_floating_point():
            return logits.float(), ids, weights
    wanted = "(logits [T, E], weights [T, K], ids [T, K])"
    refuse("E-MODEL", f"{type(router).__name__} does not return {wanted}")


def _factor(router: nn.Module, arguments: tuple[Any, ...]) -> float:
    """Return the constant by which a router of transformers multiplies its gates, or NaN.

    Families have it under many names (2.826 in HY-V3, 16 in DeepSeek-V2), so it is measured. Gates
    are shares of what was chosen (Mixtral, DeepSeek-V3) or probabilities of the chosen, the softmax
    of all logits (DeepSeek-V2; ESFT's Eq. 2) or the sigmoid of each. All of them look alike for one
    token, or by a router of zeros, as AFMoE's start. A router's form does not depend on its values,
    though: so copies with random ones decide for the pass's tokens, a few times.
    """
    if arguments[0].is_meta:
        router, arguments = _with_values(router, arguments)
    tokens, *others = arguments
    tokens = tokens.float()
    spread = 1 / float(tokens.norm(dim=-1).mean().clamp(min=1e-6))  # logits of about 1
    generator = torch.Generator(tokens.device).manual_seed(0)
    twin = copy.deepcopy(router).float()
    outputs = []
    for _ in range(PROBES):
        for parameter in twin.parameters():
            parameter.normal_(0, spread, generator=generator)
        with torch.autocast(tokens.device.type, enabled=False):
            # Without the hooks that it has copied.
            outputs.append(twin.forward(tokens, *others))
    logits = torch.cat([output[0] for output in outputs]).double()  # [PROBES * T, E]
    weights = torch.cat([output[1] for output in outputs]).double()  # [PROBES * T, K]
    chosen = torch.cat([output[2] for output in outputs]).long()

    # What gates may be, [PROBES * T, K] each; the weights are one of them times c.
    shares = weights / weights.sum(-1, keepdim=True)
    probabilities = logits.softmax(-1).gather(-1, chosen)
    sigmoids = logits.sigmoid().gather(-1, chosen)
    for gates in (shares, probabilities, sigmoids):
        # The only c that can be it: both sides have equal sums.
        factor = float(weights.sum() / gates.sum())
        misfit = (weights - factor * gates).abs().max() / weights.abs().max()
        if misfit <= MISFIT:
            return 1.0 if abs(factor - 1) <= MISFIT else factor
    return math.nan


def _with_values(
    router: nn.Module, arguments: tuple[Any, ...]
) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a copy on the CPU of a router on meta, and of what it was called with.

    Tokens are random, all else is 0: a router's form does not depend on values.
    """
    copied = copy.deepcopy(router).to_empty(device="cpu")
    for part in (*copied.parameters(), *copied.buffers()):
        part.zero_()
    tokens, *others = arguments
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(tokens.shape, generator=generator)
    values = [
        torch.zeros_like(other, device="cpu") if isinstance(other, Tensor) else other
        for other in others
    ]
    return copied, (drawn, *values)


@contextmanager
def hooked(
    modules: Mapping[Key, nn.Module], see: Callable[[Key, tuple[Any, ...], Any], None]
) -> Iterator[None]:
    """Call ``see(key, arguments, output)`` after each run of a module, while the block lasts."""

    def hook(
        key: Key, _: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        see(key, (*args, *kwargs.values()), output)

    with ExitStack() as hooks:
        for key, module in modules.items():
            handle = module.register_forward_hook(partial(hook, key), with_kwargs=True)
            hooks.enter_context(handle)
        yield
