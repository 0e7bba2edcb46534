"""`moebook bench` on tiny shapes, and turns, floors and goals on numbers that the test sets."""

import math
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moebook import bench, cli, kernels, results
from moebook.bench import case, choosing, layers, report, running, timing
from moebook.bench.case import Case, Product
from moebook.bench.timing import Contender, Cost, Timing
from moebook.errors import Refusal
from moebook.methods.rocket import shards
from moebook.results import store

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
    return {contender.name: contender.run for contender in case.contenders}


def test_every_op_runs_with_ours_first_and_whoever_is_missing_says_why(tiny):
    assert list(dict.fromkeys(tiny["op"])) == list(bench.OPS)
    cases = tiny.groupby(["op", "case"])["contender"]
    assert (cases.first() == "ours").all() and (cases.size() >= 2).all()
    ran, ours = tiny["seconds"].notna(), tiny[tiny["contender"] == "ours"]
    assert (tiny.loc[ran, "ratio"] > 0).all()
    assert tiny.loc[~ran, "note"].str.fullmatch("[a-z-]+ is not installed").all()
    assert (ours["ratio"] == 1).all() and (ours["traffic"] > 0).all()
    flops = ours.set_index(["op", "case"])["flops"]  # of the formulas
    T, D, F, K, R = 16, 8, 8, 2, 4
    assert flops["experts", "fine"] == 18 * T * K * D * F
    assert flops["adapters", "forward"] == 4 * T * D * K * R
    assert flops["adapters", "step"] == 12 * T * D * K * R
    assert flops["lora_mixture", "four"] == 4 * T * D * D + 6 * T * (2 * R) * (2 * D)


def test_goals_name_cases_and_who_takes_part_and_every_op_has_each_scale_and_sweep(tiny):
    for device, stated in report.GOALS.items():
        for op, part, against, kind, bound in stated:
            assert part in bench.OPS[op][running.STATED[device]]
            assert kind in report.KINDS and bound > 0
            if part in bench.OPS[op]["tiny"]:
                there = tiny[(tiny["op"] == op) & (tiny["case"] == part)]
                assert against in set(there["contender"])
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
    found = bench.errors([name], device="cpu")
    assert len(found) and found["right"].all(), found.to_string()


def test_a_wrong_answer_is_found_and_everyone_takes_the_top_k_inside_the_clock(monkeypatch):
    for contender in layers.balanced(CPU, T=16, E=4, K=2).contenders:
        with torch.profiler.profile() as seen:
            contender.run()
        chosen = "aten::topk" in {event.key for event in seen.key_averages()}
        assert chosen == (contender.name != "floor"), contender.name
    right, wrong = kernels.balance_loss, {"auto": 1 + 1e-5}
    scaled = lambda *given, impl: right(*given, impl=impl) * wrong.get(impl, 1)  # noqa: E731
    monkeypatch.setattr(kernels, "balance_loss", scaled)
    checks = bench.errors(["balance_loss"], device="cpu").set_index("what")["right"]
    assert not checks["output"] and not checks["gradient 1"]
    nats = choosing.scoring.log_perplexity
    monkeypatch.setattr(choosing.scoring, "log_perplexity", lambda *given: nats(*given) + 2e-5)
    checks = bench.errors(["bank"], device="cpu")
    assert list(checks["what"]) == ["perplexities"] and not checks["right"].any()


def test_peers_of_choosing_find_what_ours_finds_and_peft_hosts_its_bank_without_a_warning():
    run = runs(choosing.nearest(CPU, S=200, K=5, D=8, C=9))
    wanted = list(run["numpy, all at once"]())
    assert run["ours"]().index.tolist() == list(run["scikit-learn"]()) == wanted
    run = runs(choosing.duplicated(CPU, S=60, E=20, D=16))
    assert run["ours"]().tolist() == list(run["the paper's loops"]())
    vectors = np.array([[1, 0], [1, 0.1], [0, 1]], dtype=np.float32)
    assert list(choosing.literal_duplicates(vectors, np.array([0.2, 0.5, 0.1]), 0.9)) == [1, 2]
    run = runs(choosing.clustered(CPU, S=64, D=8, E=2, L=2))
    ours = run["ours"]()
    means = (ours.sums / ours.counts.unsqueeze(-1)).numpy()
    for name, labels in {"KMeans, one step and labels": True, "MiniBatchKMeans": False}.items():
        layers = run[name]()
        assert [hasattr(layer, "labels_") for layer in layers] == [labels] * 2
        assert np.stack([x.cluster_centers_ for x in layers]) == pytest.approx(means, abs=1e-5)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        run = runs(choosing.bank(CPU, N=2, S=3, R=2))
    assert [str(each.message) for each in shown] == []
    nats = run["set_adapter, shot by shot"]()
    assert nats.shape == (2, 3) and (nats[0] != nats[1]).all()


