"""The embedded tasks: exact answers, disjoint splits, draws that repeat."""

import ast
import builtins
import json
import math
from itertools import chain

import pytest

from moebook.data import hashes, refuse_leak, tasks
from moebook.data.tasks.pools import kinship, reserved, words
from moebook.data.tasks.task import first_line, same_json, verb
from moebook.methods.rocket import bank as banks
from tests.refusals import refused

NAMES = (
    "equations gcd sums products gsm_symbolic python_eval docstring isa numbers_fr names_de "
    "numbers_es intent_json licence kinship"
).split()
TINY_EVAL = {
    name: getattr(builtins, name)
    for name in "len max min sum sorted list range".split()
}
GENERATIONS = (  # up from the first to the second
    dict.fromkeys("mother father aunt uncle".split(), 1)
    | dict.fromkeys("daughter son niece nephew".split(), -1)
    | dict.fromkeys("sister brother wife husband".split(), 0)
    | {"grandmother": 2, "grandfather": 2, "granddaughter": -2, "grandson": -2}
)


def every(name, split, seed=0):
    return tasks.rows(name, split, tasks.find(name).available(split), seed)


def items(name):
    task = tasks.find(name)
    return list(chain.from_iterable(map(task.items, tasks.SPLITS)))


def facts_of(item):
    return [fact.strip(".").split() for fact in item.slots["facts"].split(". ")]


def test_the_catalogues_hold_fourteen_target_tasks_five_general_and_six_k_shot_ones():
    assert sorted(tasks.CATALOGUE) == sorted(NAMES)
    domains = {task.domain for task in tasks.CATALOGUE.values()}
    assert domains == {"mathematics", "code", "common_sense", "translation", "language"}
    assert (len(tasks.GENERAL), len(tasks.KSHOT), len(tasks.KNOWN)) == (5, 6, 25)


