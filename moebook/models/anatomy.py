"""Where a decoder keeps attention, MLPs, routers and experts; ours as its experts.

`moebook.kernels.experts` is an implementation of experts in transformers' registry, for
Mixtral, OLMoE, DeepSeek-V2 and V3, Qwen3-MoE and whatever keeps fused experts like
them: after `register_experts`, ``model.set_experts_implementation("moebook")``;
``"grouped_mm"`` goes back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from peft.tuners.lora import ParamWrapper
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moebook import kernels
from moebook.errors import refuse
from moebook.nn import Experts, Router, SplitExperts, Trace, evaluating, hooked

NAME = "moebook"  # of our experts among the implementations of transformers
GATED = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Layer:
    """One decoder layer's parts; a dense one has no router and no experts.

    In transformers 5 experts are fused: ``gate_up_proj [E, 2F, D]``, ``down_proj [E, D,
    F]``, the last two axes swapped in GPT-OSS and Llama 4; in PESC's form they are the
    adapters.
    """

    index: int  # from 0
    block: nn.Module
    slot: str  # name under which the block holds its feed-forward part
    attention: nn.Module | None  # None where the block has another mixer
    mlp: nn.Module  # a gated MLP when dense, the whole MoE block when sparse
    kind: Literal["dense", "sparse"]
    width: int  # F, of the dense MLP or of one routed expert
    router: Any = None  # the module that scores the experts
    experts: Any = None
    # What every token runs through beside the routed experts.
    shared: nn.Module | None = None
    # E, the routed experts, without those of LongCat that hold no weights.
    count: int = 0

    def replace(self, mlp: nn.Module) -> None:
        """Put another module into the feed-forward place of this layer's block."""
        setattr(self.block, self.slot, mlp)


@dataclass(frozen=True)
class Anatomy:
    """A host model's decoder, its layers, and D (``hidden``), the residual's width."""

    #: The module that holds the layers.
    decoder: nn.Module
    #: Its decoder layers, the first one first.
    layers: tuple[Layer, ...]
    #: D, the residual's width.
    hidden: int


def anatomy(model: nn.Module) -> Anatomy:
    """Find a model's decoder layers and their parts, also inside PEFT's wrappers.

    >>> from moebook import models
    >>> host = anatomy(models.load("nano-moe")[0])
    >>> host.hidden, len(host.layers), host.layers[1].kind
    (128, 4, 'sparse')
    """
    host = model.get_base_model() if hasattr(model, "get_base_model") else model
    decoder = host.get_decoder() if hasattr(host, "get_decoder") else host
    if not hasattr(decoder, "layers"):  # Llama 4 calls itself its decoder
        decoder = getattr(decoder, "model", decoder)
    blocks = getattr(decoder, "layers", None)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        kind = type(host).__name__
        refuse("E-MODEL", f"no decoder layers found in {kind}: {_seen(decoder)}")
    hidden = getattr(getattr(decoder, "config", None), "hidden_size", None)
    if hidden is None:
        kind = type(host).__name__
        lacks = f"{kind} has layers but no config.hidden_size"
        refuse("E-MODEL", f"{lacks}, expected a decoder of transformers")
    layers = tuple(_layer(index, block, hidden) for index, block in enumerate(blocks))
    return Anatomy(decoder, layers, hidden)


def sparse_layers(model: nn.Module) -> list[Layer]:
    """Return the layers that hold routed experts, or refuse a dense model."""
    layers = [layer for layer in anatomy(model).layers if layer.kind == "sparse"]
    if not layers:
        kind = type(model).__name__
        refuse("E-MODEL", f"{kind} is dense: it has no routers and no experts")
    return layers


def count(module: nn.Module, *, trained: bool = False) -> int:
    """Count a module's parameters, all or those that are ``trained``."""
    parts = module.parameters()
    return sum(part.numel() for part in parts if part.requires_grad or not trained)


def beside(weight: Tensor) -> dict[str, Any]:
    """Device and dtype of what trains beside a weight: its own, at least float32."""
    return {
        "device": weight.device,
        "dtype": torch.promote_types(torch.float32, weight.dtype),
    }


