"""Calls of the functions of data that are right, and plain loops that they must agree with."""

import hashlib
import json
from functools import cache
from pathlib import Path

from moebook import data
from moebook.data import hub, reading, tasks, templates
from moebook.data.encoding import IGNORED
from tests import tokens
from tests.faults.hostile import EVERY, Row, new_folder

WHERE = "file:1"
GSM = [
    {"question": f"What is {n} + {n}?", "answer": f"It doubles.\n#### {2 * n}"}
    for n in range(5)
]


@cache
def folder():
    """A folder of data sets, in the hub's form."""
    root = new_folder()
    place = root / "openai" / "gsm8k" / "main"
    place.mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in GSM)
    (place / "train.jsonl").write_text(lines)
    return root


def file():
    return folder() / "openai" / "gsm8k" / "main" / "train.jsonl"


def rows():
    return [
        {"prompt": "1 + 1?", "answer": "2", "domain": "a"},
        {"prompt": "2 + 2?", "answer": "4", "domain": "b"},
        {"prompt": "3 + 3?", "answer": "6", "domain": "a"},
    ]


def encode(rows, format, max_length):
    return data.encode(
        rows, tokens.byte_tokenizer(), format=format, max_length=max_length
    ).to_dict()


def true_encode(rows, format, max_length):
    tokenizer = tokens.byte_tokenizer()
    found = {"input_ids": [], "labels": [], "length": []}
    if format != "camel" or not rows or not isinstance(max_length, int):
        raise ValueError(format)
    for row in rows:
        before = tokenizer(f"### Human:\n{row['prompt']}\n### Assistant:\n")[
            "input_ids"
        ]
        after = [*tokenizer(row["answer"])["input_ids"], tokenizer.eos_token_id]
        ids = [tokenizer.bos_token_id, *before, *after]
        if len(ids) <= max_length:
            found["input_ids"].append(ids)
            found["labels"].append([IGNORED] * (len(ids) - len(after)) + after)
            found["length"].append(len(ids))
    if not found["length"]:
        raise ValueError("none left")
    return found


def true_padded(rows, fill, left=False):
    longest = max(len(row) for row in rows)
    if not longest or not isinstance(fill, int):
        raise ValueError("empty")
    return (
        [[*row, *[fill] * (longest - len(row))] for row in rows],
        [[1] * len(row) + [0] * (longest - len(row)) for row in rows],
    )


def listed(pair):
    return tuple(part.tolist() for part in pair)


def true_grouped(rows, field):
    groups = {}
    for row in rows:
        groups.setdefault(row[field], []).append(row)
    return dict(sorted(groups.items()))


def true_hashes(rows):
    plain = {" ".join(row["prompt"].lower().split()) for row in rows}
    return {hashlib.sha256(text.encode()).hexdigest() for text in plain}


def true_hold_out(rows, size):
    if not isinstance(size, int) or not 1 <= size < len(rows):
        raise ValueError(size)
    held = rows[:size]
    asked = [row["prompt"] for row in held]
    left = [row for row in rows[size:] if row["prompt"] not in asked]
    if not left:
        raise ValueError("nothing left")
    return left, held


def true_leak(train, evaluation):
    if {row["prompt"] for row in train} & {row["prompt"] for row in evaluation}:
        raise ValueError("leak")


def pinned(source, revision, split):
    return list(hub.pinned(source, revision, split))


def true_local(path):
    return [(f"{path}:{n}", row) for n, row in enumerate(GSM, 1)]