@pytest.mark.parametrize("name", tasks.KNOWN)
def test_splits_are_disjoint_by_content_and_by_prompt_whatever_the_seed(name):
    contents = {}
    prompts = {}
    for split in tasks.SPLITS:
        slots = (
            json.dumps(item.slots, sort_keys=True)
            for item in tasks.find(name).items(split)
        )
        contents[split] = set(slots)
        prompts[split] = set().union(
            *(hashes(every(name, split, seed)) for seed in (0, 1, 2))
        )
    for kind in (contents, prompts):
        assert len(set().union(*kind.values())) == sum(map(len, kind.values()))
    assert len(contents["test"]) == len(contents["validation"]) == 200
    least = 500 if name in tasks.CATALOGUE else 200  # enough for fifty shots
    assert len(contents["train"]) == tasks.find(name).available("train") >= least
    of = tasks.find(name).items
    assert (*of("fresh"), *of("rest")) == of("train")
    assert len(of("fresh")) == min(1000, len(of("train")) // 2)


@pytest.mark.parametrize("name", [*tasks.CATALOGUE, *tasks.KSHOT])
def test_rows_repeat_with_the_seed_and_have_the_promised_fields_in_every_wording(name):
    first, again, other = (tasks.rows(name, "test", 200, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert tasks.rows(name, "test", 50) == first[:50]
    assert sorted(row["answer"] for row in first) == sorted(
        row["answer"] for row in other
    )
    task = tasks.find(name)
    rows = task.rows("train", min(300, task.available("train")))
    fields = {"task", "domain", "prompt", "answer"} | (
        {"rationale"} if task.rationales else set()
    )
    for row in rows:
        assert set(row) == fields
        assert all(isinstance(value, str) and value.strip() for value in row.values())
        assert task.normalise(row["answer"])
        assert "{" not in row["prompt"] or name in ("docstring", "intent_json")
    assert 2 <= len(task.templates) <= 4
    for start in {template.split("{")[0] for template in task.templates}:
        assert any(row["prompt"].startswith(start) for row in rows)


@pytest.mark.parametrize("name", [*tasks.CATALOGUE, *tasks.GENERAL])
def test_the_majority_baseline_leaves_room_above_it(name):
    share = tasks.majority(name)
    assert 0 <= share <= 0.25
    normalise = tasks.find(name).normalise
    train = [normalise(row["answer"]) for row in every(name, "train")]
    test = [normalise(row["answer"]) for row in every(name, "test")]
    if len(set(train)) < 100:
        best = min(set(train), key=lambda answer: (-train.count(answer), answer))
        assert share == test.count(best) / 200


def test_mathematics_and_code_are_right_and_equations_in_words_no_others_of_the_catalogue():
    for item in items("equations"):
        left, right = item.slots["equation"].split(" = ")
        a, rest = left.split("x ")
        assert int(a) * int(item.answer) + int(rest.replace(" ", "")) == int(right)
    for name, truth in (
        ("gcd", math.gcd),
        ("sums", int.__add__),
        ("products", int.__mul__),
    ):
        for item in items(name):
            assert truth(int(item.slots["a"]), int(item.slots["b"])) == int(item.answer)
    known = {item.slots["equation"] for item in items("equations")}
    for item in items("equation_words"):
        a, b, c = (int(item.slots[slot]) for slot in "abc")
        sign = {"plus": "+", "minus": "-"}[item.slots["sign"]]
        assert a * int(item.answer) + int(f"{sign}{b}") == c
        assert f"{a}x {sign} {b} = {c}" not in known
    for item in items("python_eval"):
        value = eval(item.slots["expression"], {"__builtins__": {}}, dict(TINY_EVAL))
        assert repr(value) == item.answer
        assert ast.literal_eval(item.answer) == value


def test_numbers_in_words_are_those_written_by_hand():
    french = [
        (71, "soixante et onze"),
        (80, "quatre-vingts"),
        (97, "quatre-vingt-dix-sept"),
        (1000, "mille"),
        (2281, "deux mille deux cent quatre-vingt-un"),
    ]
    spanish = [
        (22, "veintidós"),
        (100, "cien"),
        (1516, "mil quinientos dieciséis"),
        (9731, "nueve mil setecientos treinta y uno"),
    ]
    for language, known in (("fr", french), ("es", spanish)):
        assert [(number, words(number, language)) for number, _ in known] == known


def test_kinship_agrees_with_a_walk_over_the_family_graph():
    for item in items("kinship"):
        facts = facts_of(item)
        (near,) = [fact for fact in facts if fact[0] == item.slots["a"]]
        (far,) = [fact for fact in facts if fact[-1] == item.slots["c"]]
        assert near[-1] == far[0]
        step = GENERATIONS[near[3]] + GENERATIONS[far[3]]
        assert GENERATIONS[item.answer.removesuffix("-in-law")] == step
        married = {near[3], far[3]} & {"wife", "husband"} != set()
        assert item.answer.endswith("-in-law") == married
    # Families told the other way round are new and keep their answers.
    known = {item.slots["facts"] for item in kinship()}
    unordered = {frozenset(text.removesuffix(".").split(". ")) for text in known}
    families = items("kinship_told")
    in_another_order = 0
    for item in families:
        turned = [(a, r, b.removesuffix("'s")) for b, r, _, a in facts_of(item)]
        plain = [f"{a} is the {r} of {b}." for a, r, b in turned]
        assert " ".join(plain) not in known
        in_another_order += (
            frozenset(fact.removesuffix(".") for fact in plain) in unordered
        )
        assert f"{item.slots['a']} is the {item.answer} of" in item.rationale
    assert (len(families), in_another_order) == (1199, 1)  # as the module says


def test_no_general_or_k_shot_task_holds_what_a_target_task_asks():
    known = {
        json.loads(row["answer"])["intent"] for row in every("intent_json", "train")
    }
    for row in every("intent_new", "train"):
        slots = json.loads(row["answer"])
        assert slots.pop("intent") not in known
        assert all(value in row["prompt"] for value in slots.values())
    for item in items("gcd_plus"):
        a, b, c = (int(item.slots[slot]) for slot in "abc")
        assert item.answer == str(math.gcd(a, b) + c) == item.rationale.split()[-1][:-1]
    for item in items("sums_fr"):
        total = int(item.slots["a"]) + int(item.slots["b"])
        assert item.answer == words(total, "fr")
    kinds = [item.answer for item in items("copyleft")]
    assert 0.4 < kinds.count("copyleft") / len(kinds) < 0.6
    assert set(kinds) == {"copyleft", "permissive"}
    bank = "\n".join(row["prompt"] for row in banks.embedded(2000)["licence"])
    assert not any(clause in bank for clause in reserved())
    general = chain.from_iterable(every(name, "train") for name in tasks.GENERAL)
    target = chain.from_iterable(
        tasks.rows(name, "test", 200) for name in tasks.CATALOGUE
    )
    refuse_leak(general, target)


def test_answers_are_compared_after_the_tasks_own_normalisation():
    assert first_line(" 12. \nAnd then") == "12"
    assert first_line("") == verb("") == same_json("") == ""
    assert verb("Return the value.") == verb("return: nothing") == "return"
    assert same_json('{"b": 1,  "a": 2}\nmore') == same_json('{"a": 2, "b": 1}')
    assert same_json('{"a": 2') == '{"a": 2'


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("gcd", "test", 0), "have 200 rows, need 0"),
        (("gcd", "test", 201), "have 200 rows, need 201"),
        (("copylef", "test", 1), "unknown task 'copylef': did you mean 'copyleft'"),
        ((3, "test", 1), "unknown task '3'"),
        ((["gcd"], "test", 1), "unknown task '.'gcd'.'"),
        (("gcd", "tset", 1), "unknown split 'tset': did you mean 'test'"),
    ],
)
def test_sizes_tasks_and_splits_that_are_not_there_are_refused(asked, message):
    refused(f"E-DATA: .*{message}", tasks.rows, *asked)
