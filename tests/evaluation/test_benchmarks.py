"""Benchmarks from a folder: layouts of seven data sets, what is damaged, a summary."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from lm_eval.api.instance import Instance

from moebook import cli, evaluation, models
from moebook.data import encode, hub, reading
from moebook.data.encoding import FORMATS
from moebook.evaluation import benchmarks, harness
from moebook.evaluation.harness import Harness
from tests.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:W-LONG")
LETTERS = {"text": ["a dog", "a cat"], "label": ["A", "B"]}
ARC = {"id": "1", "question": "What barks?", "choices": LETTERS, "answerKey": "B"}
PIQA = {"goal": "To bark", "sol1": "be a dog", "sol2": "be a cat", "label": 0}
SUM = {"question": "What is 1 and 2?", "answer": "1 + 2 = 3\n#### 3"}
SWAG = {
    "ind": 1,
    "activity_label": "Barking",
    "ctx_a": "A dog",
    "ctx_b": "it",
    "label": "3",
    "endings": ["sits.", "runs.", "eats.", "barks."],
}
MMLU = {
    "question": "What barks?",
    "subject": "anatomy",
    "choices": ["a", "b", "c", "d"],
    "answer": 2,
}
BOOLQ = {"question": "does it bark", "passage": "A dog barks.", "idx": 0, "label": 1}
MBPP = {
    "task_id": 11,
    "text": "Bark.",
    "code": "def f(): ...",
    "test_list": ["assert 1"] * 3,
}
CLOSED = {"question": "does it bark", "answer": False}
PROGRAMS = "google-research-datasets/mbpp/full"
LAYOUTS = {
    "piqa": ("baber/piqa/validation.jsonl", PIQA, 1 / 2, "be a dog"),
    "arc_easy": (
        "allenai/ai2_arc/ARC-Easy/test-00000-of-00001.parquet",
        ARC,
        1 / 2,
        "a cat",
    ),
    "hellaswag": (
        "Rowan/hellaswag/data/validation-00000-of-00001.parquet",
        SWAG,
        1 / 4,
        "barks.",
    ),
    "gsm8k": ("openai/gsm8k/main/test.json", SUM, 0, SUM["answer"]),
    "mmlu_anatomy": ("cais/mmlu/anatomy/test-00000-of-00001.parquet", MMLU, 1 / 4, "C"),
    "boolq": (
        "aps/super_glue/boolq/validation-00000-of-00001.parquet",
        BOOLQ,
        1 / 2,
        "yes",
    ),
    "boolq_closed": ("google/boolq-closed-book/validation.jsonl", CLOSED, 1 / 2, "no"),
    "solutions_gsm8k": ("openai/gsm8k/main/test.jsonl", SUM, 0, SUM["answer"]),
    "solutions_mbpp": (
        f"{PROGRAMS}/test-00000-of-00001.parquet",
        MBPP,
        0,
        MBPP["code"],
    ),
}


def put(folder, name, rows):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("task", LAYOUTS)
def test_the_hubs_files_are_read_in_a_folder(
    task, tmp_path, tiny, byte_tokenizer, monkeypatch
):
    name, row, chance, answer = LAYOUTS[task]
    put(tmp_path, name, [row] * 3)
    if task == "gsm8k":  # shows five solved ones first
        put(tmp_path, "openai/gsm8k/main/train.jsonl", [SUM] * 9)
    monkeypatch.setenv("DATA", str(tmp_path))
    table = evaluation.evaluate(tiny(), byte_tokenizer, task, limit=2, data="$DATA")
    assert table.asked.tolist() == table.task.tolist() == [task] * 2
    assert (table.chance == chance).all()
    assert set(table.answer) == {answer}
    assert table.attrs["files"][name] == tmp_path / name


def test_a_group_is_one_line_in_which_its_tasks_count_equally(
    tmp_path, tiny, byte_tokenizer
):
    put(tmp_path, "allenai/ai2_arc/ARC-Easy/test.jsonl", [ARC] * 4)
    put(
        tmp_path,
        "allenai/ai2_arc/ARC-Challenge/test.jsonl",
        [ARC | {"answerKey": "A"}] * 2,
    )
    table = evaluation.evaluate(tiny(), byte_tokenizer, ["ai2_arc"], data=tmp_path)
    hits = table.groupby("task").correct.mean()  # the same rows with the other answer
    line = evaluation.summary(table, "HuggingFaceTB/SmolLM2-135M-Instruct@0").loc[
        "ai2_arc"
    ]
    assert hits.sum() == 1
    assert table.groupby("task").size().tolist() == [2, 4]
    assert (line.normalised, line["rows"], line.chance) == (1 / 2, 6, 1 / 2)
    assert line.published == pytest.approx(0.373)
    # Of a task with one row nobody knows the error, so of its group neither.
    one = table.groupby("task").head(1).index.union(table.index[-2:])
    short = evaluation.summary(table.loc[one]).loc["ai2_arc"]
    assert np.isnan(short["its standard error"])


def test_asked_in_a_chat_format_an_answer_is_as_likely_as_after_a_training_prompt(
    tmp_path, tiny, byte_tokenizer
):
    put(tmp_path, "allenai/ai2_arc/ARC-Easy/test.jsonl", [ARC])
    host = tiny()
    ask = {"data": tmp_path, "chat": True}
    row = {"prompt": "Question: What barks?\nAnswer:", "answer": "a cat"}
    for name in FORMATS:
        ids = torch.tensor(
            encode([row], byte_tokenizer, format=name, max_length=99)["input_ids"]
        )
        size = len(byte_tokenizer.encode(FORMATS[name].render(*row.values(), "")[1]))
        logits = host(ids[:, :-1]).logits[0, -size - 1 : -1].log_softmax(-1)
        nll = evaluation.evaluate(
            host, byte_tokenizer, "arc_easy", format=name, **ask
        ).nll[0]
        assert nll == pytest.approx(
            -logits.gather(1, ids[0, -size - 1 : -1, None]).mean().item()
        )
        lm = Harness(host, byte_tokenizer, 1, name)
        context = ids[0, : -size - 1].tolist()
        asked = Instance("generate_until", {}, (row["prompt"], {"max_gen_toks": 5}), 0)
        assert lm.generate_until([asked]) == lm.answer([context], [(5, ())])
    words = "E-DATA: unknown chat format 'camle': did you mean 'camel'"
    refused(
        words,
        evaluation.evaluate,
        host,
        byte_tokenizer,
        "arc_easy",
        format="camle",
        **ask,
    )


def test_the_standard_error_is_that_of_a_share_and_unknown_scores_are_left_empty():
    tasks = ["a"] * 100 + ["b"] * 50
    correct = [1, 1, 1, 0] * 25 + [1, 0] * 25
    table = pd.DataFrame({"asked": "piqa", "task": tasks, "correct": correct})
    table = table.assign(unnormalised=1.0, chance=0.5)
    line = evaluation.summary(table, "smollm2").loc["piqa"]
    # Shares of 3/4 and 1/2, whose mean has half the error of their sum.
    squares = 0.75 * 0.25 / 99 + 0.5 * 0.5 / 49
    assert line["its standard error"] == pytest.approx(squares**0.5 / 2)
    assert line.published == pytest.approx(0.663)
    assert evaluation.summary(table, "nano").published.isna().all()


def test_the_real_sets_load_whole(shared):
    sizes = {
        "arc_challenge": 1172,
        "arc_easy": 2376,
        "gsm8k": 1319,
        "openbookqa": 500,
        "piqa": 1838,
        "social_iqa": 1954,
        "winogrande": 1267,
        "boolq_closed": 3270,
        "solutions_gsm8k": 1319,
        "solutions_mbpp": 500,
    }
    loaded = benchmarks.load(list(sizes), shared / "data" / "real")
    assert {name: len(tasks[name].eval_docs) for name, tasks in loaded.items()} == sizes


def test_mbpp_lies_as_on_the_hub_and_lm_evals_own_way_of_running_it_is_refused(
    tmp_path,
):
    put(tmp_path, f"{PROGRAMS}/test-00000-of-00001.parquet", [MBPP])
    (path,) = hub.shards(tmp_path, "google-research-datasets/mbpp", "full", "test")
    assert reading.local(path)[0][1] == MBPP
    words = "E-SANDBOX: benchmark 'mbpp_instruct' runs code .* outside of a sandbox; take humaneval"
    refused(words, benchmarks.load, ["mbpp_instruct"], tmp_path)


def test_a_benchmark_that_counts_no_answer_as_right_is_refused_before_it_is_run(
    tmp_path,
):
    answer = {"number": "3", "date": {"day": "", "month": "", "year": ""}, "spans": []}
    others = {"number": [], "date": [], "spans": []}
    row = {"query_id": "1", "passage": "Three.", "question": "How many?"}
    row |= {"answer": answer, "validated_answers": others}
    put(tmp_path, "EleutherAI/drop/validation.jsonl", [row])
    words = (
        "E-DATA: benchmark 'drop' does not count an answer as right or wrong; expected"
    )
    refused(words, benchmarks.load, ["drop"], tmp_path)


@pytest.mark.parametrize("name", ["squadv2", "ag_news"])
def test_what_code_of_lm_eval_makes_is_not_read_from_a_folder(name, tmp_path):
    words = f"E-DATA: benchmark '{name}' is made by code of lm-eval; it cannot be read"
    refused(words, benchmarks.load, [name], tmp_path)


def test_a_benchmark_that_is_broken_inside_lm_eval_is_told_in_one_line(tmp_path):
    name = "evalita-mp_ner_fic_group"
    words = f"E-DATA: lm-eval cannot make benchmark '{name}' .*has no function"
    refused(words, benchmarks.load, [name], tmp_path)


PLACE = "baber/piqa/validation.jsonl"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, r"E-NOFILE: .*baber/piqa: split 'validation' is missing; expected one"),
        (
            {PLACE: [PIQA], "baber/piqa/data/validation.json": [PIQA]},
            "is data/val.*, val.*; expected",
        ),
        (
            {"baber/piqa/validation-00000-of-00002.parquet": [PIQA]},
            "is .*-of-00002.*; expected one",
        ),
        ({PLACE: [PIQA, None]}, r"E-DATA: .*validation.jsonl:2: a row is NoneType"),
        (
            {PLACE: [PIQA, {"goal": "To bark"}]},
            "E-DATA: .* 2 of baber.* not .*KeyError: 'label'",
        ),
        (
            {PLACE: [PIQA, PIQA | {"goal": None}]},
            "E-DATA: .*item 2 of .*'goal' is undefined",
        ),
        (
            {PLACE: [{"question": "?"}]},
            r"E-DATA: .*item 1 of baber/piqa/validation.jsonl is not as on",
        ),
        (
            {PLACE: [PIQA, PIQA | {"label": 2}]},
            "E-DATA: .*item 2 .*answer 2 of .'be a dog'",
        ),
        ({PLACE: [PIQA, PIQA | {"label": "x"}]}, "E-DATA: .*: an item of baber.*'x'"),
    ],
)
def test_damaged_data_are_refused_in_one_line(files, words, tmp_path):
    for name, rows in files.items():
        put(tmp_path, name, rows)
    refused(words, benchmarks.load, ["piqa"], tmp_path)


WORKED = {
    "question": "Two dogs and a cat?",
    "answer": None,
    "answer_number": 3,
    "equation_solution": None,
}


def test_a_null_that_a_template_asks_for_is_as_on_the_hub(tmp_path):
    """MGSM's test rows have no worked answer; their number is the answer then."""
    put(tmp_path, "juletxara/mgsm/en/test.jsonl", [WORKED])
    task = benchmarks.load(["mgsm_en_cot_en"], tmp_path)["mgsm_en_cot_en"][
        "mgsm_en_cot_en"
    ]
    (row,) = task.eval_docs
    assert task.doc_to_target(row) == "3"
    assert task.doc_to_text(row).startswith("Question: Two dogs")


