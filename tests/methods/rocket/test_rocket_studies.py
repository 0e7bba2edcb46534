"""What the choices would be under other settings, on scores and vectors worked by hand."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from moebook.methods.rocket import Config, augmentation, pipeline, selection, studies

CONFIG = Config(shots=2, candidates=3, experts=2, top_k=1, budget=6, threshold=0.9)


def case(nats, vectors=None):
    frame = pd.DataFrame({0: nats, 1: nats})
    return pipeline.Case("own", 0, [{}, {}], frame, frame, frame * 0, vectors)


@pytest.fixture
def alike():
    cosines = np.eye(4) + 0.1 * (1 - np.eye(4))
    return pd.DataFrame(cosines, list("abcz"), list("abcz"))


def test_a_leaked_lora_that_is_best_would_be_chosen_and_one_that_is_worst_would_not(alike):
    for nats, chosen in ((0.1, True), (9.0, False)):
        found = studies.choices(case({"a": 1, "b": 2, "c": 3, "z": nats}), CONFIG, "abc", alike)
        assert found["leaked LoRA chosen"] is chosen
        assert found["changed by normalising"] is False


def test_normalised_ranks_change_the_choice_where_diversity_alone_decides():
    config = replace(CONFIG, candidates=5)
    names, rng = list("abcdefgh"), np.random.default_rng(0)
    found = set()
    for _ in range(20):
        cosines = rng.uniform(0, 0.2, (8, 8))
        alike = pd.DataFrame((cosines + cosines.T) / 2, names, names)
        some = case(dict(zip(names, rng.permutation(8.0 + np.arange(8)), strict=True)))
        scores = some.scores(2)
        sums, normalised = (
            set(selection.select(scores, alike, replace(config, ranking=ranking)).experts)
            for ranking in ("sum", "normalised")
        )
        told = studies.choices(some, config, names, alike)["changed by normalising"]
        assert told == (sums != normalised)
        found.add(told)
    assert found == {True, False}


@pytest.fixture
def space():
    """Shots and open data ``[S, D]`` on the unit sphere."""
    vectors = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors[:8], vectors[8:]


def test_fewer_rows_are_kept_at_a_lower_threshold(space):
    shots, open_data = space
    found = studies.kept({"own": case({"a": 1}, shots)}, open_data, replace(CONFIG, budget=20))
    shares = found.loc["own"].to_numpy()
    assert list(found.columns) == list(studies.THRESHOLDS)
    assert (np.diff(shares) <= 0).all() and shares[0] > shares[-1] > 0


def test_memory_does_not_grow_with_the_rows_of_the_stream(space):
    few, many = (studies.streamed(space[0], rows, CONFIG) for rows in (8192, 40960))
    assert many["bytes of all rows"] == 5 * few["bytes of all rows"] == 40960 * 3 * 4
    assert many["bytes at the peak"] < 1.5 * few["bytes at the peak"]
    assert many["seconds"] > 0


def test_a_map_shows_what_each_sampler_chooses(space):
    shots, open_data = space
    found = studies.maps(shots, open_data, CONFIG, seed=1)
    assert list(found) == list(studies.SAMPLERS)
    usual = found["cosine"]
    assert (len(usual["open data"]), len(usual["shots"])) == (32, 8)
    chosen = augmentation.choose(shots, [open_data], CONFIG, seed=1).index
    assert np.array_equal(usual["chosen"], usual["open data"][chosen])
