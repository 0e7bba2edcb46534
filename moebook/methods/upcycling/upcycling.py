"""Sparse upcycling: each FFN of a dense decoder becomes E copies of it behind a router.

`save` and `load` keep the model of any host; `export` writes a plain checkpoint of transformers,
once its logits agree.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pandas as pd
import torch
from accelerate.utils import send_to_device
from pydantic import Field, SkipValidation
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from moebook import __version__
from moebook import nn as mnn
from moebook.analysis.routers import gradients, reach
from moebook.errors import refuse
from moebook.methods.upcycling.config import Config, Rule
from moebook.methods.upcycling.starts import Start, su
from moebook.models import checkpoint
from moebook.models.anatomy import Anatomy, Layer, anatomy, dense_layers, graft, normed
from moebook.nn import balance, evaluating
from moebook.nn.batch import check_batch
from moebook.settings import Place, checked, settings

FAMILIES = ("llama", "gemma2", "gemma3_text", "olmo2", "olmo3", "exaone4")
TINY = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FORMS = {  # types of transformers, and of the hosts whose attention each has
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
# Relative error of the logits; 0.1 in halves.
AGREE = {
    torch.float64: 1e-6,
    torch.float32: 1e-4,
}


@settings
class Origin(checkpoint.Origin):
    """The settings of a model and its dense base's fingerprint, kept as ``model.upcycling``."""

    method: ClassVar[str] = "upcycling"
    config: Config


def upcycle(model: nn.Module, config: Config, start: Start | None = None) -> nn.Module:
    """Turn a dense decoder into a sparse one with full experts in place (Sec. 2.1, 4.4).

    In each chosen layer E copies of the FFN, a gated MLP without biases, in fused 3-D weights
    replace it, behind a linear router that reads its (normed) input in float32 or wider; without a
    ``start`` it is SU's, N(0, 0.02^2). What is new requires a gradient; the rest stays (the paper
    trains it all). W-ROUTER warns where, with K = 1, a norm stops them learning.

    >>> from moebook import models
    >>> model = upcycle(models.load("nano")[0], Config(experts=2, top_k=2))
    >>> anatomy(model).layers[0].count
    2
    """
    host = anatomy(model)
    layers = dense_layers(host, config.layers, "upcycling")
    base = checkpoint.fingerprint(model)
    start = su(model, config.experts, seed=config.seed) if start is None else start
    checkpoint.check_base("the start", start.base or base, base)
    shape = tuple(start.weights.shape)
    expected = (len(host.layers), config.experts, host.hidden)
    if shape != expected:
        refuse(
            "E-SHAPE", f"the router start is {shape}, expected [L, E, D] = {expected}"
        )
    _check_factors(config, start)
    if config.top_k == 1 < config.experts and (cancelling := normed(host, layers)):
        why = f"norms follow the FFNs of layers {cancelling}, so that a token's only weight cancels"
        hint = "take top_k=2, and noise for a gradient from the first step on"
        text = f"W-ROUTER: {why}: only the balance loss reaches their routers; {hint}"
        warnings.warn(text, stacklevel=2)
    _install(host, layers, start.weights, config, start.factors)
    model.upcycling = Origin(config=config, base=base)
    return model


def _check_factors(config: Config, start: Start) -> None:
    """Refuse the rule "scaled" without a start's factors, and factors under another rule."""
    if config.combine == "scaled" and start.factors is None:
        have = "combine is 'scaled', and the start has no factors"
        refuse("E-DATA", f"{have}; make it by levelled(start, inputs, top_k)")
    if config.combine != "scaled" and start.factors is not None:
        have = f"combine is '{config.combine}', and the start has factors"
        refuse("E-DATA", f"{have}; take combine='scaled', or a start without")


