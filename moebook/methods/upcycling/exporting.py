"""Export of an upcycled model as a plain checkpoint of transformers, readable without this package.

Four questions decide the form: does the family have the host's attention, can it hold the combine
rule, can it mix dense and sparse layers, and do the exported weights give the same logits? The last
is asked of every export before it gets its name.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moebook import __version__
from moebook.errors import refuse
from moebook.methods.settings import chosen
from moebook.methods.upcycling.upcycling import Origin, origin
from moebook.models import manifest
from moebook.models.anatomy import anatomy
from moebook.nn import evaluating

CLASSES = {
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
HOSTS = {
    "mixtral": ("llama", "mistral"),
    "qwen2_moe": ("llama", "mistral", "qwen2"),
    "qwen3_moe": ("qwen3",),
}
CARRIED = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    " num_key_value_heads head_dim hidden_act max_position_embeddings initializer_range"
    " rms_norm_eps use_cache pad_token_id bos_token_id eos_token_id tie_word_embeddings"
    " attention_dropout rope_parameters"
).split()
PROBE = 24  # tokens on which the export must agree with the model
AGREE = {torch.float64: 1e-6, torch.float32: 1e-4}  # relative error of the logits; 0.1 in halves


def export(
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    *,
    form: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Path:
    """Write an upcycled model as a checkpoint that ``AutoModelForCausalLM`` loads as it is.

    - ``"mixtral"``: Llama and Mistral hosts, every layer sparse. Mixtral always renormalises, so it
      holds ``"renormalised"``, and ``"probability"`` only where K = E makes the two the same.
    - ``"qwen2_moe"``: Llama, Mistral and Qwen2 hosts, both rules, any subset of layers sparse. The
      family has a shared expert: one of width 1 with weights 0, which adds nothing.
    - ``"qwen3_moe"``: Qwen3 hosts (it has norms on queries and keys), both rules, any subset.

    OLMoE's form is not offered: its norms run over all heads' queries together, before the heads
    are split, and no gated dense host that upcycles here has these.

    Routers are rounded to the host's dtype, in which these families keep them. In half precision a
    token near a tie may then take another expert, so logits agree to about 1 % and not bit by bit.

    Args:
        model: From `upcycle`, on one device; unchanged.
        folder: Must not exist yet. It gets a manifest with the hash of every file.
        form: One of the three; None for the first of them that can hold the model.
        tokenizer: Saved beside the weights when given.

    Returns:
        The folder.

    Raises:
        Refusal: E-EXISTS when the folder exists; E-MODEL for a model that is not upcycled; E-CHOICE
            for an unknown form; E-FORM for a form that cannot hold the model, with the reason, or
            whose logits differ; E-NONFINITE when a weight is not finite.
    """
    target, made = Path(folder), origin(model)
    if target.exists():
        refuse("E-EXISTS", f"{target} exists already: choose another folder or remove it")
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            refuse("E-NONFINITE", f"{name} holds NaN or infinity: nothing was exported")
    twin = _twin(model, _form(model, made, form), made)
    _compare(model, twin)
    with manifest.building(target, base=made.base, version=__version__) as stage:
        twin.save_pretrained(stage)
        if tokenizer is not None:
            tokenizer.save_pretrained(stage)
    return target


def _form(model: PreTrainedModel, made: Origin, form: str | None) -> str:
    """Return the form asked for, or the first that fits; refuse when it cannot hold the model."""
    if form is not None:
        chosen("form", form, CLASSES)
    problems = {each: _obstacle(model, made, each) for each in ([form] if form else CLASSES)}
    fits = [each for each, problem in problems.items() if problem is None]
    if not fits:
        told = "; ".join(f"form '{each}' {problem}" for each, problem in problems.items())
        refuse("E-FORM", told)
    return fits[0]


def _obstacle(model: PreTrainedModel, made: Origin, form: str) -> str | None:
    """Return why a form cannot hold a model, or None."""
    kind, config = model.config.model_type, made.config
    if kind not in HOSTS[form]:
        return f"holds hosts of type {', '.join(HOSTS[form])}, this one is {kind}"
    if getattr(model.config, "attention_bias", False):
        return "has no biases in its attention, this host has"
    if form != "mixtral":
        window = getattr(model.config, "sliding_window", None)
        return f"would lose the host's sliding window of {window}" if window else None
    if config.combine != "renormalised" and config.top_k < config.experts:
        return f"always renormalises, this model combines by '{config.combine}': use 'qwen2_moe'"
    if any(layer.kind == "dense" for layer in anatomy(model).layers):
        return "makes every layer sparse, this model has dense ones: use 'qwen2_moe'"
    return None


def _configuration(model: PreTrainedModel, made: Origin, form: str) -> PreTrainedConfig:
    source, config = model.config, made.config
    carried: dict[str, Any] = {
        key: value for key in CARRIED if (value := getattr(source, key, None)) is not None
    }
    carried["num_experts_per_tok"] = config.top_k
    carried["router_aux_loss_coef"] = config.balance_weight
    if form == "mixtral":
        carried["num_local_experts"] = config.experts
        carried["sliding_window"] = getattr(source, "sliding_window", None)
        return MixtralConfig(**carried)
    layers = anatomy(model).layers
    carried["num_experts"] = config.experts
    carried["moe_intermediate_size"] = source.intermediate_size
    carried["norm_topk_prob"] = config.combine == "renormalised"
    carried["mlp_only_layers"] = [layer.index for layer in layers if layer.kind == "dense"]
    if form == "qwen3_moe":
        return Qwen3MoeConfig(**carried)
    biased = source.model_type == "qwen2"
    return Qwen2MoeConfig(**carried, qkv_bias=biased, shared_expert_intermediate_size=1)


@torch.no_grad()
def _twin(model: PreTrainedModel, form: str, made: Origin) -> PreTrainedModel:
    """Return the same weights as a model of the form's family, without copying them."""
    config = _configuration(model, made, form)
    with torch.device("meta"):
        twin = CLASSES[form][1](config).to(model.dtype).eval()
    state = {
        name.replace(".mlp.router.", ".mlp.gate."): tensor.to(model.dtype)
        for name, tensor in model.state_dict().items()
    }
    hollow = {name: part for name, part in twin.state_dict().items() if ".shared_expert" in name}
    for name, part in hollow.items():
        state[name] = torch.zeros(part.shape, dtype=model.dtype, device=model.device)
    try:
        twin.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        refuse("E-FORM", f"form '{form}' does not fit this model: {str(error)[:200]}")
    rotary = twin.model.rotary_emb  # its buffers are in no state dict: made anew, off "meta"
    twin.model.rotary_emb = type(rotary)(config).to(model.device)
    twin.tie_weights()
    twin.generation_config = model.generation_config
    return twin


@torch.no_grad()
def _compare(model: PreTrainedModel, twin: nn.Module) -> None:
    """Refuse a twin whose logits on a fixed text differ: a setting of the host was not carried."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, PROBE), generator=generator)
    with evaluating(model):
        want, got = (_logits(each, ids.to(model.device)) for each in (model, twin))
    error = float((got - want).norm() / want.norm().clamp(min=1e-12))
    if not error <= AGREE.get(model.dtype, 0.1):
        kind = type(twin).__name__
        refuse(
            "E-FORM",
            f"the logits of {kind} differ from the model's by {error:.1e}: the family lacks"
            f" something that {type(model).__name__} does",
        )


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.double()