def test_a_null_that_a_template_prints_is_refused(tmp_path):
    put(
        tmp_path,
        "juletxara/mgsm/en/test.jsonl",
        [WORKED, WORKED | {"answer_number": None}],
    )
    refused(
        "E-DATA: .*item 2 of juletxara", benchmarks.load, ["mgsm_en_cot_en"], tmp_path
    )


WINOGRANDE = {"sentence": "It _ barks.", "option1": "x", "option2": "y", "answer": "2"}
SIQA = {
    "context": "c",
    "question": "q?",
    "answerA": "x",
    "answerB": "y",
    "answerC": "z",
    "label": "3",
}
LABELLED = {  # a task, its file, a row, the field with its answer
    "piqa": (PLACE, PIQA, "label"),
    "hellaswag": ("Rowan/hellaswag/validation.jsonl", SWAG, "label"),
    "mmlu_anatomy": ("cais/mmlu/anatomy/test.jsonl", MMLU, "answer"),
    "boolq": ("aps/super_glue/boolq/validation.jsonl", BOOLQ, "label"),
    "boolq_closed": ("google/boolq/validation.jsonl", CLOSED, "answer"),
    "social_iqa": ("allenai/social_i_qa/validation.jsonl", SIQA, "label"),
    "winogrande": (
        "allenai/winogrande/winogrande_xl/validation.jsonl",
        WINOGRANDE,
        "answer",
    ),
    "arc_easy": ("allenai/ai2_arc/ARC-Easy/test.jsonl", ARC, "answerKey"),
}


