"""Rows as text and token ids, mixtures of them, and free texts."""

import pandas as pd
import pytest

from moebook import data
from moebook.data.encoding import camel, deepseek
from moebook.data.mixtures import hashes, opening
from moebook.data.tasks.task import shipped
from moebook.errors import Refusal
from tests.refusals import refused


class Bytes:
    """A tokenizer whose tokens are bytes, shifted by three special ones."""

    def __init__(self, bos=0, eos=1):
        self.bos_token_id = bos
        self.eos_token_id = eos

    def __call__(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [ids(one) for one in text]}


def ids(text):
    return [byte + 3 for byte in text.encode()]


ROW = {"prompt": "2 + 2?", "answer": "4"}


def test_chats_are_the_papers_prompts_with_special_tokens_and_loss_on_the_answer():
    encoded = data.encode([ROW], Bytes(), max_length=100)
    text = ids("### Human:\n2 + 2?\n### Assistant:\n")
    assert encoded["input_ids"] == [[0, *text, *ids("4"), 1]]
    assert encoded["labels"] == [[-100] * (1 + len(text)) + [*ids("4"), 1]]
    assert encoded["length"] == [len(text) + 3]
    assert camel("q", "a", "s") == (
        "### System:\ns\n### Human:\nq\n### Assistant:\n",
        "a",
    )
    assert data.encode([ROW], Bytes(bos=None), max_length=100)["input_ids"][0][
        :3
    ] == ids("###")
    # DeepSeek's has no beginning token, and the space is learnt with the answer.
    encoded = data.encode([ROW], Bytes(), format="deepseek", max_length=100)
    assert encoded["input_ids"] == [[*ids("User: 2 + 2?\n\nAssistant: 4"), 1]]
    assert [label for label in encoded["labels"][0] if label != -100] == [*ids(" 4"), 1]
    assert deepseek("q", "a", "s") == ("s\n\nUser: q\n\nAssistant:", " a")


def test_rows_that_are_too_long_are_counted_and_left_out_never_cut():
    whole = data.encode([ROW], Bytes(), max_length=100)
    long = {"prompt": "x" * 50, "answer": "y"}
    (length,) = whole["length"]
    with pytest.warns(
        UserWarning, match=f"W-LONG: 2 of 3 rows are .* max_length {length}"
    ):
        encoded = data.encode([long, ROW, long], Bytes(), max_length=length)
    assert encoded["input_ids"] == whole["input_ids"]
    every = data.encode([long, ROW, long], Bytes())  # without a limit all stay
    assert len(every) == 3
    assert every[1]["input_ids"] == whole[0]["input_ids"]


@pytest.mark.parametrize(
    ("rows", "options", "match"),
    [
        ([], {}, "E-DATA: no rows"),
        (None, {}, "E-TYPE: rows is a NoneType, expected a list"),
        (iter([ROW]), {}, "E-TYPE: rows is a list_iterator, expected a list"),
        (pd.DataFrame([ROW]), {}, "E-TYPE: rows is a DataFrame, expected a list"),
        ([ROW], {"max_length": 9}, "E-DATA: all 1 rows are longer"),
        ([ROW], {"max_length": 1}, "E-RANGE: max_length is 1"),
        ([ROW], {"max_length": 0}, "E-RANGE: encode: max_length is 0"),
        ([ROW], {"max_length": "64"}, "E-TYPE: encode: max_length is '64'"),
        ([ROW], {"max_length": 64.5}, "E-TYPE: encode: max_length is 64.5"),
        ([ROW], {"format": ["camel"]}, "E-DATA: unknown chat format"),
        ([ROW], {"format": "camle"}, "E-DATA: unknown chat format.*'camel'"),
        ([ROW, {"prompt": "x"}], {}, "E-DATA: row 1: field 'answer'"),
        ([{"prompt": 3, "answer": "x"}], {}, "E-DATA: row 0: field 'prompt'"),
        (
            [ROW | {"answer": "\ud83d"}],
            {},
            "E-DATA: row 0: field 'answer' holds a lone",
        ),
        (
            [ROW | {"system": "\ud83d"}],
            {},
            "E-DATA: row 0: field 'system' holds a lone",
        ),
        ([ROW | {"system": 3}], {}, "E-DATA: row 0: field 'system' is int"),
        ([ROW, None], {}, "E-DATA: row 1: a row is NoneType"),
        (
            [ROW],
            {"tokenizer": Bytes(eos=None)},
            "E-DATA: the tokenizer has no end-of-sequence",
        ),
    ],
)
def test_rows_that_cannot_be_encoded_are_refused(rows, options, match):
    refused(
        match, data.encode, rows, **{"tokenizer": Bytes(), "max_length": 99} | options
    )


