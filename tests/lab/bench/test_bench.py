"""`moebook bench` on tiny shapes; turns, floors and goals on numbers the test sets."""

import json
import math
import sys
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moebook import cli, kernels, models, runtime
from moebook.errors import Refusal
from moebook.kernels import matmul
from moebook.lab import bench, records
from moebook.lab.bench import (
    calibration,
    case,
    choosing,
    layers,
    report,
    running,
    steps,
    timing,
)
from moebook.lab.bench.case import Case, Product
from moebook.lab.bench.timing import Contender, Cost, Timing
from moebook.lab.records import store
from moebook.methods.rocket import shards
from tests.refusals import refused

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny():
    return bench.measure(scale="tiny", device="cpu", rounds=1)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty project, entered; what the command sets in the environment is undone."""
    (tmp_path / "_config.yml").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "1")
    return tmp_path


def runs(case):
    """What each contender of a case runs, by name."""
    return {contender.name: contender.run for contender in case.contenders}


def test_every_op_runs_with_ours_first_and_whoever_is_missing_says_why(tiny):
    assert list(dict.fromkeys(tiny["op"])) == list(bench.OPS)
    cases = tiny.groupby(["op", "case"])["contender"]
    assert (cases.first() == "ours").all()
    assert (cases.size() >= 2).all()
    ran = tiny["seconds"].notna()
    told = tiny.loc[tiny["contender"] == "semantic_search", "note"]
    assert len(told)
    if not find_spec("sentence_transformers"):
        assert (told == "sentence-transformers is not installed").all()
    assert (tiny.loc[ran, "ratio"] > 0).all()
    assert tiny.loc[~ran, "note"].str.fullmatch("[a-z-]+ is not installed").all()
    ours = tiny[tiny["contender"] == "ours"]
    assert (ours["ratio"] == 1).all()
    assert (ours["traffic"] > 0).all()
    flops = ours.set_index(["op", "case"])["flops"]  # of the formulas
    T = 16
    D = 8
    F = 8
    K = 2
    R = 4
    assert flops["experts", "fine"] == 18 * T * K * D * F
    assert flops["adapters", "forward"] == 4 * T * D * K * R
    assert flops["adapters", "step"] == 12 * T * D * K * R
    assert flops["lora_mixture", "four"] == 4 * T * D * D + 6 * T * (2 * R) * (2 * D)


def test_goals_name_cases_and_who_takes_part_and_every_op_has_each_scale_and_sweep(
    tiny,
):
    contenders = tiny.groupby(["op", "case"])["contender"].agg(set)
    for device, goals in report.GOALS.items():
        for op, part, against, kind, bound in goals:
            assert part in bench.OPS[op][running.STATED[device]]
            assert kind in report.WORDINGS
            assert bound > 0
            if part in bench.OPS[op]["tiny"]:
                assert against in contenders[op, part]
    for op in bench.OPS.values():
        assert all(op[scale] for scale in running.SCALES)
        letters = next(iter(op["small"].values()))
        assert list(op["sweep"]) == ["T", "E", "N"]
        for letter, _, values in op["sweep"].values():
            assert values == sorted(set(values))
            assert letter in letters
    roles = {"T": "S: rows of the pool", "E": "K: shots", "N": "C: rows chosen"}
    assert bench.roles(["nearest"]).loc["nearest"].to_dict() == roles


@pytest.mark.parametrize("name", list(bench.OPS))
def test_every_op_answers_rightly(name):
    checks = bench.errors([name], device="cpu")
    assert len(checks)
    assert checks["right"].all(), checks.to_string()


def test_a_wrong_answer_is_found_and_everyone_takes_the_top_k_inside_the_clock(
    monkeypatch,
):
    for contender in layers.balanced(CPU, T=16, E=4, K=2).contenders:
        with torch.profiler.profile() as profile:
            contender.run()
        ops = {event.key for event in profile.key_averages()}
        takes_top_k = contender.name != "floor"
        assert ("aten::topk" in ops) == takes_top_k, contender.name

    right = kernels.balance_loss

    def wrong(*given, impl):
        return right(*given, impl=impl) * (1 + 1e-5 if impl == "auto" else 1)

    monkeypatch.setattr(kernels, "balance_loss", wrong)
    checks = bench.errors(["balance_loss"], device="cpu").set_index("what")["right"]
    assert not checks["output"]
    assert not checks["gradient 1"]

    nats = choosing.score.log_perplexity
    shifted = lambda *given: nats(*given) + 2e-5  # noqa: E731
    monkeypatch.setattr(choosing.score, "log_perplexity", shifted)
    checks = bench.errors(["bank"], device="cpu")
    assert list(checks["what"]) == ["perplexities"]
    assert not checks["right"].any()


def test_peers_of_nearest_rows_and_of_duplicates_find_what_ours_finds():
    run = runs(choosing.nearest(CPU, S=200, K=5, D=8, C=9))
    rows = list(run["numpy, all at once"]())
    assert run["ours"]().index.tolist() == rows
    assert list(run["scikit-learn"]()) == rows
    run = runs(choosing.duplicated(CPU, S=60, E=20, D=16))
    assert run["ours"]().tolist() == list(run["the paper's loops"]())
    vectors = np.array([[1, 0], [1, 0.1], [0, 1]], dtype=np.float32)
    similarity = np.array([0.2, 0.5, 0.1])
    assert list(choosing.literal_duplicates(vectors, similarity, 0.9)) == [1, 2]


def test_peft_hosts_the_bank_without_a_warning():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        run = runs(choosing.bank(CPU, N=2, S=3, R=2))
    assert [str(warning.message) for warning in shown] == []
    nats = run["set_adapter, shot by shot"]()
    assert nats.shape == (2, 3)
    assert (nats[0] != nats[1]).all()


def test_a_step_has_the_products_that_the_plain_loop_does_and_its_gradients(
    monkeypatch,
):
    # oneDNN's products, which an AMD processor gets, are not counted.
    monkeypatch.setattr(matmul, "is_wider", lambda: False)
    case = steps.pesc_step(CPU, B=4, E=4, R=4)
    by_name = {contender.name: contender for contender in case.contenders}
    for name in ("plain loop with PEFT", steps.HOST):
        by_name[name].prepare()
        with FlopCounterMode(display=False) as counter:
            by_name[name].run()
        counted = counter.get_flop_counts()["Global"]
        products = counted[torch.ops.aten.mm] + counted.get(torch.ops.aten.addmm, 0)
        # The angles of rotary positions are not counted.
        assert 0 <= products - case.flops < 1e-5 * products

    monkeypatch.setattr(steps.mnn.experts, "dropout", lambda x, share: 1.01 * x)
    assert not bench.errors(["pesc_step"], device="cpu")["right"].any()


def test_a_gradient_that_is_no_number_is_wrong_wherever_it_stands(monkeypatch):
    leaves = [torch.ones(2, requires_grad=True) for _ in range(4)]

    def graded():
        for leaf in leaves:
            leaf.grad = torch.ones(2)
        leaves[1].grad[0] = math.nan

    made = SimpleNamespace(contenders=[Contender("", graded)], leaves=leaves)
    monkeypatch.setattr(running, "build", lambda *_, **__: made)
    assert not bench.errors(["pesc_step"], device="cpu")["right"].any()


@pytest.mark.parametrize("cotangent", [None, torch.ones(2)])
def test_who_is_added_keeps_its_clock_and_ends_with_what_comes_after(cotangent):
    x = torch.ones(2, requires_grad=True)
    ended = []
    made = Case(0, cotangent, [x])
    made.add("host", lambda: 2 * x, host=True, after=lambda: ended.append(x.grad))
    (contender,) = made.contenders
    contender.run()
    assert contender.host
    assert len(ended) == 1
    assert (ended[0] is None) == (cotangent is None)


@pytest.mark.parametrize(("backward", "flops"), [(0, 6), (1, 12)])
def test_a_frozen_ffn_has_products_backward_only_where_there_is_a_backward_pass(
    backward, flops
):
    sizes = {"T": 16, "D": 8, "R": 4, "E": 4, "K": 2, "backward": backward}
    alone = layers.routed_adapters(CPU, **sizes)
    behind = layers.routed_adapters(CPU, **sizes, F=8)
    assert behind.flops - alone.flops == flops * 16 * 8 * 8


def test_a_refusal_is_a_result_and_a_peer_that_fails_is_absent_and_others_run(
    monkeypatch,
):
    lines = running.measured("route", "few", {"T": 4, "E": 2, "K": 3}, CPU, 1, 1.0)
    assert len(lines) == 1
    assert lines[0]["note"].startswith("route: top_k is 3")

    def fail(*given):
        raise RuntimeError("out of memory\nat a place")

    case = Case(0)
    case.invite("peer", fail)
    assert case.absent == {"peer": "out of memory"}
    monkeypatch.setattr(layers, "_published", fail)
    frame = bench.measure(["adapters"], scale="tiny", device="cpu", rounds=1)
    lines = frame[frame["case"] == "step"].set_index("contender")
    assert lines.loc["published form", "note"] == "out of memory"
    assert list(lines.index[lines["seconds"].notna()]) == [
        "ours",
        "floor",
        "grouped_mm",
    ]


def test_a_package_that_is_missing_is_named(monkeypatch, project, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)
    frame = bench.measure(["bank", "route"], scale="tiny", device="cpu", rounds=1)
    assert frame.loc[0, "note"] == "peft is not installed"
    assert math.isnan(frame.loc[0, "seconds"])
    assert set(frame.loc[frame["op"] == "route", "contender"]) >= {"ours", "floor"}
    assert "not run: peft is" in report.table(frame)
    assert cli.main("bench bank --device cpu".split()) == 0
    assert capsys.readouterr().out.endswith("How cost grows: nothing ran\n")


def test_growth_fits_the_power_law_through_the_ends_and_curves_take_the_fastest_peer():
    frame = bench.growth(["balance_loss"], device="cpu", rounds=1, points=2)
    assert list(dict.fromkeys(frame["letter"])) == ["T", "E", "K"]
    ours = frame[(frame["letter"] == "T") & (frame["contender"] == "ours")]
    small, large = ours.sort_values("value").itertuples()
    assert (small.value, large.value) == (1024, 2048)
    slope = math.log(large.seconds / small.seconds) / math.log(2)
    assert ours["exponent"].tolist() == pytest.approx([slope, slope])
    assert "balance_loss, tokens, T = 1024, 2048" in report.growth_table(frame)
    # Of four experts a token cannot choose eight: that point is left out.
    few = bench.growth(["balance_loss"], scale="tiny", device="cpu", rounds=1)
    assert few[few["letter"] == "K"]["value"].max() <= 4
    refused("E-CHOICE", bench.growth, scale="huge")
    refused("E-RANGE: rounds is -1", bench.growth, rounds=-1)

    lines = [
        ("x", 2, 0.5),
        ("x", 1, 0.1),
        ("y", 1, 0.2),
        ("y", 2, 0.3),
        ("ours", 1, 1.0),
        ("frozen layer alone", 1, 0.01),
    ]
    sweep = pd.DataFrame(lines, columns=["contender", "value", "seconds"])
    panel = bench.curves(sweep.assign(op="route", letter="T"))["route, T"]
    assert list(panel) == ["ours", "fastest other"]
    assert panel["ours"].tolist() == [[1, 1000]]
    assert panel["fastest other"].tolist() == [[1, 100], [2, 300]]


def test_sweeps_whose_largest_sizes_differ_say_nothing_of_who_is_the_fastest():
    lines = [
        ("even", "ours", 2, 1.0),
        ("even", "x", 2, 3.0),
        ("behind", "ours", 2, 2.0),
        ("behind", "x", 2, 1.0),
        ("shorter", "ours", 1, 1.0),
        ("shorter", "x", 2, 3.0),
        ("longer", "ours", 2, 1.0),
        ("longer", "x", 1, 3.0),
        ("alone", "ours", 2, 1.0),
    ]
    sweeps = pd.DataFrame(lines, columns=["op", "contender", "value", "seconds"])
    panels = bench.curves(sweeps.assign(letter="T"))
    assert bench.told(panels).endswith(" ours is the fastest in 1 of 2 sweeps")


def test_why_a_contender_did_not_run_stands_apart_from_its_goal(tiny):
    frame = tiny.copy()
    lacking = frame["contender"] == "grouped_mm"
    frame.loc[lacking, "seconds"] = math.nan
    frame.loc[lacking, "note"] = "it is gone"
    assert "not run: it is gone; at least" in report.table(frame)


def test_cases_without_goals_are_told_from_settings_without(tiny, monkeypatch):
    monkeypatch.setitem(report.GOALS, "cpu", [])
    assert report.table(tiny).endswith("\n\nno goals are stated for these cases")


@pytest.mark.parametrize("kept", [True, False])
def test_a_whole_run_is_kept_only_of_stated_settings(
    tiny, project, monkeypatch, capsys, kept
):
    text = report.table(tiny)
    assert "experts / fine" in text
    assert "grouped_mm" in text
    assert "at least 15 x as fast: not stated (" in text
    other = "at scale full, in 5 rounds or more, on one thread"
    last_line = text.splitlines()[-1]
    assert last_line == f"goals are stated for other settings: {other}"

    frame = tiny.copy()
    frame.attrs.update(scale="full", rounds=5, threads=1 if kept else 2)
    assert ("goals: " in report.table(frame).splitlines()[-1]) is kept
    monkeypatch.setattr(bench, "measure", lambda *given, **how: frame)
    monkeypatch.setattr(bench, "growth", lambda *given, **how: pd.DataFrame())
    monkeypatch.setattr(bench, "ceilings", lambda device: {})
    assert cli.main(["bench"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    start = "record in results" if kept else "no record: goals are at full scale"
    assert last.startswith(start)
    assert (project / "results").exists() == kept


def assert_equal(frame, expected):
    pd.testing.assert_frame_equal(frame, expected, check_dtype=False)


def test_a_run_is_read_back_with_its_environment(tiny, tmp_path, monkeypatch):
    assert bench.recorded(tmp_path) == {}
    (tmp_path / "_config.yml").touch()
    grown = bench.growth(["balance_loss"], device="cpu", rounds=1, points=1)
    path = report.write(tmp_path, tiny, grown, bench.ceilings("cpu"))
    assert path == tmp_path / "results" / "bench" / "cpu" / "0.parquet"
    record = bench.recorded(tmp_path)["cpu"]

    columns = ["op", "letter", "value", "contender", "seconds"]
    slugs = grown["contender"].str.replace("-", "_")
    again = bench.regrown({"cpu": record})
    assert_equal(again[columns], grown.assign(contender=slugs)[columns])

    columns = ["op", "case", "seconds", "ratio", "memory", "flops", "traffic"]
    ran = tiny[tiny["seconds"].notna()].reset_index(drop=True)
    again = bench.remeasured({"cpu": record})
    assert_equal(again[columns], ran[columns])
    keys = again["op"] + "/" + again["case"] + "/" + again["contender"]
    assert list(keys) == list(ran["key"])
    called = bench.remeasured({"cpu": record}, ran["contender"])
    assert list(called["contender"]) == list(ran["contender"])

    assert (record.protocol, record.tier, record.seed) == ("cpu", "cpu", 0)
    assert record.manifest["parameters"] == tiny.attrs
    none = {"accelerator": None, "accelerator_memory": None}
    assert record.manifest["environment"] == runtime.environment() | none
    assert record.manifest["peers"]["transformers"]
    verdicts = {goal["verdict"] for goal in record.manifest["goals"]}
    assert verdicts == {"not stated"}
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(Refusal, match="E-RUN"):
        bench.recorded(tmp_path)


def test_the_roof_of_trainings_is_measured_in_their_own_number_format(
    monkeypatch, tmp_path
):
    """Also where ops are timed in bfloat16, as on a GPU."""
    asked = []

    def dense(products, device, dtype):
        asked.append(dtype)
        return Contender("floor", lambda: None)

    free = SimpleNamespace(seconds=1.0)
    costs = {"floor": free, "copy": free}
    monkeypatch.setattr(running, "number_format", lambda device: torch.bfloat16)
    monkeypatch.setattr(running, "dense", dense)
    monkeypatch.setattr(running, "interleave", lambda *given, **how: (costs, {}))
    monkeypatch.setattr(calibration, "_measured", lambda *given: {})
    path = calibration.calibrate("cpu", tmp_path)
    model, _ = models.load(calibration.Case("all", "nano", None).base)
    assert asked == [next(model.parameters()).dtype] == [torch.float32]
    roof = json.loads(path.read_text())["roof"]
    assert roof["bytes"] == 2 * 64 * 1024**2 * 4  # of the copy, read and written
    assert running.ceilings("cpu")["bytes"] == roof["bytes"] / 2


def test_the_committed_run_of_a_gpu_has_the_counts_of_its_sizes():
    records = bench.recorded(Path(__file__))
    assert {"cpu", "nvidia_h200"} <= {*records}
    assert len(bench.regrown(records)) > 500
    h200 = bench.remeasured({"h200": records["nvidia_h200"]})
    ours = h200.query("contender == 'ours'")
    assert (ours["traffic"] > 0).all()
    reached = bench.reached(ours)
    assert not any(name.startswith("route") for name in reached)

    ours = ours.set_index(["op", "case"])
    fine = ours.loc[("experts", "fine")]
    rates = (fine.flops / fine.traffic, fine.flops / fine.seconds)
    assert reached["experts, fine"] == rates
    assert fine.flops == 18 * 8192 * 6 * 2048 * 1408
    assert ours.loc[("adapters", "forward"), "traffic"] == 2 * 16384 * 4096 * 2


def test_a_run_on_a_gpu_has_its_name_and_one_beside_it_is_of_the_cpu(
    tiny, project, monkeypatch
):
    machine = {
        "accelerator": "NVIDIA H200",
        "accelerator_memory": 10**9,
        "versions": {},
    }
    monkeypatch.setattr("moebook.runtime.environment", lambda: dict(machine))
    frame = tiny.copy()
    frame.attrs["device"] = "cuda"
    run = records.read_run(report.write(project, frame, pd.DataFrame(), {}))
    assert (run.protocol, run.tier) == ("nvidia_h200", "gpu")
    assert store.pools("bench", project)["nvidia_h200"].runs == (run,)

    run = records.read_run(report.write(project, tiny, pd.DataFrame(), {}))
    environment = run.manifest["environment"]
    assert (run.protocol, run.tier) == ("cpu", "cpu")
    assert environment["accelerator"] is None
    assert environment["accelerator_memory"] is None
    assert {"lab/bench/timing.py", "lab/bench/cases.yaml"} <= {*run.code["modules"]}
    assert records.runs.changed(run, project) == ()
    modules = run.code["modules"] | {"lab/bench/timing.py": "another"}
    other = replace(run, code={"lock": "another", "modules": modules})
    assert records.runs.changed(other, project) == ("lock", "lab.bench.timing")


REFUSALS = [
    (["expert"], "E-NAME: unknown op 'expert'; did you mean 'experts'?"),
    ([""], "E-USAGE: moebook bench: op is empty"),
    (["route", "--threads", "0"], "E-RANGE: --threads is 0"),
    (["route", "--rounds", "0"], "E-RANGE: rounds is 0"),
    (["shards", "--threads", "2"], "E-USAGE: moebook bench: shards takes neither"),
    (["shards", "--scale", "big"], "E-CHOICE: unknown scale 'big'; one of: full, "),
    (["shards", "--rounds", "0"], "E-RANGE: rounds is 0"),
    (["route", "--scale", "big"], "E-CHOICE: unknown scale 'big'; one of: full, model"),
    (["--peers", "--threads", "2"], "E-USAGE: moebook bench: --peers takes neither"),
    (["route", "--device", "cudo"], "E-DEVICE: unknown device 'cudo'"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSALS)
def test_bad_input_ends_in_one_line(project, capsys, arguments, message):
    assert cli.main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_peers_are_listed_one_op_leaves_no_record_and_outside_a_project_none_runs(
    project, capsys
):
    assert cli.main(["bench", "--peers"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in running.PEERS)
    assert bench.installed().loc["numpy", "version"] == np.__version__
    assert (
        cli.main("bench balance_loss --scale tiny --rounds 1 --device cpu".split()) == 0
    )
    shown = capsys.readouterr().out
    assert "balance_loss / fine" in shown
    assert "exponent" in shown
    assert not (project / "results").exists()
    (project / "_config.yml").unlink()
    assert cli.main(["bench"]) == 2
    assert capsys.readouterr().err.startswith("E-PATH: no _config.yml")


def test_rows_by_the_shard_are_timed_here_and_with_more_and_more_workers(
    monkeypatch, capsys
):
    ray = SimpleNamespace(cluster_resources=lambda: {"CPU": 2.0})
    workers = []
    monkeypatch.setattr("moebook.cluster.joined", lambda *_: nullcontext(ray))

    def actors(todo, make, engine):
        workers.append(engine.workers)
        return map(shards._Actor(make), todo)

    monkeypatch.setattr(shards, "_on_ray", actors)
    monkeypatch.setattr("moebook.lab.bench.scaling.FILES", 4)
    assert cli.main("bench shards --scale tiny --rounds 2".split()) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == ["local", "ray,", "ray,"]
    assert workers == [1, 2, 1, 2]
    assert lines[0].endswith(" 1.000")


@pytest.fixture
def race(monkeypatch):
    """Costs and turns of contenders with given seconds a turn; below 0 it fails."""

    def run(rounds, budget=1e9, **seconds):
        order = []

        def read(contender, device, *, watched=False):
            order.append(contender.name)
            work = seconds[contender.name].pop(0)
            if work < 0:
                raise RuntimeError("out of memory\nat a place")
            return Timing(work, wall=2 * work, memory=7 if watched else None)

        monkeypatch.setattr(timing, "timed", read)
        contenders = [Contender(name, lambda: None) for name in seconds]
        costs, failed = timing.interleave(contenders, CPU, rounds=rounds, budget=budget)
        return costs, failed, order

    return run


def test_a_ratio_is_the_median_of_the_rounds_and_a_slow_contender_has_one_turn(race):
    costs, failed, _ = race(3, ours=[9, 9, 1, 2, 10], peer=[9, 4, 2, 50])
    assert failed == {}
    # The median of 4 / 1, 2 / 2 and 50 / 10; medians of seconds, 4 and 2, would give 2.
    assert costs == {
        "ours": Cost(2, 4, 1, 3, 7, None),
        "peer": Cost(4, 8, 4, 3, 7, None),
    }
    costs, _, _ = race(3, 25, ours=[1] * 5, slow=[30], peer=[1] * 4)
    assert (costs["slow"].ratio, costs["slow"].rounds) == (30, 1)
    assert costs["peer"].rounds == 3


def test_others_take_turns_in_rotating_order_and_go_on_where_one_fails(race):
    _, _, order = race(1, ours=[1] * 3, a=[1] * 2, b=[1] * 2)
    assert order == ["ours", "ours", "a", "b", "ours", "b", "a"]
    costs, failed, order = race(2, ours=[1] * 4, a=[3, -1], b=[2] * 3)
    assert failed == {"a": "out of memory"}
    assert {name: cost.ratio for name, cost in costs.items()} == {"ours": 1, "b": 2}
    assert order == ["ours", "ours", "a", "b", "ours", "b", "a", "ours", "b"]
    with pytest.raises(RuntimeError, match="out of memory"):
        race(2, ours=[1, 1, -1], a=[1] * 3)
    assert timing.why(ValueError("\nno\nplace")) == "no"
    assert timing.why(MemoryError()) == "MemoryError"
    missing = Refusal("E-PEER", "peft is not installed")
    assert timing.why(missing) == "peft is not installed"


def test_gradients_of_the_last_run_are_freed_before_the_next():
    leaf = torch.zeros(2, requires_grad=True)
    gradients = []

    def run():
        leaf.sum().backward()
        gradients.append(leaf.grad.tolist())

    timing.interleave([Contender("ours", run, [leaf])], CPU, rounds=1, budget=1.0)
    assert gradients == [[1, 1]] * 3


def test_extra_memory_is_what_a_run_needs_over_what_was_held():
    small = timing.timed(Contender("none", lambda: None), CPU, watched=True)
    if small.memory is None:
        pytest.skip("only Linux tells resident memory")
    floats = Contender("large", lambda: torch.ones(2**24))
    large = timing.timed(floats, CPU, watched=True)
    assert small.memory < 2**24
    assert large.memory == pytest.approx(2**26, rel=0.1)  # the system counts in steps
    assert large.seconds >= 0 < large.wall


def test_the_floor_has_two_flops_a_term_and_takes_the_faster_library(monkeypatch):
    for shape, flops in (((2, 3, 5), 60), ((2, 3, 5, 4), 240)):
        contender = case.dense([Product(*shape)], CPU, torch.float32)
        with FlopCounterMode(display=False) as counter:
            contender.run()
        assert contender.name == "floor"
        assert counter.get_total_flops() == Product(*shape).flops == flops
    S = 6144
    D = 1024
    F = 704
    for trained, times in ((S, 18), (S // 2, 15), (0, 12)):
        step = case.expert_step(S, trained, D, F)
        assert sum(product.flops for product in step) == times * S * D * F

    # Where our own product is the faster library, it writes few rows at a time.
    shapes = []
    monkeypatch.setattr(case, "BLOCK", 10)
    monkeypatch.setattr(case, "product", lambda left, right: shapes.append(left.shape))
    for ours_is_faster in (True, False):

        def seconds(run, torchs_time=ours_is_faster):
            return torchs_time if isinstance(run, partial) else 0.5

        monkeypatch.setattr(case, "_seconds", seconds)
        case.dense([Product(5, 3, 5)], CPU, torch.float32).run()
        assert shapes == [(2, 3), (2, 3), (1, 3)]


OURS = (2.0, 1.0, 10)
EAGER = (32.0, 16.0, 10)


def frame(**rows):
    """One case of experts: contender to (seconds, ratio, kept)."""
    measured = pd.DataFrame(rows.values(), columns=["seconds", "ratio", "kept"])
    measured["op"] = "experts"
    measured["case"] = "fine"
    measured["contender"] = list(rows)
    measured["wall"] = 1.0
    measured["note"] = "refused"
    measured["profile"] = [{"aten::mm": 0.9, "all else": 0.1}] * len(rows)
    measured.attrs.update(device="cpu", scale="full", rounds=5, threads=1)
    return measured


def test_goals_are_met_or_missed_by_the_ratio_in_their_direction():
    times = {"grouped_mm": (2.4, 1.2, 10), "floor": (1.8, 0.9, 0)}
    verdicts = report.judge(frame(ours=OURS, eager=EAGER, **times)).set_index("against")
    expected = {"eager": "met", "grouped_mm": "missed", "floor": "met"}
    assert verdicts["verdict"].to_dict() == expected
    assert verdicts.loc["floor", "measured"] == pytest.approx(1 / 0.9)
    assert verdicts.loc["eager", "goal"] == "at least 15 x as fast"
    reason = "aten::mm 0.75, all else 0.08; the floor alone 0.75"
    expected = {"eager": "", "floor": "", "grouped_mm": reason}
    assert verdicts["reason"].to_dict() == expected


def test_goals_of_who_did_not_run_are_told_and_a_gpu_has_its_own():
    absent = (math.nan, math.nan, 0)
    verdicts = report.judge(frame(ours=OURS, floor=absent))
    assert set(verdicts["verdict"]) == {"not run"}
    verdicts = report.judge(frame(ours=absent, floor=(1.0, 1.0, 0)))
    assert set(verdicts["verdict"]) == {"missed"}
    assert set(verdicts["reason"]) == {"refused"}
    times = {"grouped_mm": (1.5, 1.5, 100), "floor": (0.8, 0.8, 0)}
    measured = frame(ours=(1.0, 1.0, 30), **times)
    measured.attrs.update(device="cuda", scale="model")
    verdicts = report.judge(measured)
    assert list(verdicts["verdict"]) == ["met", "met", "met"]
    assert list(verdicts["measured"]) == pytest.approx([1.25, 1.5, 0.3])


SETTINGS = [
    ("rounds", 9, {"met", "not run"}),
    ("rounds", 4, {"not stated"}),
    ("threads", 2, {"not stated"}),
    ("scale", "small", {"not stated"}),
]


@pytest.mark.parametrize(("setting", "value", "verdicts"), SETTINGS)
def test_goals_are_stated_for_their_scale_rounds_and_thread(setting, value, verdicts):
    measured = frame(ours=OURS, eager=EAGER)
    measured.attrs[setting] = value
    assert report.stated(measured) is ("not stated" not in verdicts)
    assert set(report.judge(measured)["verdict"]) == verdicts


BOUNDS = [
    ("faster", 2.0, True),
    ("faster", 1.9, False),
    ("within", 2.0, True),
    ("within", 2.1, False),
    ("memory", 2.1, False),
    ("seconds", 1.0, True),
]


@pytest.mark.parametrize(("kind", "value", "met"), BOUNDS)
def test_a_bound_itself_is_met(kind, value, met):
    assert report.right(kind, value, 2.0) is met
