"""The table says what a plain loop says, for embedded tasks and for a benchmark of the hub."""

import random
from pathlib import Path

import datasets
import lm_eval.tasks
import numpy as np
import pytest
import torch
from lm_eval.tasks import TaskManager

from moebook import evaluation
from moebook.data import encode, tasks
from moebook.errors import Refusal

COLUMNS = ["task", "domain", "item", "correct", "nll", "nll_sum", "answer", "output"]


def test_a_model_that_knows_the_answers_gets_every_one(knower, tokenizer):
    names = ["isa", "gcd"]
    rows = [row for name in names for row in tasks.rows(name, "test", 7)]
    known = encode(rows, tokenizer, max_length=10**6)["input_ids"]
    model = knower([list(ids) for ids in known], len(tokenizer))
    table = evaluation.evaluate(model, tokenizer, names, limit=7, batch_size=4)
    assert list(table.columns) == COLUMNS
    assert table.task.tolist() == ["isa"] * 7 + ["gcd"] * 7
    assert table.domain.tolist() == ["common_sense"] * 7 + ["mathematics"] * 7
    assert table.item.tolist() == [*range(7), *range(7)]
    assert table.correct.tolist() == [1] * 14
    assert table.output.tolist() == [row["answer"] for row in rows]
    assert table.nll_sum.max() < 1e-6
    wrong = evaluation.evaluate(model, tokenizer, "gcd", limit=7, split="validation")
    assert wrong.correct.sum() == 0


def test_the_likelihood_is_that_of_the_answer_with_its_end(llama, tokenizer):
    rows = tasks.rows("sums", "test", 5)
    encoded = encode(rows, tokenizer, format="deepseek", max_length=10**6)
    table = evaluation.evaluate(llama, tokenizer, "sums", limit=5, format="deepseek", batch_size=2)
    for item, (ids, labels) in enumerate(zip(encoded["input_ids"], encoded["labels"], strict=True)):
        with torch.no_grad():  # transformers' own loss: the mean over the labels
            mean = llama(torch.tensor([ids]), labels=torch.tensor([labels])).loss.item()
        assert table.nll[item] == pytest.approx(mean, rel=1e-5)
        count = len(ids) - labels.count(-100)
        assert table.nll_sum[item] == pytest.approx(mean * count, rel=1e-5)
    assert table.answer.tolist() == [row["answer"] for row in rows]


def test_evaluation_leaves_mode_random_states_and_screen_alone(llama, tokenizer, capfd):
    llama.train()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    expected = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    first = evaluation.evaluate(llama, tokenizer, ["gcd"], limit=2)
    assert (torch.rand(1), np.random.rand(), random.random()) == expected
    assert llama.training
    again = evaluation.evaluate(llama, tokenizer, ["gcd"], limit=2)
    assert first.equals(again)
    assert capfd.readouterr() == ("", "")


def test_a_limit_beyond_the_split_takes_all_of_it(knower, tokenizer):
    model = knower([[0, 1]], len(tokenizer))
    table = evaluation.evaluate(model, tokenizer, "gcd", limit=None, batch_size=100)
    assert len(table) == tasks.find("gcd").available("test")


@pytest.fixture
def index(monkeypatch):
    """lm-eval's index of two benchmarks instead of all, which takes half a minute."""
    folder = Path(lm_eval.tasks.__file__).parent
    small = TaskManager(include_path=[folder / "arc", folder / "hellaswag"], include_defaults=False)
    monkeypatch.setattr("moebook.evaluation.tables._index", lambda: small)


ARC = {
    "question": ["What barks?", "What is wet?"],
    "choices": [
        {"text": ["a dog", "a cat"], "label": ["A", "B"]},
        {"text": ["sand", "a cake", "the sea"], "label": ["1", "2", "3"]},
    ],
    "answerKey": ["A", "3"],
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_benchmark_of_the_hub_goes_the_same_way(llama, tokenizer, monkeypatch, index):
    split = datasets.Dataset.from_dict(ARC)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *a, **k: datasets.DatasetDict(train=split, test=split)
    )
    table = evaluation.evaluate(llama, tokenizer, ["gcd", "arc_easy"], limit=2)
    assert table.task.tolist() == ["gcd", "gcd", "arc_easy", "arc_easy"]
    found = table[table.task == "arc_easy"]
    for item, question in enumerate(ARC["question"]):
        before = tokenizer.encode(f"Question: {question}\nAnswer:")
        nats, lengths = [], []
        for choice in ARC["choices"][item]["text"]:
            scored = tokenizer.encode(f"Question: {question}\nAnswer: {choice}")[len(before) :]
            ids = torch.tensor([before + scored])
            labels = torch.tensor([[-100] * len(before) + scored])
            with torch.no_grad():
                nats.append(llama(ids, labels=labels).loss.item() * len(scored))
            lengths.append(len(scored))
        gold = ARC["choices"][item]["label"].index(ARC["answerKey"][item])
        row = found.iloc[item]
        assert row.nll_sum == pytest.approx(nats[gold], rel=1e-5)
        assert row.nll == pytest.approx(nats[gold] / lengths[gold], rel=1e-5)
        assert row.output == str(int(np.argmin(nats)))
        per_byte = [
            n / len(text) for n, text in zip(nats, ARC["choices"][item]["text"], strict=True)
        ]
        assert row.correct == int(np.argmin(per_byte) == gold)
        assert row.answer == ARC["choices"][item]["text"][gold]
    assert set(found.domain) == {"benchmark"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_benchmark_without_its_data_is_refused_in_one_line(
    llama, tokenizer, monkeypatch, tmp_path, index
):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(Refusal, match="E-OFFLINE: benchmark 'hellaswag'") as caught:
        evaluation.evaluate(llama, tokenizer, "hellaswag", limit=2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "given", "words"),
    [
        ("gcdd", {}, "did you mean 'gcd'"),
        ([], {}, "E-DATA: no task"),
        ("gcd", {"limit": 0}, "E-RANGE: limit is 0"),
        ("gcd", {"batch_size": 0}, "E-RANGE: batch_size is 0"),
        ("gcd", {"split": "tset"}, "did you mean 'test'"),
        ("gcd", {"format": "camle"}, "did you mean 'camel'"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_does_not_exist_is_refused_with_the_nearest(
    llama, tokenizer, names, given, words, index
):
    with pytest.raises(Refusal) as caught:
        evaluation.evaluate(llama, tokenizer, names, **given)
    assert words in str(caught.value)
