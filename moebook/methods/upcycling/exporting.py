"""A plain checkpoint of transformers, written once its logits agree with the upcycled model's."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from moebook import __version__
from moebook.errors import refuse, saving
from moebook.methods.upcycling.apply import Origin
from moebook.methods.upcycling.config import Config
from moebook.models import checkpoint
from moebook.models.anatomy import anatomy
from moebook.models.lora import refuse_adapted
from moebook.nn import evaluating
from moebook.settings import Place, checked

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
    target = Path(folder)
    source = checkpoint.origin(model, Origin)
    refuse_adapted(model)
    if target.exists():
        refuse(
            "E-EXISTS", f"{target} exists already: choose another folder or remove it"
        )
    checkpoint.check_finite(dict(model.named_parameters()), "nothing was exported")
    rows = len(model.get_input_embeddings().weight)
    if tokenizer is not None and len(tokenizer) > rows:
        refuse("E-VOCAB", f"{len(tokenizer)} tokens, but the embedding has {rows} rows")
    _check_generation(model)
    asked = [form] if form else list(FORMS)
    problems = {each: _problem(model, source.config, each) for each in asked}
    fitting = [each for each, problem in problems.items() if problem is None]
    if not fitting:
        reasons = (f"form '{each}' {problem}" for each, problem in problems.items())
        refuse("E-FORM", "; ".join(reasons))
    twin = _twin(model, fitting[0], source.config)
    _compare(model, twin)
    facts = {"base": source.base, "version": __version__}
    with saving(folder), checkpoint.building(target, **facts) as stage:
        twin.save_pretrained(stage)
        if tokenizer is not None:
            # Chat templates stay in the configuration: a sealed folder is flat.
            tokenizer.save_pretrained(stage, save_jinja_files=False)
    return target


def _check_generation(model: PreTrainedModel) -> None:
    """Refuse a generation config that transformers does not save, before anything is made."""
    try:
        with TemporaryDirectory() as folder:
            model.generation_config.save_pretrained(folder)
    except ValueError as error:
        refuse("E-MODEL", f"the model's generation_config cannot be saved: {error}")


def _problem(model: PreTrainedModel, config: Config, form: str) -> str | None:
    """Return why a form cannot hold a model, or None."""
    kind = model.config.model_type
    if kind not in FORMS[form]:
        return f"holds hosts of type {', '.join(FORMS[form])}, this one is {kind}"
    if getattr(model.config, "attention_bias", False):
        return "has no biases in its attention, this host has"
    if form != "mixtral":
        window = getattr(model.config, "sliding_window", None)
        return f"would lose the host's sliding window of {window}" if window else None
    # With K = E the probabilities sum to 1: Eq. 2 is Mixtral's rule.
    if config.combine != "renormalised" and config.top_k < config.experts:
        return f"always renormalises, this model combines by '{config.combine}': use 'qwen2_moe'"
    if any(layer.kind == "dense" for layer in anatomy(model).layers):
        return "makes every layer sparse, this model has dense ones: use 'qwen2_moe'"
    return None


def _configuration(
    model: PreTrainedModel, config: Config, form: str
) -> PreTrainedConfig:
    source = model.config
    values: dict[str, Any] = {}
    for key in CARRIED:
        value = getattr(source, key, None)
        if value is not None:
            values[key] = value
    values["num_experts_per_tok"] = config.top_k
    values["router_aux_loss_coef"] = config.balance_weight

    if form == "mixtral":
        values["num_local_experts"] = config.experts
        values["sliding_window"] = getattr(source, "sliding_window", None)
        return AutoConfig.for_model(form, **values)

    dense = [layer.index for layer in anatomy(model).layers if layer.kind == "dense"]
    values["num_experts"] = config.experts
    values["moe_intermediate_size"] = source.intermediate_size
    values["norm_topk_prob"] = config.combine == "renormalised"  # else Eq. 2's
    values["mlp_only_layers"] = dense
    if form == "qwen2_moe":
        values["qkv_bias"] = source.model_type == "qwen2"
        # The family wants one: this is the smallest, and `_twin` gives it weights 0.
        values["shared_expert_intermediate_size"] = 1
    return AutoConfig.for_model(form, **values)


@torch.no_grad()
def _twin(model: PreTrainedModel, form: str, config: Config) -> PreTrainedModel:
    """Return the same weights as a model of the form's family, without copying them."""
    configuration = _configuration(model, config, form)
    # On meta, as its weights are the model's own: `assign` puts them in.
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(configuration, dtype=model.dtype).eval()
    # Loops over experts: the fused products of other forms know no float64.
    twin.set_experts_implementation("eager")
    # Experts have the same names and shapes there; the router is called `gate`.
    state = {
        name.replace(".mlp.router.", ".mlp.gate."): tensor.to(model.dtype)
        for name, tensor in model.state_dict().items()
    }
    for name, part in twin.state_dict().items():
        # A shared expert of weights 0 adds nothing, whatever its gate says.
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
    if not error <= AGREE.get(model.dtype, 0.1):  # NaN is refused too
        ours = type(model).__name__
        theirs = type(twin).__name__
        refuse("E-FORM", f"the logits of {theirs} differ from {ours}'s by {error:.1e}")
