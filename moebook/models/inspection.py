"""What must not be loaded is refused from a model folder's JSON and names, before it is loaded."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moebook.errors import refuse

_CODE_KEYS = {"auto_map", "trust_remote_code"}
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}


def inspect(folder: Path) -> None:
    """Refuse a folder that is no safe causal language model, before transformers reads it.

    Raises:
        Refusal: ``E-MODEL``, ``E-REMOTECODE``, ``E-NOFILE`` or ``E-PICKLE``; see `models.load`.
    """
    config = json_object(folder / "config.json")
    kind = str(config.get("model_type"))
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config.pop("auto_map", None)  # transformers has the model itself and leaves that code alone
    refuse_code(folder / "config.json", config)
    if (path := folder / "tokenizer_config.json").is_file():
        refuse_code(path, json_object(path))
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        close = difflib.get_close_matches(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=3, cutoff=0.5)
        refuse(
            "E-MODEL",
            f"{folder}/config.json: model_type '{kind}' is no causal language model that "
            f"transformers {transformers.__version__} has; close names: {', '.join(close) or '-'}",
        )
    refuse_weights(folder)


def json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file of a model folder, or refuse (``E-MODEL``)."""
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


def refuse_code(path: Path, content: Any) -> None:
    """Refuse keys that make transformers fetch or run code, at any depth."""
    for key, value in _items(content):
        kernel = "_implementation" in key and (key.endswith("_internal") or "/" in str(value))
        if key in _CODE_KEYS or kernel:
            refuse(
                "E-REMOTECODE",
                f"{path}: key '{key}' would load code from outside; nothing of the model was "
                "loaded; take a model that transformers has itself",
            )


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
        shards = json_object(index).get("weight_map")
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