def dense_layers(
    host: Anatomy, numbers: Collection[int] | None, method: str
) -> list[Layer]:
    """Return the layers of these numbers, or all, of a host that must be dense."""
    for layer in host.layers:
        if layer.kind == "sparse":
            sparse = f"layer {layer.index} is sparse already"
            refuse("E-MODEL", f"{sparse}: {method} needs a dense host")
    last = len(host.layers) - 1
    wanted = range(last + 1) if numbers is None else sorted(numbers)
    if wanted[-1] > last:
        refuse("E-RANGE", f"layers names layer {wanted[-1]}, the host has 0 to {last}")
    return [host.layers[index] for index in wanted]


def graft(
    host: Anatomy,
    layers: Iterable[Layer],
    build: Callable[[Layer, Router], nn.Module],
    **how: Any,
) -> None:
    """Replace the layers' MLPs by what ``build`` makes of each and of a router.

    All are built before the first is put in. Routers are float32 or wider, and share a
    trace.
    """
    trace = Trace()
    modules = []
    for layer in layers:
        weight = next(p for p in layer.block.parameters() if p.is_floating_point())
        how_and_where = beside(weight) | how
        router = Router(host.hidden, layer=layer.index, trace=trace, **how_and_where)
        modules.append((layer, build(layer, router).train(layer.block.training)))
    for layer, module in modules:
        layer.replace(module)
    trace.follow(host.decoder)


@torch.no_grad()
def normed(host: Anatomy, layers: Iterable[Layer]) -> list[int]:
    """Return the layers that norm their FFN's output: a factor on it changes nothing.

    So do Gemma 2 and 3, OLMo 2 and 3 and EXAONE 4. A pass over one token shows it: a
    part of the block takes that very output, and gives the same for twice it. A model
    on meta tells of none.
    """
    normed_layers: list[int] = []
    if next(host.decoder.parameters()).is_meta:
        return normed_layers
    parts = {}
    for layer in layers:
        for part in layer.block.children():
            parts[layer, part] = part
    put_out: dict[Layer, Tensor] = {}

    def see(key: tuple[Layer, nn.Module], given: tuple[Any, ...], output: Any) -> None:
        layer, part = key
        if part is layer.mlp:
            put_out[layer] = output
        elif given and given[0] is put_out.get(layer):
            once = torch.linspace(1, 2, host.hidden).to(given[0])
            if torch.allclose(part(2 * once), part(once), rtol=0.01):
                normed_layers.append(layer.index)

    with evaluating(host.decoder), hooked(parts, see):
        token = torch.zeros(1, 1).long().to(next(host.decoder.parameters()).device)
        host.decoder(input_ids=token, use_cache=False)
    return normed_layers


def register_experts() -> None:
    """Enter `run_experts` into transformers' registry as ``"moebook"``."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)


def run_experts(host: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return ``sum_k w_k E_k(x)``, in training and in generation.

    The host has ``gate_up_proj [E, 2F, D]``, ``down_proj [E, D, F]`` and ``act_fn``; x
    is ``[T, D]``, ids and weights are ``[T, K]``.
    """
    problem = incompatibility(host)
    if problem:
        cannot = f"experts implementation '{NAME}' cannot run it: {problem}"
        other = "use model.set_experts_implementation('grouped_mm')"
        refuse("E-MODEL", f"{type(host).__name__}: {cannot}; {other}")
    routing = kernels.grouped(ids, weights, len(host.down_proj))
    bank = kernels.Bank(host.gate_up_proj, host.down_proj)
    return kernels.experts(x, routing, bank, host.act_fn)


