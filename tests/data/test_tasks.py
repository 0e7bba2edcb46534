import ast
import builtins
import hashlib
import json
import math

import pytest

from moebook.data import tasks
from moebook.data.tasks.code import verb
from moebook.data.tasks.language import same_json
from moebook.data.tasks.task import first_line
from moebook.data.tasks.translation import french, spanish
from moebook.errors import Refusal

NAMES = (
    "equations gcd sums products gsm_symbolic python_eval docstring isa numbers_fr names_de "
    "numbers_es intent_json licence kinship"
).split()
TINY_EVAL = {name: getattr(builtins, name) for name in "len max min sum sorted list range".split()}


def drawn(name, split):
    return tasks.rows(name, split, tasks.find(name).available(split))


def digest(row):
    return hashlib.sha256(row["prompt"].encode()).hexdigest()


def test_the_catalogue_holds_the_fourteen_target_tasks_of_five_domains():
    assert sorted(tasks.CATALOGUE) == sorted(NAMES)
    domains = {task.domain for task in tasks.CATALOGUE.values()}
    assert domains == {"mathematics", "code", "common_sense", "translation", "language"}


@pytest.mark.parametrize("name", NAMES)
def test_splits_are_disjoint_by_content_and_by_prompt_whatever_the_seed(name):
    task = tasks.find(name)
    contents = {
        split: {json.dumps(item.slots, sort_keys=True) for item in task._items(split)}
        for split in tasks.SPLITS
    }
    prompts = {
        split: {
            digest(row)
            for seed in (0, 1, 2)
            for row in task.rows(split, task.available(split), seed)
        }
        for split in tasks.SPLITS
    }
    for kind in (contents, prompts):
        assert not kind["train"] & kind["test"]
        assert not kind["train"] & kind["validation"]
        assert not kind["validation"] & kind["test"]
    assert len(contents["test"]) == len(contents["validation"]) == 200
    assert len(contents["train"]) == task.available("train") >= 500


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides_order_and_wording_but_not_membership(name):
    first, again, other = (tasks.rows(name, "test", 200, seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert tasks.rows(name, "test", 50) == first[:50]
    assert sorted(row["answer"] for row in first) == sorted(row["answer"] for row in other)


@pytest.mark.parametrize("name", NAMES)
def test_rows_have_the_promised_fields_and_every_wording_is_used(name):
    task = tasks.find(name)
    rows = task.rows("train", 300)
    fields = {"task", "domain", "prompt", "answer"} | ({"rationale"} if task.rationales else set())
    for row in rows:
        assert set(row) == fields
        assert all(isinstance(value, str) and value.strip() for value in row.values())
        assert task.normalise(row["answer"])
        assert "{" not in row["prompt"] or name in ("docstring", "intent_json")
    assert 2 <= len(task.templates) <= 4
    starts = {template.split("{")[0] for template in task.templates if not template.startswith("{")}
    assert all(any(row["prompt"].startswith(start) for row in rows) for start in starts)


@pytest.mark.parametrize("name", NAMES)
def test_the_majority_baseline_leaves_room_above_it(name):
    share = tasks.majority(name)
    assert 0 <= share <= 0.25
    rows = drawn(name, "train")
    normalise = tasks.find(name).normalise
    answers = [normalise(row["answer"]) for row in rows]
    best = (
        min(set(answers), key=lambda answer: (-answers.count(answer), answer))
        if (len(set(answers)) < 100)
        else None
    )
    if best is not None:
        test = drawn(name, "test")
        assert share == sum(normalise(row["answer"]) == best for row in test) / 200


@pytest.mark.parametrize("split", tasks.SPLITS)
def test_the_mathematics_is_right(split):
    for item in tasks.find("equations")._items(split):
        left, right = item.slots["equation"].split(" = ")
        a, rest = left.split("x ")
        assert int(a) * int(item.answer) + int(rest.replace(" ", "")) == int(right)
    for name, truth in (
        ("gcd", math.gcd),
        ("sums", lambda a, b: a + b),
        ("products", lambda a, b: a * b),
    ):
        for item in tasks.find(name)._items(split):
            assert truth(int(item.slots["a"]), int(item.slots["b"])) == int(item.answer)


@pytest.mark.parametrize("split", tasks.SPLITS)
def test_the_interpreter_agrees_with_every_expression(split):
    for item in tasks.find("python_eval")._items(split):
        value = eval(item.slots["expression"], {"__builtins__": {}}, dict(TINY_EVAL))
        assert repr(value) == item.answer
        assert ast.literal_eval(item.answer) == value


def test_numbers_in_words_agree_with_num2words_and_with_hand_written_ones():
    assert french(71) == "soixante et onze"
    assert french(80) == "quatre-vingts"
    assert french(2281) == "deux mille deux cent quatre-vingt-un"
    assert spanish(100) == "cien"
    assert spanish(1516) == "mil quinientos dieciséis"
    assert spanish(9731) == "nueve mil setecientos treinta y uno"
    num2words = pytest.importorskip("num2words").num2words
    for number in range(10_000):
        assert french(number) == num2words(number, lang="fr")
        assert spanish(number) == num2words(number, lang="es")


def test_kinship_agrees_with_a_walk_over_the_family_graph():
    step = {
        "mother": 1,
        "father": 1,
        "daughter": -1,
        "son": -1,
        "sister": 0,
        "brother": 0,
        "grandmother": 2,
        "grandfather": 2,
        "granddaughter": -2,
        "grandson": -2,
        "aunt": 1,
        "uncle": 1,
        "niece": -1,
        "nephew": -1,
        "wife": 0,
        "husband": 0,
    }
    for split in tasks.SPLITS:
        for item in tasks.find("kinship")._items(split):
            facts = [fact.strip(".").split() for fact in item.slots["facts"].split(". ")]
            (near,) = [fact for fact in facts if fact[0] == item.slots["a"]]
            (far,) = [fact for fact in facts if fact[-1] == item.slots["c"]]
            assert near[-1] == far[0]
            relation = item.answer.removesuffix("-in-law")
            assert step[relation] == step[near[3]] + step[far[3]]
            assert item.answer.endswith("-in-law") == (
                {near[3], far[3]} & {"wife", "husband"} != set()
            )


def test_answers_are_compared_after_the_tasks_own_normalisation():
    assert first_line(" 12. \nAnd then") == "12"
    assert first_line("") == verb("") == same_json("") == ""
    assert verb("Return the value.") == verb("return: nothing") == "return"
    assert same_json('{"b": 1,  "a": 2}\nmore') == same_json('{"a": 2, "b": 1}')
    assert same_json('{"a": 2') == '{"a": 2'


@pytest.mark.parametrize("size", [0, -1, 201])
def test_a_size_outside_the_split_is_refused_with_have_and_need(size):
    with pytest.raises(Refusal, match=f"E-DATA.*have 200 rows, need {size}"):
        tasks.rows("gcd", "test", size)


def test_an_unknown_task_or_split_names_the_nearest():
    with pytest.raises(Refusal, match="E-DATA: unknown task 'gdc': did you mean 'gcd'"):
        tasks.rows("gdc", "test", 1)
    with pytest.raises(Refusal, match="E-DATA: unknown split 'tset': did you mean 'test'"):
        tasks.rows("gcd", "tset", 1)
