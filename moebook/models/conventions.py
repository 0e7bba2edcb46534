"""Other people's conventions: what of them is taken, what is refused.

Models come from `load` or out of a user's hands, so what a configuration cannot show is
asked of the model itself, by a pass over a few tokens (`check`).
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Iterator, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from moebook.errors import Refusal, lacks_memory, refuse, shown
from moebook.nn import evaluating
from moebook.nn.batch import vocabulary

TOKENS = 8  # a row of `check`
CHANGED = TOKENS // 2  # of them, at its end, that differ between its two rows
FLOATS = ("F64", "F32", "F16", "BF16")  # of safetensors, that are no quantised weights
LARGEST = sys.float_info.max
# What a number of config.json must lie in, by its name.
RANGES = (
    (re.compile("dropout|pdrop|layerdrop"), 0.0, 1.0),
    (re.compile("(^|_)eps(ilon)?$"), 0.0, 1.0),
    (re.compile("theta$"), 1e-9, LARGEST),
    (re.compile("^max_position_embeddings$"), 0, LARGEST),  # 0: it says none
)
HEAD = "take a model with a head for language models"
TAGGED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# Layers whose cache can be cut row by row, as transformers names them.
ATTENTION = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "indexed_attention",
}
PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)


def items(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key with its value, at any depth of objects and lists."""
    if isinstance(content, Mapping):
        yield from content.items()
    for value in content.values() if isinstance(content, Mapping) else content:
        if isinstance(value, Mapping | list):
            yield from items(value)


def _numbers(value: Any) -> Iterator[int | float]:
    """Yield a number of a configuration, or all numbers of a list."""
    if isinstance(value, list | tuple):
        for part in value:
            yield from _numbers(part)
        return
    if isinstance(value, Mapping):
        # Transformers writes NaN as {"__float__": "NaN"}.
        value = TAGGED.get(str(value.get("__float__")))
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def check_values(content: Mapping[str, Any], where: object) -> None:
    """Refuse numbers of a configuration with which a model computes nonsense."""
    for key, value in items(content):
        for number in _numbers(value):
            _check_number(key, number, where)
    for part in (
        content,
        *(value for value in content.values() if isinstance(value, Mapping)),
    ):
        _check_experts(part, where)
        window = part.get("sliding_window")
        used = part.get("use_sliding_window", True)
        if used and type(window) is int and window < 1:
            wanted = "expected 1 or more tokens, or null"
            refuse("E-RANGE", f"{where}: sliding_window is {window}, {wanted}")


def _check_number(key: str, number: int | float, where: object) -> None:
    """Refuse NaN, and what is outside its `RANGES`."""
    # A whole number may be too large for a float.
    if isinstance(number, float) and math.isnan(number):
        refuse(
            "E-NONFINITE",
            f"{where}: {key} is NaN, expected a number; fetch it again",
        )
    for name, low, high in RANGES:
        if name.search(key) and not low <= number <= high:
            wanted = f"{low:g} to {high:g}"
            if high == LARGEST:
                wanted = f"a finite number, {low:g} or more"
            refuse("E-RANGE", f"{where}: {key} is {shown(number)}, expected {wanted}")


def _check_experts(content: Mapping[str, Any], where: object) -> None:
    """Refuse more experts a token than there are, and groups that do not fit."""
    experts_key, experts = _first_count(content, EXPERTS)
    chosen_key, chosen = _first_count(content, PER_TOKEN)
    if experts < 1:  # a dense model of a family that can be sparse
        return
    if chosen_key and not 1 <= chosen <= experts:
        wanted = f"expected 1 to {experts} ({experts_key})"
        refuse("E-RANGE", f"{where}: {chosen_key} is {chosen}, {wanted}")
    _, groups = _first_count(content, ("n_group",))
    kept_key, kept = _first_count(content, ("topk_group",))
    if groups > 0 and experts % groups:
        refuse(
            "E-RANGE",
            f"{where}: n_group {groups} does not divide {experts_key} {experts}",
        )
    if groups > 0 and kept_key and not 1 <= kept <= groups:
        refuse(
            "E-RANGE",
            f"{where}: topk_group is {kept}, expected 1 to {groups} (n_group)",
        )


