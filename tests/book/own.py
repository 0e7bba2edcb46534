"""The blocks of the pages "On your own model", and inputs for them as strangers make them.

Models, LoRAs and rows are written by transformers, PEFT and json alone, on tiny models or, with
`python -m tests.book.own FOLDER DENSE SPARSE`, on others in folders.
"""

import json
import math
import random
import re
import sys
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MixtralConfig,
)

from tests.sizes import SMALL
from tests.tokens import byte_tokenizer

BOOK = Path(__file__).resolve().parents[2] / "book"
PAGES = sorted(path.stem for path in BOOK.glob("own_*.md"))
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHAPE = {**SMALL, "max_position_embeddings": 512}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
TEAMS = ("billing", "shipping", "accounts")
MESSAGES = ("My card was charged", "The parcel is late", "I cannot log in")
DOMAINS = ("money", "goods", "access")
# Of a sparse model that has been tuned to talk, as strangers' often have.
TEMPLATE = (
    "{{ bos_token }}{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ARC = {
    "id": "1",
    "question": "What barks?",
    "choices": {"text": ["a dog", "a cat"], "label": ["A", "B"]},
    "answerKey": "A",
}


def make(folder: Path, dense: Path | None = None, sparse: Path | None = None) -> None:
    """Write everything that the pages' first blocks read; the models are tiny without folders."""
    torch.manual_seed(0)
    configs = {
        "my-model": (dense, LlamaConfig(**SHAPE)),
        "my-moe": (sparse, MixtralConfig(**SHAPE, **EXPERTS)),
    }
    for name, (given, config) in configs.items():
        if given is None:
            model = AutoModelForCausalLM.from_config(config)
            tokenizer = copy(byte_tokenizer())
            if name == "my-moe":
                tokenizer.chat_template = TEMPLATE
        else:
            model = AutoModelForCausalLM.from_pretrained(given, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(given)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    _loras(folder)
    _rows(folder)
    hub = folder / "hub-data" / "allenai" / "ai2_arc" / "ARC-Easy"
    hub.mkdir(parents=True)
    (hub / "test.jsonl").write_text(json.dumps(ARC) + "\n")


def _loras(folder: Path) -> None:
    """Train five LoRAs of the dense model, each on sums with a number of its own, by PEFT alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "my-model")
    for number in range(5):
        base = AutoModelForCausalLM.from_pretrained(folder / "my-model")
        torch.manual_seed(number)
        config = LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["q_proj", "v_proj"],
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(base, config)
        trained = [part for part in model.parameters() if part.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01)
        texts = [f"{other} + {number} = {other + number}" for other in range(8)]
        for text in texts:
            ids = torch.tensor([tokenizer(text).input_ids])
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(folder / "my-loras" / f"plus-{number}")


def _rows(folder: Path) -> None:
    rng = random.Random(0)
    rows = []
    for number in range(60):
        team = rng.randrange(3)
        rows.append(
            {
                "id": number,
                "prompt": f"Which team?\n\n{MESSAGES[team]}, case {number}.",
                "answer": TEAMS[team],
                "domain": DOMAINS[team],
            }
        )
    write(folder / "train.jsonl", rows)
    asked = [
        {"prompt": row["prompt"] + " Now?", "answer": row["answer"]} for row in rows
    ]
    chosen = [row | {"choices": list(TEAMS)} for row in asked[:6]]
    write(folder / "test.jsonl", [*chosen, *asked[6:12]])
    sums = [
        {"prompt": f"{number} + 2 =", "answer": str(number + 2)} for number in range(80)
    ]
    write(folder / "general.jsonl", sums)


def write(path: Path, rows: list[dict]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def blocks(page: str) -> list[tuple[int, str]]:
    """Return the blocks of a page, each with the line where it begins."""
    text = (BOOK / f"{page}.md").read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start(1)), match[1])
        for match in FENCE.finditer(text)
    ]


def run(
    page: str, how: Mapping[str, Any] | None = None, *, stop: str = ""
) -> dict[str, Any]:
    """Run a page's blocks in order, and return the names that they leave.

    ``how`` takes the place of the page's own, empty one: what its models are loaded with. Blocks
    behind the text ``stop`` are left out.
    """
    names: dict[str, Any] = {"__name__": page, "given": how}
    known = (BOOK / f"{page}.md").read_text(encoding="utf-8")
    end = known.count("\n", 0, known.index(stop)) if stop else math.inf
    for line, block in blocks(page):
        if line > end:
            break
        if how is not None:
            block = block.replace("how = {}", "how = given")
        code = compile("\n" * line + block, str(BOOK / f"{page}.md"), "exec")
        exec(code, names)
    return names


if __name__ == "__main__":
    make(*map(Path, sys.argv[1:]))
