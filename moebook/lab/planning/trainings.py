"""What each notebook trains at given parameters: an entry an arm, as a plan takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from moebook import experiments, lists, together
from moebook.data import tasks
from moebook.errors import refuse_unknown
from moebook.experiments.arm import picked
from moebook.lab import papers
from moebook.lab.planning import methods
from moebook.lab.planning.dry import Training
from moebook.lab.planning.methods import Method
from moebook.methods import rocket, upcycling
from moebook.methods.rivals import table
from moebook.models.anatomy import count
from moebook.models.skeleton import configuration, skeleton
from moebook.nn.batch import longest

Given = Mapping[str, Any]
# An arm's name, its method, and what of its training is its own.
Arms = Iterator[tuple[str, Method, dict[str, Any]]]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# Tokens a row where no parameter says it.
LENGTH = {
    "bases": 256,
    "rocket": 1024,
    "rivals": 1024,
    "banks": 1024,
}


def trainings(notebook: str, given: Given) -> list[Training]:
    """List what a notebook trains with these parameters, an entry an arm, each a run of its own.

    Of the rows only the most tokens are known; tests, choosing of experts and rows, and
    PHATGOOSE's gates are left out.
    """
    message = f"{notebook} trains nothing that a plan is known for;"
    refuse_unknown(notebook, TRAINED, "E-NOTEBOOK", message)
    if notebook in experiments.CHECKS:
        experiments.check(notebook, given)
    base = skeleton(configuration(given["base"]))
    usual = _usual(notebook, given, base)
    entries: list[Training] = []
    for name, method, own in TRAINED[notebook](given):
        values = {**usual, "name": name, "method": method, **own}
        # A longer row is refused by the training.
        values["length"] = min(values["length"], longest(base))
        entries.append(Training(**values))
    return entries


def _usual(notebook: str, given: Given, base: nn.Module) -> dict[str, Any]:
    """Return what all trainings of a notebook have in common: fields of `Training`."""
    dtype = DTYPES.get(given.get("dtype", ""), torch.float32)
    # Bytes a parameter of the host that the notebook holds beside what trains: pesc the base, esft
    # what it copies, together the base in float32, router_init a copy in 16 bits as well.
    copies = {
        "pesc": dtype.itemsize,
        "esft": dtype.itemsize,
        "together": 4,
        "router_init": 4 + dtype.itemsize,
    }
    usual: dict[str, Any] = {
        "host": given["base"],
        "length": given.get("max_length", LENGTH.get(notebook)),
        "dtype": dtype,
        "beside": copies.get(notebook, 0) * float(count(base)),
    }
    for name in ("batch", "steps", "accumulate", "optimizer", "checkpointing"):
        if name in given:
            usual[name] = given[name]
    if notebook in ("router_init", "together"):  # theirs is the dtype of products
        usual["dtype"] = torch.float32
        usual["autocast"] = dtype == torch.bfloat16
    return usual


def _bases(given: Given) -> Arms:
    rows = len(tasks.CATALOGUE) * given["train_rows"]
    steps_a_pass = -(-rows // given["batch"])  # the last may be smaller
    steps = given["epochs"] * steps_a_pass
    yield "all parameters", methods.full(), {"steps": steps}


def _of_arms(arms: Mapping[str, experiments.Arm], given: Given) -> Arms:
    """Plan arms as their notebook makes and trains them, and each of its tries of a rate."""
    tries = len(experiments.rates.grid(given)) * given["rate_steps"]
    for name, arm in experiments.arm.asked(given, arms).items():
        steps = arm.recipe(given).get("steps", given["steps"])
        yield name, methods.of_arm(arm, given), {"steps": steps + tries}


def _rocket(given: Given) -> Arms:
    """Plan the arms; those that mix are tuned once a target and rate, the mixture also again."""
    targets = len(_listed(given["targets"]))
    rates = len(_listed(given["rates"]))
    tries = rates if rates > 1 else 0
    known = experiments.rocket.known(given)
    asked = _arms(given, known)
    main = experiments.rocket.main(given)
    for name in asked:
        arm = known[name]
        if arm is not None:
            rows = arm.config.shots + arm.config.budget * arm.open_data
            again = given["repeats"] if name == "mixture" else 1
            own = {"steps": _steps(given, rows), "turns": targets * (again + tries)}
            yield name, methods.mixture(arm.config, given["bank_rank"]), own
        elif name == "perplexity":  # the bank's first LoRAs, each tuned alone
            single = replace(main, candidates=1, experts=1, top_k=1)
            steps = _steps({**given, "steps": max(1, given["steps"] // 2)}, main.shots)
            own = {"steps": steps, "turns": targets * given["tuned"] * (1 + tries)}
            yield name, methods.mixture(single, given["bank_rank"]), own
    # Every run trains a LoRA on each target's own set: the check for leaks is tried by it.
    tried = tries if "expert_lora" in asked else 0
    recipe = experiments.targets.own_recipe(given)
    recipe["accumulate"] = given["accumulate"]
    yield "expert_lora", *_loras(recipe, given["whole_rows"], targets * (tried or 1))
    if experiments.rocket.makes_bank(given):
        yield "LoRAs of the bank", *_bank(given, given["bank_rank"])
    again = _listed(given["retrain"])
    if again:
        shipped = {**rocket.bank.TABLE_12, **rocket.bank.RECIPE}
        yield "LoRAs retrained", *_loras(shipped, rocket.bank.ROWS, len(again))


def _steps(given: Given, rows: int) -> int:
    """Count the steps of so many passes over so many rows, where ``epochs`` says it."""
    steps_a_pass = -(-rows // given["batch"])
    return int(given["epochs"] * steps_a_pass or given["steps"])


def _bank(given: Given, rank: int, banks: int = 1) -> tuple[Method, dict[str, Any]]:
    """Plan the LoRAs of so many banks, which the run trains itself."""
    names = _listed(given["members"]) or rocket.bank.EMBEDDED
    recipe = {**rocket.bank.RECIPE, "rank": rank, "epochs": given["bank_epochs"]}
    return _loras(recipe, given["bank_rows"], banks * len(names))


def _loras(recipe: Given, rows: int, turns: int) -> tuple[Method, dict[str, Any]]:
    """Plan LoRAs that are trained one after another, each on at most so many rows."""
    own = {
        "steps": recipe["epochs"] * -(-rows // recipe["batch"]),
        "turns": turns,
        "batch": recipe["batch"],
        "accumulate": recipe.get("accumulate", 1),
        "length": recipe.get("max_length", LENGTH["rocket"]),
    }
    return methods.bank_lora(recipe.get("rank", 16)), own


def _banks(given: Given) -> Arms:
    """Plan the mixtures, and the LoRAs of the banks of both kinds, which are trained before."""
    config = experiments.banks.main(given)
    rank = rocket.bank.RECIPE["rank"]
    turns = len(_listed(given["targets"])) * given["draws"]
    for name in experiments.banks.check(given):
        kinds = len(experiments.banks.kinds(name))
        yield name, methods.mixture(config, rank), {"turns": turns * kinds}
    kinds = len(experiments.banks.KINDS)
    yield "LoRAs of the banks", *_bank(given, rank, banks=kinds)


def _rivals(given: Given) -> Arms:
    """Plan each rival as a mixture of the LoRAs that it sees, all of them trained: the most.

    Rates are tried once for all variants of an arm, which the first of them counts.
    """
    whole = len(rocket.bank.SOURCES)
    sizes = {"whole": whole, "with_target": whole + 1, "chosen": given["experts"]}
    known = table.arms(whole, **picked(given, "experts top_k rate searches"))
    targets = len(_listed(given["targets"]))
    tries = targets * len(_listed(given["rates"]))
    tried: set[str] = set()
    for name in _arms(given, known):
        arm = known[name]
        if arm.rated:
            experts = sizes[arm.bank]
            config = rocket.Config(
                candidates=experts, experts=experts, top_k=min(2, experts)
            )
            first = arm.rated not in tried
            tried.add(arm.rated)
            turns = targets + tries * first
            yield name, methods.mixture(config, 16), {"turns": turns}
        elif name == "expert_lora":
            recipe = experiments.targets.own_recipe(given)
            recipe["epochs"] = given["bank_epochs"]
            yield name, *_loras(recipe, given["whole_rows"], targets)
    if experiments.rocket.makes_bank(given):
        yield "LoRAs of the bank", *_bank(given, 16)


def _esft(given: Given) -> Arms:
    printed = papers.printed.hyperparameters("esft", "paper")
    tries = len(_listed(given["rates"])) * -(-given["steps"] // 2)
    targets = len(_listed(given["tasks"]))
    known = experiments.esft.known(given)
    for name in _arms(given, known):
        arm = known[name]
        if arm.method == "fft":
            method = methods.full()
        elif arm.method == "lora":
            rank = int(arm.size)
            scale = given["lora_scale"]
            method = methods.lora(rank, scale, attention=arm.attention)
        else:  # the share at the paper's threshold is in proportion to another one
            threshold = printed[f"threshold_{arm.method}"]["value"]
            share = methods.esft_share(arm.method) * arm.size / threshold
            method = methods.esft(min(1.0, share))
        turns = targets if arm.main else 1
        yield name, method, {"turns": turns, "steps": given["steps"] + tries}
    # First all parameters of the base, before there is any copy of it.
    if given["align_steps"]:
        own = {"steps": given["align_steps"], "beside": 0.0}
        yield "alignment", methods.full(), own


def _together(given: Given) -> Arms:
    """Plan arms by what trains in them; how routers start and what chooses takes no memory.

    A second training, on equal FLOPs, counts as many steps as the first; some arms have it alone.
    """
    names = "parameters adapters copies experts top_k"
    config = together.Config(**picked(given, names))
    base = skeleton(configuration(given["base"]))
    no_rows = dict.fromkeys(_listed(given["tasks"]), ())
    setup = together.Setup(base, None, no_rows, config)
    again = experiments.together.trained_again(given)
    rates = len(_listed(given["rates"]))
    tries = rates * given["rate_share"] if rates > 1 else 0
    known = experiments.together.known(given)
    arms = _arms(given, known)
    for name in dict.fromkeys([*arms, *again]):
        trainings = tries + (name in arms) + (name in again)
        method = _on_one_budget(name, known, setup)
        yield name, method, {"steps": round(given["steps"] * trainings)}


def _on_one_budget(
    name: str, known: Mapping[str, experiments.together.Arm], setup: together.Setup
) -> Method:
    """Return an arm of *Together* as a plan takes it."""
    config = setup.config
    if name in experiments.together.COPIED:
        top_k = min(config.top_k, config.copies)
        return methods.upcycling(upcycling.Config(experts=config.copies, top_k=top_k))
    if name in ("token", "gate", "random_gate"):
        share = config.parameters / methods.routed(setup.base)
        return methods.esft(min(1.0, share))

    plain = known["pesc" if name.startswith("pesc") else name]
    if plain.bank or name == "mixlora":  # MixLoRA has the rank of Rocket's LoRAs
        sized = known[name] if known[name].bank else known["rocket"]
        count = config.experts if sized.chosen else len(setup.rows)
        rank = experiments.crafts.bank_rank(
            setup, sized.bank, chosen=sized.chosen, gates=sized.gates
        )
        sizes = rocket.Config(
            experts=count, top_k=min(config.top_k, count), candidates=count
        )
        return methods.mixture(sizes, rank)

    def made(host: nn.Module) -> nn.Module:
        return plain.make(setup, host, {})

    return Method((name, config), made)


TRAINED: dict[str, Callable[[Given], Arms]] = {
    "bases": _bases,
    "pesc": partial(_of_arms, experiments.pesc.ARMS),
    "router_init": partial(_of_arms, experiments.router_init.ARMS),
    "rocket": _rocket,
    "rivals": _rivals,
    "esft": _esft,
    "together": _together,
    "banks": _banks,
}


def _listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part.strip()]


def _arms(given: Given, known: Mapping[str, Any]) -> list[str]:
    return lists.arms(given["arms"], known)
