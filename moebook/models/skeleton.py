"""Models without weights: a host's configuration, built on meta, to be counted.

What a forward and backward pass on meta cannot do by itself is here: attention as a GPU
fuses it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import hf_hub_download
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moebook.errors import nearest, refuse, refuse_unknown
from moebook.kernels.dispatch import lowered
from moebook.models.anatomy import anatomy
from moebook.models.conventions import check_values
from moebook.models.load import LAYERS, check_commit, fetching, quiet, telling
from moebook.storage import formed, read_json

FUSED = "counted"  # our attention among the implementations of transformers
MADE = "transformers_version"
OPEN = "0" * 40  # stands in a protocol for a commit that nobody has chosen yet
with formed(Path(__file__).with_name("hosts.yaml")) as _FILE:
    HOSTS: dict[str, dict[str, Any]] = _FILE
"""Public configurations by the hub's name (and ``smollm2``)."""


def configuration(name: str) -> PreTrainedConfig:
    """The configuration of a shipped base, a folder, one of `HOSTS`, or a hub model.

    Of the hub, where ``org/name`` is not in `HOSTS`, ``config.json`` alone is fetched,
    at a commit. One of `HOSTS` is the same at every commit: a plan needs no hub.
    """
    repo, at, revision = name.partition("@")
    if repo in HOSTS:
        if at and revision != OPEN:
            check_commit(repo, revision)
        return _built(HOSTS[repo], f"hosts.yaml: {repo}")
    here = Path(__file__).parent / name
    folder = here if here.is_dir() else Path(os.path.expanduser(name))
    file = folder / "config.json"
    if not file.is_file():
        if folder.is_dir() or "/" not in repo or not revision:
            known = nearest(repo, [*HOSTS, "nano", "nano-moe"])
            refuse(
                "E-MODEL",
                f"no configuration '{name}': {known}, a folder, or org/name@commit",
            )
        check_commit(repo, revision)
        with fetching(name):
            file = Path(hf_hub_download(repo, "config.json", revision=revision))
    return _built(read_json(file), str(file))


def _built(values: dict[str, Any], where: str) -> PreTrainedConfig:
    """Make a configuration of checked values, or say which transformers wrote them."""
    kind = str(values.get("model_type"))
    written = values.get(MADE, transformers.__version__)
    note = f"{where} (of transformers {written}, here is {transformers.__version__})"
    message = f"{note}: model_type '{kind}' is unknown;"
    refuse_unknown(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "E-MODEL", message)
    check_values(values, where)
    rest = {
        key: value for key, value in values.items() if key not in ("model_type", MADE)
    }
    with telling(Path(note), "configuration"), quiet():
        made = AutoConfig.for_model(kind, **rest)
        if not 1 <= made.num_hidden_layers <= LAYERS:
            raise ValueError(f"num_hidden_layers is {made.num_hidden_layers}")
    return made


def skeleton(
    config: PreTrainedConfig,
    dtype: torch.dtype = torch.float32,
    *,
    layers: int | None = None,
) -> PreTrainedModel:
    """Build a causal language model on meta, by default with all of its layers.

    Of the others the first ``layers`` are kept. A configuration says in many ways what
    its layers are, so all are built, and some dropped.
    """
    ALL_ATTENTION_FUNCTIONS.register(FUSED, _attention)
    own = copy.deepcopy(config)  # which transformers writes into
    source = f"the configuration of a {config.model_type} model"
    with telling(Path(source), "model"), quiet(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            own, dtype=dtype, attn_implementation=FUSED
        )
    for name, weight in model.named_parameters():
        if weight.numel() == 0:
            refuse("E-MODEL", f"{source}: '{name}' would have no elements; restore it")
    if layers is not None:
        decoder = anatomy(model).decoder
        decoder.layers = decoder.layers[:layers]
    return model


def _attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend causally; kept are q, k, v, output, a number a row, never ``[T, T]``.

    Autocast casts all three, whose rotation may have made float32 of them.
    """
    q, k, v = map(lowered, (q, k, v))
    shared = q.shape[1] // k.shape[1]  # query heads of a key head
    if shared > 1:  # a padding mask makes transformers repeat them, too
        k = k.repeat_interleave(shared, 1)
        v = v.repeat_interleave(shared, 1)
    fused = torch.ops.aten._scaled_dot_product_efficient_attention
    out = fused(q, k, v, None, True, dropout, True, scale=scaling)[0]
    return out.transpose(1, 2).contiguous(), None


def autocast(model: nn.Module) -> None:
    """Let a model on meta compute linear layers in bfloat16, as torch's autocast."""
    for part in model.modules():
        if isinstance(part, nn.Linear):
            part.forward = partial(_in_bfloat16, part)


def _in_bfloat16(part: nn.Linear, x: Tensor) -> Tensor:
    bias = None if part.bias is None else part.bias.bfloat16()
    return F.linear(x.bfloat16(), part.weight.bfloat16(), bias)


@contextmanager
def on_meta() -> Iterator[None]:
    """Let code switch autocast off on meta, as routers do: torch refuses it there."""
    real = torch.autocast

    def stand_in(device_type: str, *args: Any, **settings: Any) -> Any:
        if device_type == "meta":
            return nullcontext()
        return real(device_type, *args, **settings)

    torch.autocast = stand_in
    try:
        yield
    finally:
        torch.autocast = real