@pytest.mark.parametrize(
    ("task", "label"),
    [
        ("piqa", "0"),
        ("piqa", "1.0"),
        ("piqa", True),
        ("piqa", -1),
        ("piqa", 0.5),
        ("piqa", float("nan")),
        ("piqa", None),
        ("piqa", ["0"]),
        ("piqa", [0, 2]),
        ("piqa", []),
        ("hellaswag", "4"),
        ("hellaswag", "x"),
        ("hellaswag", "3.0"),
        ("hellaswag", float("nan")),
        ("mmlu_anatomy", "2"),
        ("mmlu_anatomy", "E"),
        ("mmlu_anatomy", 4.0),
        ("boolq", "true"),
        ("boolq", True),
        ("boolq", "1"),
        ("boolq_closed", "true"),
        ("boolq_closed", "no"),
        ("boolq_closed", 2),
        ("boolq_closed", float("nan")),
        ("social_iqa", "z"),
        ("social_iqa", ""),
        ("social_iqa", float("nan")),
        ("winogrande", 2),
        ("winogrande", "y"),
        ("arc_easy", 1),
        ("arc_easy", "C"),
    ],
)
def test_an_answer_that_is_neither_a_place_nor_a_choice_is_refused(
    task, label, tmp_path
):
    name, row, field = LABELLED[task]
    put(tmp_path, name, [row | {field: label}] * 2)
    # Whose rows lm-eval maps all at once.
    item = "an item" if task == "hellaswag" else "item 1"
    words = f"E-DATA: .*: {item} of {name} is not as on the hub"
    refused(words, benchmarks.load, [task], tmp_path)