def _first_count(content: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, int]:
    """Find the first of the names that holds a whole number; ("", 0) without one."""
    for name in names:
        if type(content.get(name)) is int:
            return name, content[name]
    return "", 0


def check_quantised(content: Mapping[str, Any], folder: Path, files: set[str]) -> None:
    """Refuse a quantisation that is unknown, or would be made of plain weights.

    An unknown one it leaves out with a note, so that the weights' codes would pass for
    weights.
    """
    methods = [
        value for key, value in items(content) if key == "quantization_config" and value
    ]
    for method in methods:
        name = _method(method)
        if name not in AUTO_QUANTIZATION_CONFIG_MAPPING:
            known = ", ".join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))
            said = f"config.json has weights quantised by {shown(name)}"
            refuse(
                "E-MODEL",
                f"{folder}: {said}, which transformers does not know; known: {known}",
            )
        kinds = set()
        for file in files:
            with safe_open(folder / file, "pt") as tensors:
                names = tensors.keys()
                kinds |= {tensors.get_slice(name).get_dtype() for name in names}
        if kinds <= {*FLOATS}:
            said = f"config.json has weights quantised by {name}"
            held = f"the files hold plain ones ({', '.join(sorted(kinds))})"
            refuse(
                "E-MODEL",
                f"{folder}: {said}, {held}; remove quantization_config from it",
            )


def _method(quantisation: Any) -> str:
    """Name what quantised the weights, in transformers' words."""
    if not isinstance(quantisation, Mapping):
        return str(quantisation)
    for bits in ("4bit", "8bit"):  # of both, transformers takes 4
        if quantisation.get(f"load_in_{bits}"):
            return f"bitsandbytes_{bits}"
    return str(quantisation.get("quant_method"))