def messages():
    return [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


def true_exchange(messages, where):
    roles = [message["from"] for message in messages]
    if roles != ["human", "gpt"]:
        raise ValueError(roles)
    return {"prompt": messages[0]["value"], "answer": messages[1]["value"]}


def true_gsm8k(raw, where):
    worked, mark, number = raw["answer"].rpartition("\n#### ")
    if not mark or not number.isdigit() or len(raw) != 2:
        raise ValueError("no number")
    return {
        "prompt": f"Question: {raw['question']}",
        "answer": number,
        "rationale": worked,
    }


def true_instruction(raw, where):
    asked = [raw["instruction"], raw["input"]] if raw["input"] else [raw["instruction"]]
    return {
        "prompt": "\n".join(part for part in asked if part),
        "answer": raw["output"],
    }


TEXT = "empty | nul | long | unknown"  # of a text: any will do
SEEDS = "negative | zero | huge"  # of a seed that is hashed: any will do
ROWS = {
    "data.encode": Row(
        encode,
        lambda: {"rows": rows(), "format": "camel", "max_length": 200},
        true_encode,
    ),
    "data.padded": Row(
        lambda rows, fill: listed(data.padded(rows, fill)),
        lambda: {"rows": [[1, 2, 3], [4]], "fill": 0},
        true_padded,
    ),
    "data.mixture": Row(
        data.mixture,
        lambda: {"sizes": {"gcd": 3, "sums": 2}, "split": "test", "seed": 0},
        fine={"seed": SEEDS, "sizes": "missing"},
    ),
    "data.draw": Row(
        data.draw,
        lambda: {"names": ["gcd", "sums"], "split": "test", "most": 3, "seed": 0},
        fine={"seed": SEEDS, "names": "short | long", "most": "huge"},
        several=("names",),
    ),
    "data.grouped": Row(
        data.grouped,
        lambda: {"rows": rows(), "field": "domain"},
        true_grouped,
        several=("rows",),
    ),
    "data.hashes": Row(data.hashes, lambda: {"rows": rows()}, true_hashes),
    "data.hold_out": Row(
        data.hold_out, lambda: {"rows": rows(), "size": 1}, true_hold_out
    ),
    "data.passages": Row(
        data.passages, lambda: {"size": 2, "seed": 0}, fine={"seed": SEEDS}
    ),
    "data.refuse_leak": Row(
        data.refuse_leak,
        lambda: {"train": rows()[:2], "evaluation": rows()[2:]},
        true_leak,
    ),
    "data.hub.load": Row(
        hub.load,
        lambda: {"name": "gsm8k", "path": file(), "size": 3, "seed": 0},
        fine={"seed": SEEDS},
    ),
    "data.hub.pins": Row(
        lambda text, data: dict(hub.pins(text, data)),
        lambda: {"text": f"gsm8k={'a1' * 20}", "data": str(folder())},
        lambda text, data: dict([text.split("=")] if text else []),
        more={"text": {"twice": "a=1,a=2", "no commit": "a"}},
    ),
    "data.hub.mixture": Row(
        hub.mixture,
        lambda: {"sizes": {"gsm8k": 3}, "origins": {"gsm8k": folder()}, "seed": 0},
        fine={"seed": SEEDS},
    ),
    "data.hub.pinned": Row(
        pinned,
        lambda: {
            "source": hub.CATALOGUE["gsm8k"],
            "revision": folder(),
            "split": "train",
        },
        settings=("source",),
        fine={"split": "empty"},
        more={"split": {"odd part": "train[a:b]", "no end": "train[50%"}},
    ),
    "data.hub.folder": Row(
        hub.folder,
        lambda: {"data": str(folder())},
        lambda data: Path(data) if data else None,
    ),
    "data.hub.contents": Row(
        hub.contents,
        lambda: {"data": str(folder())},
        lambda data: {"openai/gsm8k/main/train.jsonl": file()} if data else {},
    ),
    "data.hub.shards": Row(
        hub.shards,
        lambda: {
            "place": folder(),
            "repository": "openai/gsm8k",
            "name": "main",
            "split": "train",
        },
    ),
    "data.reading.local": Row(reading.local, lambda: {"path": file()}, true_local),
    "data.tasks.known": Row(
        tasks.known, lambda: {"name": "gcd"}, lambda name: name in tasks.KNOWN
    ),
    "data.tasks.find": Row(lambda name: tasks.find(name).name, lambda: {"name": "gcd"}),
    "data.tasks.rows": Row(
        tasks.rows,
        lambda: {"name": "gcd", "split": "test", "size": 2, "seed": 0},
        fine={"seed": SEEDS},
    ),
    "data.tasks.majority": Row(tasks.majority, lambda: {"name": "isa"}),
    "data.reading.field": Row(
        reading.field,
        lambda: {"row": {"a": "text"}, "name": "a", "where": WHERE},
        lambda row, name, where: row[name],
        fine={"where": EVERY},
    ),
    "data.reading.clean": Row(
        reading.clean,
        lambda: {"value": "text", "name": "a", "where": WHERE},
        lambda value, name, where: value.encode().decode(),
    ),
    "data.templates.exchange": Row(
        templates.exchange,
        lambda: {"messages": messages(), "where": WHERE},
        true_exchange,
    ),
    "data.templates.final_number": Row(
        templates.final_number,
        lambda: {"text": "so it is 1,080.50."},
        lambda text: "1080.5" if "1,080.50" in text else "",
    ),
    "data.templates.gsm8k": Row(
        templates.gsm8k, lambda: {"raw": GSM[3], "where": WHERE}, true_gsm8k
    ),
    "data.templates.conversation": Row(
        templates.conversation,
        lambda: {"raw": {"conversations": messages()}, "where": WHERE},
        lambda raw, where: true_exchange(raw["conversations"], where),
    ),
    "data.templates.instruction": Row(
        templates.instruction,
        lambda: {
            "raw": {"instruction": "Add.", "input": "1 1", "output": "2"},
            "where": WHERE,
        },
        true_instruction,
    ),
}