def save(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write all parameters (all of them train) and the `Origin` to a new folder, of any host."""
    tensors = dict(model.named_parameters())
    return checkpoint.save(folder, checkpoint.origin(model, Origin), tensors)


def load(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Restore a saved model onto its dense base, in place and bit for bit, after all checks."""

    def restore(model: nn.Module, made_from: Origin) -> dict[str, nn.Parameter]:
        # What was drawn is in the checkpoint.
        config = replace(made_from.config, noise=0.0)
        host = anatomy(model)
        layers = dense_layers(host, config.layers, "upcycling")
        _install(
            host,
            layers,
            torch.zeros(len(host.layers), config.experts, host.hidden),
            config,
        )
        model.upcycling = made_from
        return dict(model.named_parameters())

    return checkpoint.load(model, folder, Origin, restore)


def balance_loss(model: nn.Module, attention_mask: Tensor | None = None) -> Tensor:
    """Return ``alpha * N * sum_i f_i P_i``, summed over sparse layers, of the last pass (Eq. 3, 4).

    f_i counts each token's first choice (the argmax of Eq. 4, also with K = 2). Correction: in
    Eq. 4 f and P sum to B; here both are shares of the batch's real tokens, those where
    ``attention_mask [B, T]`` is 1. A scalar with a gradient; a layer adds alpha where its loads are
    even, and alpha * N where one expert takes all.
    """
    weight = checkpoint.origin(model, Origin).config.balance_weight
    return weight * balance(mnn.routers(model), attention_mask, first=True)


@checked
def step_zero(
    dense: PreTrainedModel,
    starts: Annotated[Mapping[str, Start], Field(min_length=1)],
    batch: SkipValidation[Mapping[str, Tensor]],
) -> pd.DataFrame:
    """Measure how much loss upcycling costs, and how much gradient reaches the routers.

    One row by rule (Eq. 2's and Mixtral's), experts per token (1 and 2) and start: ``loss``, nats
    per token above the dense model's, and ``gradient``, the Euclidean norm over all routers. The
    batch holds ``input_ids`` and ``labels`` ``[B, T]``.
    """
    check_batch("step_zero", dense, batch, needs=["labels"])
    batch = send_to_device(batch, dense.device)
    dense_loss, rows = dense(**batch).loss.item(), {}
    rules: tuple[Rule, ...] = ("renormalised", "probability")
    for rule, k, (name, start) in product(rules, (1, 2), starts.items()):
        config = Config(experts=start.weights.shape[1], top_k=k, combine=rule)
        model = upcycle(deepcopy(dense).requires_grad_(True), config, start)
        norm = np.linalg.norm(gradients(model, batch).gradient)
        rows[rule, k, name] = {
            "loss": model(**batch).loss.item() - dense_loss,
            "gradient": norm,
        }
    return pd.DataFrame(rows).T.rename_axis(["combine", "experts per token", "start"])


def behind_norms() -> pd.DataFrame:
    """Ask tiny random hosts of six families whether the language-model loss reaches their routers.

    `reach` at step 0 under Eq. 2 for one expert per token, two, and two that noise has parted, a
    row a family. All but Llama norm what the FFN puts out: a factor common to the chosen cancels.
    """
    two = Config(top_k=2)
    forms = {"k1": Config(top_k=1), "k2": two, "k2_noise": replace(two, noise=0.1)}
    ids = torch.arange(48).view(3, 16)
    batch, lines = {"input_ids": ids, "labels": ids}, {}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        for family in FAMILIES:
            torch.manual_seed(0)
            dense = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(family, **TINY)
            )
            made = {
                name: upcycle(deepcopy(dense), form) for name, form in forms.items()
            }
            lines[family] = {name: reach(model, batch) for name, model in made.items()}
    return pd.DataFrame(lines).T


def _install(
    host: Anatomy,
    layers: list[Layer],
    weights: Tensor,
    config: Config,
    factors: Tensor | None = None,
) -> None:
    """Put experts in the layers, behind routers that start at ``weights [L, E, D]``.

    A layer's factor ``[L]`` goes into its experts' last weights, so that a model of the rule
    "scaled" is one of Eq. 2 with other weights: its steps change what Eq. 2's change.
    """

    def build(layer: Layer, router: mnn.Router) -> nn.Module:
        experts = mnn.Experts(layer.mlp, config.experts)
        if config.noise:
            _disturb(experts, config.noise, config.seed + layer.index)
        with torch.no_grad():
            if factors is not None:
                experts.down_proj.mul_(factors[layer.index].to(experts.down_proj))
            router.weight.copy_(weights[layer.index])
        return mnn.ExpertMoE(router, experts)

    rule = "probability" if config.combine == "scaled" else config.combine
    how = {"experts": config.experts, "top_k": config.top_k, "combine": rule}
    graft(host, layers, build, **how)


@torch.no_grad()
def _disturb(experts: mnn.Experts, noise: float, seed: int) -> None:
    """Add Gaussian noise, drawn on the CPU, of ``noise`` times each dense tensor's deviation."""
    generator = torch.Generator().manual_seed(seed)
    for weight in (experts.gate_up_proj, experts.down_proj):
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
        deviation = weight[0].float().std().item()  # all experts are still copies
        weight.add_((drawn * (noise * deviation)).to(weight))