def end_tokens(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer: the tokenizer's, the generation config's.

    Chat models of Gemma and Llama 3 end a turn with one that the tokenizer does not
    name. Whole numbers alone name a token: "9" and 9.5 do not (E-CONFIG).
    """
    ends = {tokenizer.eos_token_id}
    generation = getattr(_host(model), "generation_config", None)
    named = getattr(generation, "eos_token_id", None)  # one, a list of them, or None
    for token in named if isinstance(named, list | tuple) else [named]:
        if token is None:
            continue
        if not isinstance(token, Integral) or isinstance(token, bool):
            names = f"the generation config's eos_token_id names {shown(token)}"
            refuse("E-CONFIG", f"{names}, expected a token's number or a list of them")
        ends.add(int(token))
    return frozenset(token for token in ends if token is not None)


def keeps_cache(model: nn.Module) -> bool:
    """Say whether a model goes on from a cache that holds rows of several lengths.

    Recurrent models have a state for one (Mamba, RWKV, hybrids), and so have single
    layers (LFM2's convolutions, MiniMax's linear attention); whoever takes no
    ``position_ids`` would count what fills short rows up on the left, as BART does.
    """
    host = _host(model)
    takes = inspect.signature(host.forward).parameters
    if not {"past_key_values", "position_ids"} <= takes.keys():
        return False
    kinds = getattr(getattr(host, "config", None), "layer_types", None) or ()
    stateful = getattr(host, "_is_stateful", False)
    return not stateful and ATTENTION.issuperset(kinds)


def reads_prompt(model: nn.Module) -> bool:
    """Say whether a part of the model reads a whole prompt first (SMEAR's routers).

    It must be told by labels where the prompt ends.
    """
    return any(getattr(part, "reads_prompt", False) for part in model.modules())


def _host(model: nn.Module) -> Any:
    """Return the model inside PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@torch.no_grad()
def check(model: nn.Module, what: object = "", *, loss: bool = False) -> None:
    """Refuse what is no causal language model, or computes no numbers, by a short pass.

    Two rows begin alike and end differently: what a model says of the beginning must be
    the same. Most encoders that transformers offers as language models look ahead,
    unless ``is_decoder`` is set. With ``loss``, the model's own loss must be the
    likelihood of the next token, too: that of BART's decoder is not shifted. A module
    without an embedding to ask is left alone.
    """
    if not hasattr(model, "get_input_embeddings"):
        return
    kind = type(_host(model)).__name__
    name = f"{what}: {kind}" if what else kind
    device = next(model.parameters()).device
    # Of the lower half: some heads have fewer rows than the embedding.
    ids = torch.arange(1, TOKENS + 1) * vocabulary(model) // (2 * TOKENS)
    rows = ids.repeat(2, 1).to(device)
    rows[1, -CHANGED:] = rows[0, -CHANGED:].flip(0)
    labels = rows[:, 1:].clone()
    logits, own = _pass(model, name, rows, labels)
    # NaN only: some have -inf for what is no text.
    if logits.float().log_softmax(-1).isnan().any():
        if loss:  # `fit` and `nats` say on which rows
            return
        fix = "check its weights and its configuration"
        refuse("E-NONFINITE", f"{name} gives NaN or infinity: {fix}")
    if _looks_ahead(logits) and not reads_prompt(model):
        wrong = "what it says of a token depends on those after it"
        fix = "set is_decoder in its config.json, or take another"
        refuse("E-MODEL", f"{name} is no causal language model: {wrong}; {fix}")
    if loss and own is not None:
        scores = logits[:, :-1].flatten(0, 1).float()
        likelihood = F.cross_entropy(scores, labels[:, 1:].flatten())
        if not math.isclose(own, likelihood, rel_tol=1e-3):
            found = f"{own:.4f} for {likelihood:.4f} on {TOKENS} tokens"
            wrong = f"the loss of {name} is not the likelihood of the next token"
            refuse("E-MODEL", f"{wrong} ({found}); take another model")


def _pass(
    model: nn.Module, name: str, rows: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return logits ``[N, T - 1, V]`` of all tokens of rows but the first, and the model's loss.

    The first is not needed, as in training. A model that fails at it is refused.
    """
    places = torch.arange(1, TOKENS, device=rows.device)
    inputs = {
        "input_ids": rows,
        "attention_mask": torch.ones_like(rows),
        "labels": labels,
    }
    try:
        with evaluating(model):
            output = model(**inputs, logits_to_keep=places, use_cache=False)
    except Refusal:
        raise
    except Exception as error:
        # On a CPU torch raises a RuntimeError that says so.
        if lacks_memory(f"{type(error).__name__}: {error}"):
            raise
        told = f"cannot read {TOKENS} tokens ({type(error).__name__}: {error!s:.200})"
        refuse("E-MODEL", f"{name} {told}; check its configuration")
    logits = getattr(output, "logits", None)
    if logits is None:
        refuse("E-MODEL", f"{name} gives no logits; {HEAD}")
    if logits.dim() != 3:
        shape = tuple(logits.shape)
        refuse("E-MODEL", f"{name} gives logits {shape}, expected [N, T, V]; {HEAD}")
    if logits.shape[:2] != labels.shape:
        wrong = f"{logits.shape[1]} tokens' logits, asked for {len(places)}"
        fix = "take another model"
        refuse("E-MODEL", f"{name} leaves logits_to_keep aside ({wrong}); {fix}")
    return logits, getattr(output, "loss", None)


def _looks_ahead(logits: Tensor) -> bool:
    """Say whether two rows ``[2, T, V]`` differ at every token before the changed ones.

    Rounding moves logits less, unless it makes a router choose otherwise, at some
    tokens.
    """
    same = logits[:, : TOKENS - CHANGED - 1].float()  # the first token's are left out
    gaps = (same[0] - same[1]).abs().amax(1)
    rounding = 1e-4 if logits.dtype in (torch.float32, torch.float64) else 0.05
    return bool(gaps.min() > rounding * same.std())
