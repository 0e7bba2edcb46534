"""A user's own task beside lm-eval's: the same rows get the same numbers."""

import importlib
import json
import random
import sys

import pytest
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from moebook import evaluation, models
from moebook.data.tasks import Task
from moebook.evaluation.model import InMemory
from tests.forked import forked
from tests.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
WORDS = "dog cat fish horse mouse cow sheep goat".split()


def put(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def files(tmp_path):
    """The same twelve questions as ARC has them, in a folder, and in the user's schema."""
    rng = random.Random(0)
    theirs = []
    ours = []
    for number in range(12):
        options = rng.sample([f"a {word}" * rng.randint(1, 3) for word in WORDS], 4)
        right = rng.randrange(4)
        question = f"What barks {number} times?"
        choices = {"text": options, "label": list("ABCD")}
        theirs.append(
            {
                "id": str(number),
                "question": question,
                "choices": choices,
                "answerKey": "ABCD"[right],
            }
        )
        prompt = f"Question: {question}\nAnswer:"
        ours.append({"prompt": prompt, "choices": options, "answer": right})
    put(tmp_path / "hub/allenai/ai2_arc/ARC-Easy/test.jsonl", theirs)
    return tmp_path / "hub", put(tmp_path / "barks.jsonl", ours)


def test_choices_are_judged_as_lm_eval_judges_the_same_rows(
    files, tiny, byte_tokenizer
):
    folder, path = files
    model = tiny(initializer_range=0.4)
    table = evaluation.evaluate(
        model,
        byte_tokenizer,
        ["arc_easy", Task.from_jsonl(path), str(path)],
        split="all",
        data=folder,
        chat=True,
        format="deepseek",
    )
    theirs, ours, again = (table[table.asked == name] for name in table.asked.unique())
    assert set(ours.task) == set(again.task) == {"own_barks"}
    assert len(ours) == len(theirs) == 12
    measured = ["correct", "unnormalised", "nll", "nll_sum", "chance", "output"]
    ours = ours.set_index("answer").sort_values("nll_sum")[measured]
    theirs = theirs.set_index("answer").sort_values("nll_sum")[measured]
    for column in measured:
        if column == "output":
            assert ours[column].tolist() == theirs[column].tolist()
        else:
            assert ours[column].to_numpy() == pytest.approx(theirs[column].to_numpy())
    assert 0 < ours.correct.mean() < 1
    assert (ours.correct != ours.unnormalised).any()
    assert evaluation.summary(table).normalised.nunique() == 1


def test_written_answers_are_greedy_ones_and_two_files_of_one_name_are_refused(
    tmp_path, tiny, byte_tokenizer
):
    model = tiny(initializer_range=0.4)
    rows = [{"prompt": f"say {word}", "answer": word} for word in WORDS]
    path = put(tmp_path / "say.jsonl", rows)
    first = evaluation.evaluate(model, byte_tokenizer, str(path), split="all")
    said = first.output.str.split("\n").str[0]
    assert len(first) == len(WORDS)
    assert not first.correct.any()
    prompts = dict(zip(first.answer, said, strict=True))
    right = [
        {"prompt": row["prompt"], "answer": prompts[row["answer"]]}
        for row in rows
        if prompts[row["answer"]].strip()
    ]
    assert right
    put(path, right)
    task = Task.from_jsonl(path, max_new_tokens=6)
    again = evaluation.evaluate(model, byte_tokenizer, task, split="all")
    assert again.correct.all()
    other = put(tmp_path / "elsewhere" / "say.jsonl", rows)
    words = "E-DATA: .*both are task 'own_say'; rename one"
    refused(words, evaluation.evaluate, model, byte_tokenizer, [str(path), str(other)])
    both = [task, Task.from_jsonl(path, max_new_tokens=3)]
    words = "E-DATA: two tasks with other settings are called 'own_say'"
    refused(words, evaluation.evaluate, model, byte_tokenizer, both)


@pytest.mark.filterwarnings("ignore")
def test_a_prompt_that_fills_the_context_is_scored_beside_a_long_answer_as_alone(
    tmp_path, byte_tokenizer
):
    sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
    config = AutoConfig.for_model("gpt2", vocab_size=300, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    rows = [
        {"prompt": "x" * 200, "answer": "a"},
        {"prompt": "say", "answer": "b c d e f g h i"},
    ]
    path = put(tmp_path / "say.jsonl", rows)
    task = Task.from_jsonl(path, max_new_tokens=5)
    alone, both = (
        evaluation.evaluate(model, byte_tokenizer, task, split="all", batch_size=size)
        for size in (1, 2)
    )
    assert both.nll.tolist() == pytest.approx(alone.nll.tolist(), rel=1e-4)


def without_lm_eval():
    """Load a task of ours and a benchmark, as where lm-eval is not installed."""
    sys.modules["lm_eval"] = None
    evaluation = importlib.import_module("moebook.evaluation")
    errors = importlib.import_module("moebook.errors")
    for method in ("esft", "rocket"):
        importlib.import_module(f"moebook.methods.{method}")
    assert evaluation.load(["gcd"]) == {}
    try:
        evaluation.load(["arc_easy"])
    except errors.Refusal as refusal:
        print(refusal)


def test_without_lm_eval_own_tasks_stay_and_benchmarks_are_one_line_with_the_command():
    done = forked(without_lm_eval)
    assert done.returncode == 0, done.stderr
    command = "pip install 'moebook[evaluate]'"
    wanted = f"benchmark 'arc_easy' of lm-eval needs the package lm_eval: {command}"
    assert done.stdout == f"E-DEP: {wanted}\n"


def test_chance_is_that_of_the_split_that_is_asked(tmp_path, tiny, byte_tokenizer):
    rows = []
    for number in range(40):
        rare = number % 10 == 0 or number == 31
        part = "train" if number < 20 else "validation"
        answer = "other" if rare else "billing"
        rows.append({"prompt": f"q {number}", "answer": answer, "split": part})
    path = put(tmp_path / "teams.jsonl", rows)
    for split, share in {"validation": 17 / 20, "all": 35 / 40}.items():
        table = evaluation.evaluate(tiny(), byte_tokenizer, str(path), split=split)
        assert set(table.chance) == {share}
        assert (table.answer == "billing").mean() == share
    assert Task.from_jsonl(path).majority() == 0


ASKED = [
    {"prompt": f"What is {n}?", "answer": str(n), "split": "test"} for n in range(8)
]
LONG = "a long story " * 81  # 1,053 bytes, more than nano has positions


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_long_answer_leaves_the_other_rows_of_its_file_as_they_are(tmp_path, part):
    model, tokenizer = models.load("nano")
    long = {"prompt": "Tell me.", "answer": LONG, "split": part}
    found = []
    for name, rows in (("short", ASKED), ("long", [*ASKED, long])):
        path = put(tmp_path / f"{name}.jsonl", rows)
        table = evaluation.evaluate(model, tokenizer, str(path), limit=None)
        table = table[table.answer != LONG].sort_values("answer")
        first = [text.strip().partition("\n")[0] for text in table.output]
        found.append((first, table.correct.tolist(), table.nll.tolist()))
    (short, right, nats), (beside, right_beside, nats_beside) = found
    assert len(short) == len(ASKED)
    assert (beside, right_beside) == (short, right)
    assert nats_beside == pytest.approx(nats, rel=1e-4)
    assert sum(right) > 0


def test_the_longest_answer_of_the_split_that_is_asked_ends_answers(tmp_path):
    long = {"prompt": "Tell me.", "answer": LONG, "split": "train"}
    path = put(tmp_path / "say.jsonl", [*ASKED, long])
    task = Task.from_jsonl(path)
    assert (task.limit("test"), task.limit("train")) == (2, len(LONG) + 1)
    assert task.limit("all") == task.max_new_tokens == len(LONG) + 1
    assert Task.from_jsonl(path, max_new_tokens=9).limit("test") == 9


def short(kind="gpt2"):
    """A model of 64 positions, which fails at the 65th; GPT-Neo at as many columns, too."""
    sizes = {"num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]}
    if kind == "gpt2":
        sizes = {"n_layer": 1, "n_head": 2}
    sizes |= {"max_position_embeddings": 64, "hidden_size": 32}
    config = AutoConfig.for_model(kind, vocab_size=300, **sizes)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("choices", [False, True])
def test_an_answer_longer_than_the_model_is_refused_by_its_line(
    tmp_path, byte_tokenizer, choices
):
    long = {"prompt": "Tell me.", "answer": "x" * 65, "split": "test"}
    if choices:
        long["choices"] = ["x" * 65, "y"]
    path = put(tmp_path / "say.jsonl", [ASKED[0], long])
    words = r"E-RANGE: .*say.jsonl:2: its answer has 6\d tokens, the model takes 64;"
    refused(words, evaluation.evaluate, short(), byte_tokenizer, str(path))


def test_an_answer_longer_than_the_model_is_refused_by_its_row():
    model, tokenizer = models.load("nano")
    lm = InMemory(model, tokenizer, 2)
    pairs = [([1, 2], [3]), ([1, 2], [3] * 513)]
    words = "E-RANGE: row 1: its answer has 513 tokens, the model takes 512;"
    refused(words, lm.score, pairs)
    refused(words, lm.examine, pairs, [(3, ()), (3, ())])


@pytest.mark.filterwarnings("ignore:W-LONG")
def test_an_answer_as_long_as_the_model_is_scored_alike_by_both_ways(byte_tokenizer):
    lm = InMemory(short(), byte_tokenizer, 2)
    pairs = [([5, 6, 7], [8] * 64), ([5, 6], [9])]
    scores = [value for value, _ in lm.score(pairs)]
    texts = lm.examine(pairs, [(80, ()), (80, ())])
    assert [value for _, value in texts] == pytest.approx(scores, rel=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo"])
def test_a_context_that_fits_is_whole_whatever_the_limit(byte_tokenizer, kind, recwarn):
    model = short(kind)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # else all answers are alike
            nn.init.normal_(parameter, std=0.3)
    lm = InMemory(model, byte_tokenizer, 4)
    lm.ends = set()
    prompts = [[5 + n % 40 for n in range(size)] for size in (60, 64, 3, 40)]
    wanted = []
    for ids, most in zip(prompts, (5, 1, 62, 25), strict=True):
        wanted += lm.answer([ids], [(most, ())])
    assert len(set(wanted)) == len(prompts)
    assert lm.answer(prompts, [(1000, ())] * len(prompts)) == wanted
    assert not recwarn.list


PROGRAM = "if x:\n    y()\n    z()"


@pytest.mark.parametrize(
    ("gold", "said", "right"),
    [
        (".", "", False),
        (".", ".", True),
        ("..", ".", False),
        ("a b.", " a  b", True),
        *[(f"a{end}b", "a", False) for end in "\n\r\x0b\x0c\x1c\x85\u2028"],
        *[(f"a{end}b", "a\nb", True) for end in ("\n", "\r\n", "\r", "\u2028")],
        (PROGRAM, "if x:\n    y()\nz()", False),
        (PROGRAM, f" {PROGRAM}\n", True),
        (PROGRAM, PROGRAM.replace("\n", "  \r\n"), True),
    ],
)
def test_own_answers_are_compared_by_the_rules_of_the_page(tmp_path, gold, said, right):
    task = Task.from_jsonl(put(tmp_path / "say.jsonl", [ASKED[0] | {"answer": gold}]))
    assert (task.normalise(said) == task.normalise(gold)) is right


def test_in_a_file_with_programs_answers_of_one_line_compare_as_elsewhere(tmp_path):
    rows = [ASKED[0], ASKED[1] | {"answer": PROGRAM}]
    task = Task.from_jsonl(put(tmp_path / "say.jsonl", rows))
    assert task.normalise(" two  words.\n") == "two words"
    assert task.normalise("0\nand so on") != "0"
