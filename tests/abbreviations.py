"""Abbreviations and units of a text, for the tests that the glossary has them."""

import re
from pathlib import Path

import lxml.html

GLOSSARY = Path(__file__).parents[1] / "book" / "glossary.md"
# Names of products, licences, files, errors of a system, libraries, models and data sets, and words
# in capitals: nothing that a glossary would explain.
NAMES = set(
    """JSON JSONL CSV YAML HTML URL PDF SVG README MANIFEST SHA256SUMS NAME ROUTER IPython
    MIT BSD CC BY PSF CLDR GNU SPDX NLTK SQLAlchemy MKL KMeans NGOpt TUDB NFS POSIX VS
    EACCES EIO ENOSPC AMD EPYC NVIDIA A100 H200 V100 EMNLP NLP
    GPT GPT4Tools V2 V3 L6 OLMo OLMoE AFMoE EXAONE LLaMA LLaMA2 BGE M3 T5 SUSChat
    AI AQuA CAMEL CLUEWSC CREAK ECQA GSM IDAE PIQA QASC QED RACE SVAMP ALL KNOWN NOT TEST""".split()
)
CODE = re.compile(r"\b[EW]-[A-Z]+\b")  # of a refusal or a warning
SHOUTED = re.compile(r"(?:\b[A-Z]{2,}\b\W+){4,}")  # in licences
ABBREVIATION = re.compile(r"\b[A-Z][A-Z0-9]+[A-Za-z0-9]*\b")
UNIT = re.compile(r"(?<=\d)\s?([KMGT]i?B|kB|M|nats|points|[GT]?FLOPs?)\b")


def read(html: str) -> str:
    """Return what a rendered page says, tables and titles included; no code and no formulas."""
    (article,) = lxml.html.fromstring(html).iter("article")
    formulas = article.xpath(".//*[contains(@class, 'math ')]")
    for silent in [*formulas, *article.iter("code", "pre", "script", "svg")]:
        silent.clear(keep_tail=True)
    return " ".join(article.itertext())


def missing(text: str) -> set[str]:
    """Return the abbreviations and units of a text that the glossary does not have."""
    terms = re.findall(r"(?m)^(\S.*)\n  \S", GLOSSARY.read_text(encoding="utf-8"))
    known = {*re.findall(r"\w+", " ".join(terms))} | NAMES
    words = SHOUTED.sub(" ", CODE.sub(" ", text))
    return {
        word
        for word in [*ABBREVIATION.findall(words), *UNIT.findall(text)]
        if not {word, word.removesuffix("s"), f"{word}s"} & known
    }
