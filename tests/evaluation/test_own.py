"""A user's own task beside lm-eval's: the same rows get the same numbers."""

import importlib
import json
import random
import sys

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from moebook import evaluation
from moebook.data.tasks import Task
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