def test_answers_of_two_types_are_refused(tmp_path):
    name, row, field = LABELLED["mmlu_anatomy"]
    task = harness._local("mmlu_anatomy", _folder(tmp_path, name, [row]))[0]
    task._check(row | {field: 3})
    with pytest.raises(TypeError, match="answer 'C' is str, int in the items before"):
        task._check(row | {field: "C"})


def _folder(place, name, rows):
    put(place, name, rows)
    return place


@pytest.mark.parametrize(
    "task", ["piqa", "hellaswag", "mmlu_anatomy", "boolq", "boolq_closed", "social_iqa"]
)
def test_whole_floats_that_pandas_wrote_count_as_the_numbers_they_were(
    task, tmp_path, tiny, byte_tokenizer
):
    name, row, field = LABELLED[task]
    suffix = ".parquet" if task == "piqa" else ".jsonl"
    tables = []
    for label in (row[field], float(row[field])):
        place = tmp_path / str(label)
        put(place, str(Path(name).with_suffix(suffix)), [row | {field: label}] * 2)
        tables.append(evaluation.evaluate(tiny(), byte_tokenizer, task, data=place))
    assert tables[1].equals(tables[0])
    assert tables[0].nll.notna().all()


def test_an_answer_that_is_one_of_the_choices_counts_as_its_place(
    tmp_path, tiny, byte_tokenizer
):
    name, row, field = LABELLED["mmlu_anatomy"]
    by_place, by_text = (
        evaluation.evaluate(
            tiny(),
            byte_tokenizer,
            "mmlu_anatomy",
            data=_folder(tmp_path / str(label), name, [row | {field: label}] * 2),
        )
        for label in (2, "C")
    )
    assert by_text.correct.tolist() == by_place.correct.tolist()


def test_the_output_of_a_generative_benchmark_is_the_text_and_no_part_of_it(
    tmp_path, tiny, byte_tokenizer, monkeypatch
):
    place = _folder(tmp_path, "openai/gsm8k/main/test.jsonl", [SUM] * 2)
    put(tmp_path, "openai/gsm8k/main/train.jsonl", [SUM] * 9)
    texts = [" 1 and 2, that is\n#### 3 dogs", " no idea"]
    monkeypatch.setattr(Harness, "answer", lambda self, contexts, limits: texts)
    table = evaluation.evaluate(tiny(), byte_tokenizer, "gsm8k", data=place)
    assert table.output.tolist() == texts
    assert table.correct.tolist() == [1, 0]


def test_the_command_prints_a_line_a_task_and_refuses_before_it_computes(
    tmp_path, tiny, byte_tokenizer, monkeypatch, capsys
):
    monkeypatch.setattr(models, "load", lambda name, device: (tiny(), byte_tokenizer))
    put(tmp_path, PLACE, [PIQA] * 3)
    given = ["--data", str(tmp_path), "--limit", "2"]
    assert cli.main(["evaluate", "smollm2", "--tasks", "piqa,gcd", *given]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert (
        head.split()
        == "accuracy normalised its standard error chance rows published".split()
    )
    assert [line.split()[0] for line in lines] == ["piqa", "gcd"]
    assert lines[0].split()[-3:] == ["0.500", "2", "0.663"]
    for words, told in (
        (["--tasks", "piqqa", *given], "E-DATA: unknown task 'piqqa'"),
        (["--tasks", "piqa", "--data", "nowhere"], "E-NOFILE: nowhere: no such folder"),
        (["--tasks", "piqa", *given[:-1], "0"], "E-RANGE: limit is 0"),
        (
            [],
            "E-USAGE: moebook evaluate: the following arguments are required: --tasks",
        ),
    ):
        assert cli.main(["evaluate", "smollm2", *words]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(told)
