"""The blocks of the pages "On your own model", and tiny inputs for them as strangers make them."""

import json
import random
import re
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from tests.tokens import byte_tokenizer

BOOK = Path(__file__).resolve().parents[2] / "book"
PAGES = sorted(path.stem for path in BOOK.glob("own_*.md"))
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
TEAMS = ("billing", "shipping", "accounts")
MESSAGES = ("My card was charged", "The parcel is late", "I cannot log in")
DOMAINS = ("money", "goods", "access")
ARC = {
    "id": "1",
    "question": "What barks?",
    "choices": {"text": ["a dog", "a cat"], "label": ["A", "B"]},
    "answerKey": "A",
}


def make(folder: Path) -> None:
    """Write everything that the pages' first blocks read."""
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))
    sparse = AutoModelForCausalLM.from_config(MixtralConfig(**SHAPE, **EXPERTS))
    for name, model in (("my-model", dense), ("my-moe", sparse)):
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    _loras(folder)
    _rows(folder)
    hub = folder / "hub-data" / "allenai" / "ai2_arc" / "ARC-Easy"
    hub.mkdir(parents=True)
    (hub / "test.jsonl").write_text(json.dumps(ARC) + "\n")


def _loras(folder: Path) -> None:
    """Write five LoRAs of the dense model, by PEFT alone."""
    for number in range(5):
        base = AutoModelForCausalLM.from_pretrained(folder / "my-model")
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
        model = get_peft_model(base, config)
        torch.manual_seed(number)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
        model.save_pretrained(folder / "my-loras" / f"lora-{number}")


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


def run(page: str) -> dict[str, Any]:
    """Run a page's blocks in order, and return the names that they leave."""
    names: dict[str, Any] = {"__name__": page}
    for line, block in blocks(page):
        code = compile("\n" * line + block, str(BOOK / f"{page}.md"), "exec")
        exec(code, names)
    return names