def incompatibility(host: nn.Module) -> str | None:
    """Say in what a host's experts differ from gated FFNs in fused weights, if so."""
    ours = isinstance(host, Experts)
    # transformers gives this to every class of experts that it runs by its registry.
    gate = getattr(type(host), "_apply_gate", None)
    plain_gate = getattr(gate, "__name__", "") == "_default_apply_gate"
    differences = {
        "a forward pass of its own": not ours and gate is None,
        "no gate": not getattr(host, "has_gate", True),
        "gate and up interleaved": not getattr(host, "is_concatenated", True),
        "biases": getattr(host, "has_bias", False),
        "transposed weights": getattr(host, "is_transposed", False),
        "a norm behind the experts": getattr(host, "has_post_expert_norm", False),
        "experts spread over devices": getattr(host, "_is_expert_parallel", False),
        "a gate of its own": not ours and not plain_gate,
        "no act_fn": not callable(getattr(host, "act_fn", None)),
    }
    return next((name for name, present in differences.items() if present), None)


def _layer(index: int, block: nn.Module, hidden: int) -> Layer:
    attention = _first(block, "self_attn", "attention", "attn")
    where = f"decoder layer {index} ({type(block).__name__})"
    for slot in ("mlp", "feed_forward", "block_sparse_moe"):
        mlp = _first(block, slot)
        if mlp is None:
            continue
        if all(isinstance(getattr(mlp, name, None), nn.Module) for name in GATED):
            more = _beside_gated(block, mlp)
            if more:
                both = f"holds a gated MLP and {more}"
                refuse("E-MODEL", f"{where} {both}, expected one alone")
            width = mlp.down_proj.in_features
            return Layer(index, block, slot, attention, mlp, "dense", width)
        router = _first(mlp, "router", "gate")
        experts = _first(mlp, "experts", "adapters")
        if router is not None and experts is not None:
            shared = _first(
                mlp, "shared", "shared_experts", "shared_expert", "shared_mlp"
            )
            if shared is None:
                # Granite's stands beside the mixture in the block.
                shared = _first(block, "shared_mlp")
            return Layer(
                index,
                block,
                slot,
                attention,
                mlp,
                "sparse",
                width=_expert_width(experts, shared, hidden),
                router=router,
                experts=experts,
                shared=shared,
                count=_expert_count(experts),
            )
    lacks = f"neither a gated MLP ({', '.join(GATED)}) nor a mixture of experts"
    refuse("E-MODEL", f"{where} holds {lacks}: {_seen(block)}")


def _beside_gated(block: nn.Module, mlp: nn.Module) -> str:
    """Name what a block holds beside a gated MLP, as Gemma 4's and Doge's experts.

    A norm inside the MLP, as in BitNet, is no such thing.
    """
    for name in ("router", "experts"):
        if _first(block, name) is not None:
            return f"'{name}'"
    for name, weight in mlp.named_parameters():
        if weight.dim() > 1 and name.split(".")[0] not in GATED:
            return f"'{name}'"
    return ""


def _expert_count(experts: nn.Module) -> int:
    """Return E, the number of a layer's routed experts."""
    if isinstance(experts, SplitExperts):
        return len(experts.slots)
    if isinstance(experts, nn.ModuleList):
        return len(experts)
    # Or adapters.
    fused: Any = getattr(experts, "down_proj", getattr(experts, "down", None))
    return len(fused)


def _expert_width(experts: nn.Module, shared: nn.Module | None, hidden: int) -> int:
    """F of one routed expert; adapters share one MLP, so there it is that MLP's."""
    if hasattr(experts, "down_proj"):  # [E, D, F], or [E, F, D] in GPT-OSS and Llama 4
        return int(experts.down_proj[0].numel() // hidden)
    source = shared if shared is not None else next(experts.children())
    inner = _first(source, "experts")
    if inner is not None:  # of a block that adapters stand behind
        return _expert_width(inner, None, hidden)
    return int(source.down_proj.in_features)


def _first(module: nn.Module, *names: str) -> nn.Module | None:
    """The first of these parts that a module has, out of PEFT's wrapper."""
    for name in names:
        part = getattr(module, name, None)
        if isinstance(part, ParamWrapper):
            return part.get_base_layer()
        if isinstance(part, nn.Module):
            return part
    return None


def _seen(module: nn.Module) -> str:
    names = sorted({type(part).__name__ for part in module.modules()})
    return f"module classes seen: {', '.join(names)}"