def test_a_refusal_is_a_result_and_a_peer_that_fails_is_absent_and_others_run(monkeypatch):
    line = running.measured("groups", "many", {"M": 64, "N": 8}, CPU, 1, 1.0)
    assert len(line) == 1 and "4,426,165,368 groups" in line[0]["note"]

    def fail(*given):
        raise RuntimeError("out of memory\nat a place")

    case = Case(0)
    case.invite("peer", fail)
    assert case.absent == {"peer": "out of memory"}
    monkeypatch.setattr(layers, "_published", fail)
    found = bench.measure(["adapters"], scale="tiny", device="cpu", rounds=1)
    lines = found[found["case"] == "step"].set_index("contender")
    assert lines.loc["published form", "note"] == "out of memory"
    assert list(lines.index[lines["seconds"].notna()]) == ["ours", "floor", "grouped_mm"]


def test_a_package_that_is_missing_is_named(monkeypatch, project, capsys):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    frame = bench.measure(["bank", "route"], scale="tiny", device="cpu", rounds=1)
    assert frame.iloc[0]["note"] == "peft is not installed" and math.isnan(frame.iloc[0].seconds)
    assert set(frame.loc[frame["op"] == "route", "contender"]) >= {"ours", "floor"}
    assert "not run: peft is" in report.table(frame)
    assert cli.main("bench bank --device cpu".split()) == 0
    assert capsys.readouterr().out.endswith("How cost grows: nothing ran\n")


def test_growth_fits_the_power_law_through_the_ends_and_curves_take_the_fastest_peer():
    found = bench.growth(["balance_loss"], device="cpu", rounds=1, points=2)
    assert list(dict.fromkeys(found["letter"])) == ["T", "E", "K"]
    part = found[(found["letter"] == "T") & (found["contender"] == "ours")].sort_values("value")
    slope = math.log(part["seconds"].iloc[1] / part["seconds"].iloc[0]) / math.log(2)
    assert part["value"].tolist() == [1024, 2048]
    assert part["exponent"].tolist() == pytest.approx([slope, slope])
    assert "balance_loss, tokens, T = 1024, 2048" in report.growth_table(found)
    lines = [("x", 2, 0.5), ("x", 1, 0.1), ("y", 1, 0.2), ("y", 2, 0.3), ("ours", 1, 1.0)]
    lines.append(("frozen layer alone", 1, 0.01))
    sweep = pd.DataFrame(lines, columns=["contender", "value", "seconds"])
    panel = bench.curves(sweep.assign(op="route", letter="T"))["route, T"]
    assert panel["ours"].tolist() == [[1, 1000]] and len(panel) == 2
    assert panel["fastest other"].tolist() == [[1, 100], [2, 300]]