@checked
def export(
    model: PreTrainedModel,
    folder: Place,
    *,
    form: Literal["mixtral", "qwen2_moe", "qwen3_moe"] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Path:
    """Write an upcycled model as a checkpoint that ``AutoModelForCausalLM`` loads as it is.

    With its ``tokenizer`` beside it `models.load` takes the folder, too. By default the form is the
    first that can hold the model:

    - ``"mixtral"``: Llama and Mistral hosts, every layer sparse, ``"renormalised"`` or K = E.
    - ``"qwen2_moe"``: Llama, Mistral and Qwen2 hosts, both rules, any layers; the family's shared
      expert gets weights 0.
    - ``"qwen3_moe"``: Qwen3 hosts (with norms on queries and keys), both rules, any layers.

    Routers are rounded to the host's dtype, as these families keep them: in half precision logits
    agree to about 1 %, since a token near a tie may take another expert.
    """
    target, source = Path(folder), checkpoint.origin(model, Origin)
    if target.exists():
        refuse(
            "E-EXISTS", f"{target} exists already: choose another folder or remove it"
        )
    checkpoint.check_finite(dict(model.named_parameters()), "nothing was exported")
    rows = len(model.get_input_embeddings().weight)
    if tokenizer is not None and len(tokenizer) > rows:
        refuse("E-VOCAB", f"{len(tokenizer)} tokens, but the embedding has {rows} rows")
    problems = {
        each: _problem(model, source.config, each)
        for each in ([form] if form else FORMS)
    }
    fitting = [each for each, problem in problems.items() if problem is None]
    if not fitting:
        reasons = (f"form '{each}' {problem}" for each, problem in problems.items())
        refuse("E-FORM", "; ".join(reasons))
    twin = _twin(model, fitting[0], source.config)
    _compare(model, twin)
    with checkpoint.building(target, base=source.base, version=__version__) as stage:
        twin.save_pretrained(stage)
        if tokenizer is not None:
            # Chat templates stay in the configuration: a sealed folder is flat.
            tokenizer.save_pretrained(stage, save_jinja_files=False)
    return target


def _problem(model: PreTrainedModel, config: Config, form: str) -> str | None:
    """Return why a form cannot hold a model, or None."""
    if (kind := model.config.model_type) not in FORMS[form]:
        return f"holds hosts of type {', '.join(FORMS[form])}, this one is {kind}"
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


def _configuration(
    model: PreTrainedModel, config: Config, form: str
) -> PreTrainedConfig:
    source = model.config
    carried = {key: getattr(source, key, None) for key in CARRIED}
    values: dict[str, Any] = {
        key: value for key, value in carried.items() if value is not None
    }
    values |= {
        "num_experts_per_tok": config.top_k,
        "router_aux_loss_coef": config.balance_weight,
    }
    if form == "mixtral":
        values["num_local_experts"] = config.experts
        values["sliding_window"] = getattr(source, "sliding_window", None)
        return AutoConfig.for_model(form, **values)
    dense = [layer.index for layer in anatomy(model).layers if layer.kind == "dense"]
    values |= {
        "num_experts": config.experts,
        "moe_intermediate_size": source.intermediate_size,
    }
    values |= {
        "norm_topk_prob": config.combine == "renormalised",
        "mlp_only_layers": dense,
    }
    if form == "qwen2_moe":
        values |= {
            "qkv_bias": source.model_type == "qwen2",
            "shared_expert_intermediate_size": 1,
        }
    return AutoConfig.for_model(form, **values)


@torch.no_grad()
def _twin(model: PreTrainedModel, form: str, config: Config) -> PreTrainedModel:
    """Return the same weights as a model of the form's family, without copying them."""
    configuration = _configuration(model, config, form)
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(configuration, dtype=model.dtype).eval()
    state = {
        name.replace(".mlp.router.", ".mlp.gate."): tensor.to(model.dtype)
        for name, tensor in model.state_dict().items()
    }
    for name, part in twin.state_dict().items():
        if ".shared_expert" in name:
            state[name] = torch.zeros(
                part.shape, dtype=model.dtype, device=model.device
            )
    twin.load_state_dict(state, assign=True)
    # Its buffers are in no state dict: made anew, off "meta".
    rotary = twin.model.rotary_emb
    twin.model.rotary_emb = type(rotary)(configuration).to(model.device)
    twin.tie_weights()
    twin.generation_config = model.generation_config
    return twin


@torch.no_grad()
def _compare(model: PreTrainedModel, twin: nn.Module) -> None:
    """Refuse a twin with other logits on a fixed text: a setting of the host was not carried."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, 24), generator=generator).to(
        model.device
    )
    with evaluating(model):
        expected, logits = (
            each(input_ids=ids).logits.double() for each in (model, twin)
        )
    error = float((logits - expected).norm() / expected.norm().clamp(min=1e-12))
    if not error <= AGREE.get(model.dtype, 0.1):
        ours, theirs = type(model).__name__, type(twin).__name__
        refuse("E-FORM", f"the logits of {theirs} differ from {ours}'s by {error:.1e}")
