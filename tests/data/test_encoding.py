"""Rows as text and token ids, mixtures of them, and free texts."""

import pytest

from moebook import data
from moebook.data.encoding import camel, deepseek
from moebook.data.mixtures import opening
from moebook.data.tasks.task import shipped
from moebook.errors import Refusal


class Bytes:
    """A tokenizer whose tokens are bytes, shifted by three special ones."""

    bos_token_id: int | None = 0
    eos_token_id: int | None = 1

    def __call__(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [[byte + 3 for byte in one.encode()] for one in text]}


def ids(text):
    return [byte + 3 for byte in text.encode()]


ROW = {"prompt": "2 + 2?", "answer": "4"}


def test_camel_is_the_papers_prompt_with_both_special_tokens_and_loss_on_the_answer():
    encoded = data.encode([ROW], Bytes(), max_length=100)
    text = ids("### Human:\n2 + 2?\n### Assistant:\n")
    assert encoded["input_ids"] == [[0, *text, *ids("4"), 1]]
    assert encoded["labels"] == [[-100] * (1 + len(text)) + [*ids("4"), 1]]
    assert encoded["length"] == [len(text) + 3]


def test_camel_puts_a_system_block_first_and_deepseek_a_paragraph():
    assert camel("q", "a", "s") == ("### System:\ns\n### Human:\nq\n### Assistant:\n", "a")
    assert deepseek("q", "a", "s") == ("s\n\nUser: q\n\nAssistant:", " a")


def test_deepseek_has_no_beginning_token_and_learns_the_space_with_the_answer():
    encoded = data.encode([ROW], Bytes(), format="deepseek", max_length=100)
    assert encoded["input_ids"] == [[*ids("User: 2 + 2?\n\nAssistant: 4"), 1]]
    assert [label for label in encoded["labels"][0] if label != -100] == [*ids(" 4"), 1]


def test_a_tokenizer_without_a_beginning_token_gets_none():
    tokenizer = Bytes()
    tokenizer.bos_token_id = None
    encoded = data.encode([ROW], tokenizer, max_length=100)
    assert encoded["input_ids"][0][:3] == ids("###")


def test_rows_that_are_too_long_are_counted_and_left_out_never_cut():
    long = {"prompt": "x" * 50, "answer": "y"}
    with pytest.warns(UserWarning, match="W-LONG: 2 of 3 rows are longer than max_length 60"):
        encoded = data.encode([long, ROW, long], Bytes(), max_length=60)
    assert encoded["input_ids"] == data.encode([ROW], Bytes(), max_length=60)["input_ids"]


def test_a_row_of_exactly_max_length_is_kept():
    length = data.encode([ROW], Bytes(), max_length=100)["length"][0]
    assert data.encode([ROW], Bytes(), max_length=length)["length"] == [length]


@pytest.mark.parametrize(
    ("rows", "options", "match"),
    [
        ([], {"max_length": 9}, "E-DATA: no rows"),
        ([ROW], {"max_length": 9}, "E-DATA: all 1 rows are longer"),
        ([ROW], {"max_length": 1}, "E-RANGE: max_length is 1"),
        ([ROW], {"max_length": 99, "format": "camle"}, "E-DATA: unknown chat format.*'camel'"),
        ([ROW, {"prompt": "x"}], {"max_length": 99}, "E-DATA: row 1: field 'answer'"),
        ([{"prompt": 3, "answer": "x"}], {"max_length": 99}, "E-DATA: row 0: field 'prompt'"),
    ],
)
def test_rows_that_cannot_be_encoded_are_refused(rows, options, match):
    with pytest.raises(Refusal, match=match):
        data.encode(rows, Bytes(), **options)


def test_a_tokenizer_without_an_end_token_is_refused():
    tokenizer = Bytes()
    tokenizer.eos_token_id = None
    with pytest.raises(Refusal, match="E-DATA: the tokenizer has no end-of-sequence"):
        data.encode([ROW], tokenizer, max_length=9)


def test_rows_are_filled_up_on_either_side_and_the_mask_says_what_is_real():
    ids, mask = data.padded([[5, 0], [7, 8, 9]], -100)
    assert ids.tolist() == [[5, 0, -100], [7, 8, 9]]
    assert mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    ids, mask = data.padded([[5, 0], [7, 8, 9]], 2, left=True)
    assert ids.tolist() == [[2, 5, 0], [7, 8, 9]]
    assert mask.tolist() == [[0, 1, 1], [1, 1, 1]]


def test_a_mixture_holds_the_asked_sizes_in_an_order_of_its_seed():
    rows = data.mixture({"gcd": 30, "isa": 20}, "train", 3)
    assert [row["task"] for row in rows].count("gcd") == 30
    assert len(rows) == 50
    assert rows == data.mixture({"gcd": 30, "isa": 20}, "train", 3)
    assert rows != data.mixture({"gcd": 30, "isa": 20}, "train", 4)
    assert [row["task"] for row in rows] != sorted(row["task"] for row in rows)


def test_an_empty_mixture_and_an_unknown_task_are_refused():
    with pytest.raises(Refusal, match="E-DATA: the mixture names no task"):
        data.mixture({}, "train")
    with pytest.raises(Refusal, match="E-DATA: unknown task 'gdc'"):
        data.mixture({"gdc": 1}, "train")


def test_held_out_prompts_that_were_answered_several_times_leave_the_training_rows():
    rows = [{"prompt": prompt, "answer": str(i)} for i, prompt in enumerate(["a", "b", "A ", "c"])]
    train, held_out = data.hold_out(rows, 2)
    assert [row["answer"] for row in held_out] == ["0", "1"]
    assert [row["answer"] for row in train] == ["3"]
    data.refuse_leak(train, held_out)


def test_an_evaluation_prompt_among_the_training_prompts_is_a_leak():
    train = [{"prompt": "What  is\n1 + 1?"}, {"prompt": "b"}]
    data.refuse_leak(train, [{"prompt": "c"}])
    with pytest.raises(Refusal, match="E-LEAK: 1 of 2 evaluation prompts"):
        data.refuse_leak(train, [{"prompt": "what is 1 + 1?"}, {"prompt": "c"}])


def test_passages_are_texts_that_ship_drawn_by_the_seed_and_never_twice_the_same_template():
    one, other = data.passages(200, seed=1), data.passages(200, seed=2)
    assert list(one) == ["text", "code", "mathematics"]
    assert one == data.passages(200, seed=1)
    for domain, texts in one.items():
        assert len({opening(text) for text in texts}) == 200
        assert set(texts) != set(other[domain])
    assert set(one["text"]) <= {row["clause"] for row in shipped("licence.jsonl")}
    assert set(one["code"]) <= {row["code"] for row in shipped("docstring.jsonl")}
    assert sum("?" in text for text in one["mathematics"]) > 190
    assert opening("Amelia has 30 pens.") == opening("Bo has 4 pens.") != opening("Bo lost 4.")


@pytest.mark.parametrize("size", [0, 100_000])
def test_more_passages_than_there_are_is_refused(size):
    with pytest.raises(Refusal, match=f"E-RANGE: passages: {size} texts of text, expected 1 to"):
        data.passages(size)
