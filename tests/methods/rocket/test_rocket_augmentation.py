"""Algorithm 2 against its literal loops, streams against whole arrays, and bounded memory."""

import numpy as np
import pytest
from scipy.optimize import linprog

from moebook.errors import Refusal
from moebook.methods import rocket
from moebook.methods.rocket import augmentation, sampling


def vectors(seed, rows, width, *, copies=False):
    rng = np.random.default_rng(seed)
    found = rng.normal(size=(rows, width))
    if copies:
        found[rows // 2 :] = found[: rows - rows // 2]
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def blocks(matrix, size):
    return (matrix[at : at + size] for at in range(0, len(matrix), size))


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
def test_data_selection_equals_the_literal_algorithm_in_rows_and_order(seed, threshold, rule):
    shots, pool = vectors(seed, 5, 4), vectors(seed + 100, 120, 4)
    config = rocket.Config(budget=40, threshold=threshold, duplicates=rule)
    found = augmentation.choose(shots, blocks(pool, 17), config)
    wanted = algorithm_2(shots, pool, 40, threshold, standing=rule == "standing")
    assert found.index.tolist() == wanted
    near = [max(cosine(pool[j], shot) for shot in shots) for j in wanted]
    assert np.allclose(found.similarity, near, atol=1e-12)
    assert np.array_equal(found.vectors, pool[found.index])


def test_the_two_readings_of_the_loop_differ_on_a_chain():
    # a is near b, b near c, a not near c; a is nearest to the shots, then b, then c.
    angles = np.deg2rad([0, 20, 40])
    chain = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    near = np.array([0.9, 0.8, 0.7])
    assert augmentation.deduplicate(chain, near, 0.9).tolist() == [0, 2]
    assert augmentation.deduplicate(chain, near, 0.9, rule="any").tolist() == [0]


@pytest.mark.parametrize("rule", ["standing", "any", "index", "repr"])
def test_of_exact_copies_exactly_one_stays(rule):
    twice = vectors(0, 20, 64, copies=True)
    near = np.tile(np.linspace(1, 0.5, 10), 2)
    kept = augmentation.deduplicate(twice, near, 0.9, rule=rule)
    assert sorted(kept % 10) == list(range(10))


def test_equal_nearness_follows_the_printed_comparison():
    # Line 7 is a strict "more similar": at equality the else-branch removes i, the first of a pair.
    pair = np.array([[1.0, 0.0], [1.0, 0.0]])
    assert augmentation.deduplicate(pair, np.array([0.5, 0.5]), 0.9).tolist() == [1]


def test_released_keeps_the_lower_index_whatever_is_nearer():
    pair = np.array([[1.0, 0.0], [1.0, 0.0]])
    near = np.array([0.1, 0.9])
    assert augmentation.deduplicate(pair, near, 0.9, rule="index").tolist() == [0]
    assert augmentation.deduplicate(pair, near, 0.9).tolist() == [1]


@pytest.mark.parametrize("seed", range(5))
def test_on_the_same_rows_the_repr_filter_is_algorithm_2(seed):
    rows, near = vectors(seed, 60, 4), np.linspace(1, 0.5, 60)
    kept = augmentation.deduplicate(rows, near, 0.7, rule="repr")
    assert kept.tolist() == augmentation.deduplicate(rows, near, 0.7).tolist()
    assert len(kept) < 60


def test_the_repr_filter_goes_on_until_the_budget_is_full():
    shots = np.array([[1.0, 0.0, 0.0]])
    pool = np.repeat(vectors(3, 30, 3), 3, axis=0)
    config = rocket.Config(budget=20, threshold=0.999, duplicates="repr")
    filtered = augmentation.choose(shots, blocks(pool, 32), config)
    assert len(filtered.index) == 20
    standing = rocket.Config(budget=20, threshold=0.999)
    assert len(augmentation.choose(shots, blocks(pool, 32), standing).index) == 7


@pytest.mark.parametrize("sampler", ["centroid", "random", "hull", "kde"])
def test_samplers_repeat_and_do_not_depend_on_the_blocks(sampler):
    shots, pool = vectors(8, 20, 3), 0.2 * vectors(9, 200, 3)
    config = rocket.Config(budget=10, sampler=sampler, duplicates="keep")
    one = augmentation.choose(shots, blocks(pool, 9), config, seed=1)
    two = augmentation.choose(shots, blocks(pool, 200), config, seed=1)
    assert one.index.tolist() == two.index.tolist()
    other = augmentation.choose(shots, blocks(pool, 9), config, seed=2)
    assert (other.index.tolist() == one.index.tolist()) is (sampler == "centroid")


def test_the_centroid_sampler_takes_the_least_distance_to_the_mean():
    shots, pool = vectors(10, 6, 4), vectors(11, 50, 4)
    config = rocket.Config(budget=5, sampler="centroid", duplicates="keep")
    found = augmentation.choose(shots, [pool], config)
    distance = np.linalg.norm(pool - shots.mean(0), axis=1)
    assert set(found.index) == set(np.argsort(distance)[:5])


def test_inside_the_hull_means_what_a_linear_programme_says():
    shots, pool = vectors(12, 15, 3), vectors(13, 60, 3) * np.linspace(0.1, 1.2, 60)[:, None]
    found = sampling.inside_hull(shots, pool, components=3)
    for row, point in enumerate(pool):
        system = np.vstack([shots.T, np.ones(15)])
        feasible = linprog(np.zeros(15), A_eq=system, b_eq=np.append(point, 1)).status == 0
        assert found[row] == feasible
    assert 5 < found.sum() < 55


def test_in_the_encoders_own_space_k_shots_enclose_nothing():
    shots, pool = vectors(14, 10, 64), vectors(15, 200, 64)
    assert not sampling.inside_hull(shots, pool, components=64).any()
    config = rocket.Config(budget=5, sampler="hull", components=64)
    with pytest.raises(Refusal, match="E-DATA: none of 200 open rows lies in the hull"):
        augmentation.choose(shots, [pool], config)


def test_the_density_is_equation_17():
    shots, pool = vectors(16, 4, 3), vectors(17, 5, 3)
    for row, u in enumerate(pool):
        kernel = [np.exp(-((u - s) @ (u - s)) / 4 / 2) / np.sqrt(2 * np.pi) for s in shots]
        assert sampling.log_density(shots, pool, 2.0)[row] == pytest.approx(
            np.log(sum(kernel) / (4 * 2.0))
        )


def test_kde_draws_in_proportion_to_the_density():
    shots = np.array([[1.0, 0.0]])
    pool = np.array([[1.0, 0.0], [-1.0, 0.0]])
    config = rocket.Config(budget=1, sampler="kde", gamma=1.0, duplicates="keep")
    first = [augmentation.choose(shots, [pool], config, seed=s).index[0] == 0 for s in range(2000)]
    expected = 1 / (1 + np.exp(-2.0))  # densities exp(0) and exp(-4 / 2)
    assert np.mean(first) == pytest.approx(expected, abs=0.025)


def test_bad_embeddings_and_rules_are_refused():
    good, near = vectors(18, 4, 3), np.ones(4)
    with pytest.raises(Refusal, match="E-CHOICE: rule is 'all'"):
        augmentation.deduplicate(good, near, 0.9, rule="all")
    with pytest.raises(Refusal, match="E-SHAPE"):
        augmentation.deduplicate(good, np.ones(3), 0.9)
    with pytest.raises(Refusal, match="E-NONFINITE"):
        augmentation.deduplicate(good * np.nan, near, 0.9)
    with pytest.raises(Refusal, match="E-NONFINITE: row 2 of the pool"):
        bad = good.copy()
        bad[2] = np.nan
        augmentation.choose(good, [bad], rocket.Config(budget=2))
    with pytest.raises(Refusal, match="E-DATA: the pool is empty"):
        augmentation.choose(good, [], rocket.Config())