def test_rows_are_filled_up_on_either_side_and_the_mask_says_what_is_real():
    ids, mask = data.padded([[5, 0], [7, 8, 9]], -100)
    assert ids.tolist() == [[5, 0, -100], [7, 8, 9]]
    assert mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    ids, mask = data.padded([[5, 0], [7, 8, 9]], 2, left=True)
    assert ids.tolist() == [[2, 5, 0], [7, 8, 9]]
    assert mask.tolist() == [[0, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize(
    ("rows", "fill", "match"),
    [
        ([[5, 0], [7]], None, "E-TYPE: nothing to fill .*fill is None.*eos_token_id"),
        ([[5, True], [7]], 0, "E-TYPE: token ids are torch.bool"),
        ([[5, 0], [7]], True, "E-TYPE: token ids are torch.bool"),
    ],
)
def test_what_is_no_token_is_not_padded(rows, fill, match):
    refused(match, data.padded, rows, fill)


def test_a_mixture_holds_the_asked_sizes_in_an_order_of_its_seed():
    rows = data.mixture({"gcd": 30, "isa": 20}, "train", 3)
    names = [row["task"] for row in rows]
    assert (names.count("gcd"), len(rows)) == (30, 50)
    assert names != sorted(names)
    assert rows == data.mixture({"gcd": 30, "isa": 20}, "train", 3)
    assert rows != data.mixture({"gcd": 30, "isa": 20}, "train", 4)
    refused("E-DATA: the mixture names no task", data.mixture, {}, "train")


def test_rows_that_cannot_be_gone_through_have_no_hashes():
    refused("E-TYPE: rows is a NoneType, expected a list", hashes, None)


def test_held_out_prompts_that_were_answered_several_times_leave_the_training_rows():
    rows = [
        {"prompt": prompt, "answer": str(i)}
        for i, prompt in enumerate(["a", "b", "A ", "c"])
    ]
    train, held_out = data.hold_out(rows, 2)
    assert [row["answer"] for row in held_out] == ["0", "1"]
    assert [row["answer"] for row in train] == ["3"]
    data.refuse_leak(train, held_out)
    refused(
        "E-DATA: 4 of 4 rows held out leave none to train on", data.hold_out, rows, 4
    )
    leaked = [{"prompt": "What  is\n1 + 1?"}, {"prompt": "b"}]
    with pytest.raises(Refusal, match="E-LEAK: 1 of 2 evaluation prompts"):
        data.refuse_leak(leaked, [{"prompt": "what is 1 + 1?"}, {"prompt": "c"}])


def test_passages_are_texts_that_ship_drawn_by_the_seed_and_never_twice_the_same_template():
    one = data.passages(200, seed=1)
    other = data.passages(200, seed=2)
    assert list(one) == ["text", "code", "mathematics"]
    assert one == data.passages(200, seed=1)
    for domain, texts in one.items():
        assert len({opening(text) for text in texts}) == 200
        assert set(texts) != set(other[domain])
    assert set(one["text"]) <= {row["clause"] for row in shipped("licence.jsonl")}
    assert set(one["code"]) <= {row["code"] for row in shipped("docstring.jsonl")}
    assert sum("?" in text for text in one["mathematics"]) > 190
    assert (
        opening("Amelia has 30 pens.")
        == opening("Bo has 4 pens.")
        != opening("Bo lost 4.")
    )
    for size in (0, 100_000):
        refused(
            f"E-RANGE: passages: {size} texts of text, expected 1", data.passages, size
        )