@pytest.mark.parametrize("kept", [True, False])
def test_a_whole_run_is_kept_only_of_stated_settings(tiny, project, monkeypatch, capsys, kept):
    text = report.table(tiny)
    assert "experts / fine" in text and "grouped_mm" in text
    assert "at least 15 x as fast: not stated (" in text
    assert text.splitlines()[-1] == "no goals are stated for these cases"
    frame = tiny.copy()
    frame.attrs.update(scale="full", rounds=5, threads=1 if kept else 2)
    assert ("goals: " in report.table(frame).splitlines()[-1]) is kept
    monkeypatch.setattr(bench, "measure", lambda *given, **how: frame)
    monkeypatch.setattr(bench, "growth", lambda *given, **how: pd.DataFrame())
    monkeypatch.setattr(bench, "ceilings", lambda device: {})
    assert cli.main(["bench"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("record in results" if kept else "no record: goals are at full scale")
    assert (project / "results").exists() == kept


def test_a_run_is_read_back_with_its_environment(tiny, tmp_path, monkeypatch):
    assert bench.recorded(tmp_path) == {}
    (tmp_path / "_config.yml").touch()
    grown = bench.growth(["balance_loss"], device="cpu", rounds=1, points=1)
    path = report.write(tmp_path, tiny, grown, bench.ceilings("cpu"))
    assert path == tmp_path / "results" / "bench" / "cpu" / "0.parquet"
    record = bench.recorded(tmp_path)["cpu"]
    columns = ["op", "letter", "value", "contender", "seconds"]
    renamed = grown.assign(contender=grown["contender"].str.replace("-", "_"))[columns]
    again = bench.regrown({"cpu": record})
    pd.testing.assert_frame_equal(again[columns], renamed, check_dtype=False)
    again, ran = bench.remeasured({"cpu": record}), tiny[tiny["seconds"].notna()]
    columns = ["op", "case", "seconds", "ratio", "memory", "flops", "traffic"]
    expected = ran[columns].reset_index(drop=True)
    pd.testing.assert_frame_equal(again[columns], expected, check_dtype=False)
    assert list(again["op"] + "/" + again["case"] + "/" + again["contender"]) == list(ran["key"])
    assert (record.protocol, record.tier, record.seed) == ("cpu", "cpu", 0)
    assert record.manifest["parameters"] == tiny.attrs
    assert record.manifest["environment"]["versions"]["torch"]
    assert record.manifest["peers"]["transformers"]
    assert {goal["verdict"] for goal in record.manifest["goals"]} == {"not stated"}
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(Refusal, match="E-RUN"):
        bench.recorded(tmp_path)


def test_the_committed_run_of_a_gpu_has_the_counts_of_its_sizes():
    records = bench.recorded(Path(__file__))
    assert {"cpu", "nvidia_h200"} <= {*records} and len(bench.regrown(records)) > 500
    ours = bench.remeasured({"h200": records["nvidia_h200"]}).query("contender == 'ours'")
    assert (ours["traffic"] > 0).all()
    reached = bench.reached(ours)
    ours = ours.set_index(["op", "case"])
    one = ours.loc[("experts", "fine")]
    assert reached["experts, fine"] == (one.flops / one.traffic, one.flops / one.seconds)
    assert not any(name.startswith(("route", "groups")) for name in reached)
    assert one.flops == 18 * 8192 * 6 * 2048 * 1408
    assert ours.loc[("adapters", "forward"), "traffic"] == 2 * 16384 * 4096 * 2


def test_a_run_on_a_gpu_has_its_name_and_one_beside_it_is_of_the_cpu(tiny, project, monkeypatch):
    seen = {"accelerator": "NVIDIA H200", "accelerator_memory": 10**9, "versions": {}}
    monkeypatch.setattr("moebook.runtime.environment", lambda: dict(seen))
    frame = tiny.copy()
    frame.attrs["device"] = "cuda"
    run = results.read_run(report.write(project, frame, pd.DataFrame(), {}))
    assert (run.protocol, run.tier) == ("nvidia_h200", "gpu")
    assert store.pools("bench", project)["nvidia_h200"].runs == (run,)
    run = results.read_run(report.write(project, tiny, pd.DataFrame(), {}))
    used = run.manifest["environment"]
    assert (used["accelerator"], used["accelerator_memory"], run.tier) == (None, None, "cpu")
    assert {"bench/timing.py", "bench/cases.yaml"} <= {*run.code["modules"]}
    assert results.runs.changed(run, project) == ()
    modules = run.code["modules"] | {"bench/timing.py": "another"}
    other = replace(run, code={"lock": "another", "modules": modules})
    assert results.runs.changed(other, project) == ("lock", "bench.timing")


@pytest.mark.parametrize(("arguments", "message"), [
    (["expert"], "E-NAME: unknown op 'expert'; did you mean 'experts'?"),
    ([""], "E-USAGE: moebook bench: op is empty"),
    (["route", "--threads", "0"], "E-RANGE: --threads is 0"),
    (["route", "--rounds", "0"], "E-RANGE: rounds is 0"),
    (["shards", "--threads", "2"], "E-USAGE: moebook bench: shards takes neither --device nor"),
    (["shards", "--scale", "big"], "E-CHOICE: unknown scale 'big'; one of: full, model"),
    (["shards", "--rounds", "0"], "E-RANGE: rounds is 0"),
    (["route", "--scale", "big"], "E-CHOICE: unknown scale 'big'; one of: full, model"),
    (["--peers", "--threads", "2"], "E-USAGE: moebook bench: --peers takes neither an op nor"),
    (["route", "--device", "cudo"], "E-DEVICE: unknown device 'cudo'"),
])  # fmt: skip
def test_bad_input_ends_in_one_line(project, capsys, arguments, message):
    assert cli.main(["bench", *arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(message) and shown.count("\n") == 1


def test_peers_are_listed_one_op_leaves_no_record_and_outside_a_project_none_runs(project, capsys):
    assert cli.main(["bench", "--peers"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in running.PEERS)
    assert bench.installed().loc["numpy", "version"] == np.__version__
    assert cli.main("bench balance_loss --scale tiny --rounds 1 --device cpu".split()) == 0
    shown = capsys.readouterr().out
    assert "balance_loss / fine" in shown and "exponent" in shown
    assert not (project / "results").exists()
    (project / "_config.yml").unlink()
    assert cli.main(["bench"]) == 2
    assert capsys.readouterr().err.startswith("E-PATH: no _config.yml")


def test_rows_by_the_shard_are_timed_here_and_with_more_and_more_workers(monkeypatch, capsys):
    ray = SimpleNamespace(cluster_resources=lambda: {"CPU": 2.0})
    used = []
    monkeypatch.setattr("moebook.cluster.joined", lambda *_: nullcontext(ray))

    def actors(todo, make, engine):
        used.append(engine.workers)
        return map(shards._Actor(make), todo)

    monkeypatch.setattr(shards, "_on_ray", actors)
    monkeypatch.setattr("moebook.bench.scaling.FILES", 4)
    assert cli.main("bench shards --scale tiny --rounds 2".split()) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[2:]] == ["local", "ray,", "ray,"]
    assert used == [1, 2, 1, 2]
    assert shown[2].endswith(" 1.000")


S, D, F = 6144, 1024, 704
OURS, EAGER = (2.0, 1.0, 10), (32.0, 16.0, 10)


@pytest.fixture
def race(monkeypatch):
    """What contenders cost with given seconds for each turn, below 0 a failure; who ran when."""

    def run(rounds, budget=1e9, **seconds):
        order = []

        def read(contender, device, *, watched=False):
            order.append(contender.name)
            spent = seconds[contender.name].pop(0)
            if spent < 0:
                raise RuntimeError("out of memory\nat a place")
            return Timing(spent, 2 * spent, 7 if watched else None)

        monkeypatch.setattr(timing, "timed", read)
        contenders = [Contender(name, lambda: None) for name in seconds]
        return *timing.interleave(contenders, CPU, rounds=rounds, budget=budget), order

    return run


def test_a_ratio_is_the_median_of_the_rounds_and_a_slow_contender_has_one_turn(race):
    costs, failed, _ = race(3, ours=[9, 9, 1, 2, 10], peer=[9, 4, 2, 50])
    assert failed == {}  # the peer's ratio is that of 4, 1 and 5; medians 4 and 2 would give 2
    assert costs == {"ours": Cost(2, 4, 1, 3, 7, None), "peer": Cost(4, 8, 4, 3, 7, None)}
    costs, _, _ = race(3, 25, ours=[1] * 5, slow=[30], peer=[1] * 4)
    assert (costs["slow"].ratio, costs["slow"].rounds, costs["peer"].rounds) == (30, 1, 3)


def test_others_take_turns_in_rotating_order_and_go_on_where_one_fails(race):
    _, _, order = race(1, ours=[1] * 3, a=[1] * 2, b=[1] * 2)
    assert order == ["ours", "ours", "a", "b", "ours", "b", "a"]
    costs, failed, order = race(2, ours=[1] * 4, a=[3, -1], b=[2] * 3)
    assert failed == {"a": "out of memory"}
    assert {name: cost.ratio for name, cost in costs.items()} == {"ours": 1, "b": 2}
    assert order == ["ours", "ours", "a", "b", "ours", "b", "a", "ours", "b"]
    with pytest.raises(RuntimeError, match="out of memory"):
        race(2, ours=[1, 1, -1], a=[1] * 3)
    errors = ValueError("\nno\nplace"), MemoryError(), Refusal("E-PEER", "peft is not installed")
    assert [timing.why(e) for e in errors] == ["no", "MemoryError", "peft is not installed"]


def test_gradients_of_the_last_run_are_freed_before_the_next():
    leaf, seen = torch.zeros(2, requires_grad=True), []

    def run():
        leaf.sum().backward()
        seen.append(leaf.grad.clone())

    timing.interleave([Contender("ours", run, [leaf])], CPU, rounds=1, budget=1.0)
    assert [grad.tolist() for grad in seen] == [[1, 1]] * 3


def test_extra_memory_is_what_a_run_needs_over_what_was_held():
    small = timing.timed(Contender("none", lambda: None), CPU, watched=True)
    if small.memory is None:
        pytest.skip("only Linux tells resident memory")
    large = timing.timed(Contender("large", lambda: torch.ones(2**24)), CPU, watched=True)
    assert small.memory < 2**24
    assert large.memory == pytest.approx(2**26, rel=0.1)  # the system counts in steps
    assert large.seconds >= 0 < large.wall


def test_the_floor_has_two_flops_a_term_and_takes_the_faster_library(monkeypatch):
    for shape, flops in (((2, 3, 5), 60), ((2, 3, 5, 4), 240)):
        contender = case.dense([Product(*shape)], CPU, torch.float32)
        with FlopCounterMode(display=False) as counted:
            contender.run()
        assert contender.name == "floor"
        assert counted.get_total_flops() == Product(*shape).flops == flops
    for trained, times in ((S, 18), (S // 2, 15), (0, 12)):
        step = case.expert_step(S, trained, D, F)
        assert sum(each.flops for each in step) == times * S * D * F
    shapes = []  # the floor takes the faster library, in results that are not new memory
    monkeypatch.setattr(case, "BLOCK", 10)
    monkeypatch.setattr(case, "product", lambda left, right: shapes.append(left.shape))
    for blocked_is_faster in (True, False):
        seconds = lambda run, to=blocked_is_faster: isinstance(run, partial) == to  # noqa: E731
        monkeypatch.setattr(case, "_seconds", seconds)
        case.dense([Product(5, 3, 5)], CPU, torch.float32).run()
        assert shapes == [(2, 3), (2, 3), (1, 3)]


def frame(**rows):
    """One case of experts: contender to (seconds, ratio, kept)."""
    measured = pd.DataFrame(rows.values(), columns=["seconds", "ratio", "kept"])
    profiles = [{"aten::mm": 0.9, "all else": 0.1}] * len(rows)
    rest = {"wall": 1.0, "note": "refused", "profile": profiles, "contender": list(rows)}
    measured = measured.assign(op="experts", case="fine", **rest)
    measured.attrs.update(device="cpu", scale="full", rounds=5, threads=1)
    return measured


def test_goals_are_met_or_missed_by_the_ratio_in_their_direction():
    measured = frame(ours=OURS, eager=EAGER, grouped_mm=(2.4, 1.2, 10), floor=(1.8, 0.9, 0))
    verdicts = report.judge(measured).set_index("against")
    assert verdicts["verdict"].to_dict() == {"eager": "met", "grouped_mm": "missed", "floor": "met"}
    assert verdicts.loc["floor", "measured"] == pytest.approx(1 / 0.9)
    assert verdicts.loc["eager", "goal"] == "at least 15 x as fast"
    reason = "aten::mm 0.75, all else 0.08; the floor alone 0.75"
    assert verdicts["reason"].to_dict() == {"eager": "", "floor": "", "grouped_mm": reason}
    measured = frame(ours=OURS, floor=(math.nan, math.nan, 0))
    assert set(report.judge(measured)["verdict"]) == {"not run"}
    refused = report.judge(frame(ours=(math.nan, math.nan, 0), floor=(1.0, 1.0, 0)))
    assert set(refused["verdict"]) == {"missed"} and set(refused["reason"]) == {"refused"}
    measured = frame(ours=(1.0, 1.0, 30), grouped_mm=(1.5, 1.5, 100), floor=(0.8, 0.8, 0))
    measured.attrs.update(device="cuda", scale="model")  # whose goals are others
    goals = report.judge(measured)
    assert list(goals["verdict"]) == ["met", "met", "met"]
    assert list(goals["measured"]) == pytest.approx([1.25, 1.5, 0.3])


def test_goals_are_stated_for_their_scale_rounds_and_thread_and_a_bound_itself_is_met():
    for setting, value in (("rounds", 9), ("rounds", 4), ("threads", 2), ("scale", "small")):
        measured = frame(ours=OURS, eager=EAGER)
        measured.attrs[setting] = value
        assert report.stated(measured) is (value == 9)
        verdicts = set(report.judge(measured)["verdict"])
        assert verdicts == ({"met", "not run"} if value == 9 else {"not stated"})

    for kind, value, met in (
        ("faster", 2.0, True), ("faster", 1.9, False), ("within", 2.0, True),
        ("within", 2.1, False), ("memory", 2.1, False), ("seconds", 1.0, True),
    ):  # fmt: skip
        assert report.KINDS[kind][1](value, 2.0) is met, kind
