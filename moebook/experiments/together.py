"""The arms on one budget and what they need; how each is made `experiments.crafts` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from moebook import lists
from moebook import nn as mnn
from moebook.data import tasks
from moebook.errors import nearest
from moebook.experiments import crafts, needs, rates
from moebook.experiments.arm import Complaints, Settings, complaint
from moebook.experiments.checks import Check
from moebook.experiments.effects import Idle
from moebook.methods.rivals import mixlora
from moebook.models.anatomy import anatomy
from moebook.models.skeleton import configuration, skeleton
from moebook.together import Setup
from moebook.training.loop import Penalty

BALANCE = 0.01  # weight of the balance loss
# What each arm is compared with.
COMPARED = {
    "lora": ["full"],
    "pesc": ["lora", "full", "gate"],
    "su": ["full"],
    "trsu": ["su"],
    "crsu": ["su"],
    "rocket": ["lora", "pesc", "mixlora", "smear", "arrow"],
    "esft": ["su"],
    "mixlora": ["pesc"],
    "pesc_trsu": ["pesc"],
    "pesc_crsu": ["pesc"],
    "pesc_bank": ["pesc"],
    "pesc_rocket": ["pesc_bank"],
    "pesc_esft": ["pesc"],
    "gate": ["lora", "full", "random_gate"],
    "token": ["gate"],
    "lora_attention": ["lora"],
}
PAIRS = [(arm, other) for arm, others in COMPARED.items() for other in others]

COPIED = ("su", "trsu", "crsu", "esft")  # upcycled, with so many ``copies``
ADAPTED = ("pesc", "pesc_trsu", "pesc_crsu", "pesc_esft")  # with so many ``adapters``
# Arms with as many experts of each domain.
BY_TASK = {
    "trsu": "copies",
    "pesc_trsu": "adapters",
}
OF_TWO = ("mixlora", "arrow")  # whose top_k is always 2
MIXLORA = 4  # experts of MixLoRA


@dataclass(frozen=True)
class Arm:
    """How an arm is made from a copy of the base, in place, and what trains before and later."""

    make: crafts.Make
    penalty: Penalty | None = None
    # Projections of the LoRAs that half of the budget trains first.
    bank: tuple[str, ...] = ()
    # Made after half of the budget.
    later: Callable[[Setup, nn.Module], nn.Module] | None = None
    sized: bool = True  # whether it trains the budget's number of parameters
    chosen: bool = False  # whether N LoRAs are chosen from the bank, else all are taken
    # Whether each projection that LoRAs adapt has a router that trains.
    gates: bool = True


def _balanced(model: nn.Module) -> Tensor:
    """Return the balance loss of PESC (Eq. 10) and upcycling (Eq. 3), at Switch's weight."""
    return BALANCE * mnn.balance(mnn.routers(model))


def arms(*, sparse: bool) -> dict[str, Arm]:
    """Return all arms by name, of a dense base or of a sparse one."""
    if sparse:
        return {
            "full": Arm(crafts.full, sized=False),
            "lora": Arm(crafts.sparse_lora(attention=False)),
            "lora_attention": Arm(crafts.sparse_lora(attention=True)),
            "token": Arm(crafts.specialised("token")),
            "gate": Arm(crafts.specialised("gate")),
            "random_gate": Arm(crafts.specialised("gate", random=True)),
            "pesc": Arm(crafts.beside, _balanced),
        }
    pesc = Arm(crafts.adapters(), _balanced)
    pesc_bank = Arm(crafts.adapters_of_bank, _balanced, bank=crafts.DOWN)
    su = Arm(crafts.upcycled("su"), _balanced, sized=False)
    balance = mixlora.penalty(mixlora.Config.preset("bank"))
    return {
        "full": Arm(crafts.all_parameters, sized=False),
        "lora": Arm(crafts.lora),
        "pesc": pesc,
        "su": su,
        "trsu": replace(su, make=crafts.upcycled("trsu")),
        "crsu": replace(su, make=crafts.upcycled("crsu")),
        "rocket": Arm(crafts.mixture, bank=crafts.QV, chosen=True),
        "esft": replace(su, later=crafts.experts_later),
        "mixlora": Arm(crafts.mixlora, balance),
        "smear": Arm(crafts.smear, bank=crafts.QV),
        "arrow": Arm(crafts.arrow, bank=crafts.QV, gates=False),
        "pesc_trsu": replace(pesc, make=crafts.adapters("trsu")),
        "pesc_crsu": replace(pesc, make=crafts.adapters("crsu")),
        "pesc_bank": pesc_bank,
        "pesc_rocket": replace(pesc_bank, make=crafts.adapters_of_choice, chosen=True),
        "pesc_esft": replace(pesc, later=crafts.adapters_later),
    }


def known(settings: Settings) -> dict[str, Arm]:
    """Return all arms by name, of a dense base or of a sparse one; no weight is loaded."""
    host = anatomy(skeleton(configuration(settings["base"])))
    return arms(sparse=any(layer.kind == "sparse" for layer in host.layers))


def trained_again(settings: Settings) -> list[str]:
    """Name the arms that the parameter ``again`` lists."""
    return [name for name in lists.tight(settings["again"]).split(",") if name]


def idle(settings: Settings, arms: Mapping[str, Arm]) -> Idle:
    """Tell which parameters have no effect on these arms, and on those trained again."""
    if len(rates.grid(settings)) == 1:
        yield "rate_share valid_rows", "with a single rate none is chosen"
    every = known(settings)
    here = {*arms, *trained_again(settings)}
    chosen = any(every[name].chosen for name in here)
    if not chosen:
        yield "shots", "no arm here chooses LoRAs"
    if not chosen and "mixlora" not in here:
        yield "experts", "no arm here mixes so many LoRAs"
    if not here & {*COPIED}:
        yield "copies", "no arm here is upcycled"
    if not here & {*ADAPTED}:
        yield "adapters", "no arm here has so many adapters"
    # Of PESC on a dense base it says which adapters a task needs (`budgets.needed`).
    counted = "pesc" in arms and "esft" in every
    if not counted and not here & {"esft", "pesc_esft"}:
        yield "threshold", "no arm here chooses experts by it"
    if not chosen and not here & {*COPIED, *ADAPTED, *OF_TWO, "pesc_bank"}:
        yield "top_k", "no arm here routes a token"
    if not any(every[name].sized for name in here):
        yield "parameters", "the size of these arms is what it is"


def _needs(
    settings: Settings,
    arms: Mapping[str, Arm],
    every: Mapping[str, Arm],
    _: object,
) -> Complaints:
    yield from rates.needs(settings, arms, every, at_least_one=True)
    yield from complaint("", lists.listed, "again", settings["again"], every)
    yield from needs.named({"tasks": settings["tasks"]})
    names = settings["tasks"].split(",")
    for name in names:
        yield from _known("tasks", name)
    split = needs.training_split(settings)
    listed = {"tasks": settings["tasks"]}
    yield from needs.files(listed, split, "validation", settings["test_split"])
    yield from _new(settings)
    if len(needs.available(settings, names)) < len(names):
        return  # an arm's needs are about tasks that can be read
    again = [name for name in trained_again(settings) if name in every]
    for name in dict.fromkeys([*arms, *again]):
        yield from _needs_of(name, every[name], settings)


def _known(parameter: str, name: str) -> Complaints:
    """Complain about a name that is neither an embedded task's nor a file's."""
    if not tasks.known(name):
        wanted = "expected an embedded task, or your file (*.jsonl)"
        yield f"{parameter} names {name!r}: {wanted}: {nearest(name, tasks.KNOWN)}"


def _new(settings: Settings) -> Complaints:
    """Complain about a new task that is none, or several, or has fewer rows than shots."""
    name = settings["new"]
    if "," in name:
        yield f"new = {name!r}: one task comes afterwards; name one, without commas"
        return
    yield from _known("new", name)
    yield from needs.files({"new": name}, "train", "test")
    if name in needs.available(settings, [name]):
        trained = needs.available(settings, settings["tasks"].split(","))
        # A file has several paths, and values are kept under its task's name.
        label = tasks.label(name)
        if label in map(tasks.label, trained):
            why = f"tasks trains on {label}, so it is not new"
            yield f"new = {name!r}: {why}; name another"
        rows = tasks.find(name).available("train")
        if settings["new_shots"] > rows:
            shots = f"new_shots = {settings['new_shots']}"
            yield f"{shots}: {name} has {rows} training rows; take 2 to {rows}"


def _needs_of(name: str, arm: Arm, settings: Settings) -> Complaints:
    """Complain about what one arm cannot do, or what it would do at another size than asked."""
    names = settings["tasks"].split(",")
    leave = f"or leave {name} out of arms and again"
    if arm.bank and len(names) < 2:
        why = f"{name} mixes LoRAs of one task each"
        yield f"tasks = {settings['tasks']!r}: {why}; name two or more, {leave}"
        return
    if arm.chosen and settings["experts"] > len(names):
        why = f"{name} chooses among the LoRAs of {len(names)} tasks"
        yield f"experts = {settings['experts']}: {why}; take {len(names)} or less, {leave}"
    rows = sum(needs.drawn(settings, names).values())
    if arm.chosen and settings["shots"] > rows:
        have = (
            f"rows_per_task = {settings['rows_per_task']} gives the mixture {rows} rows"
        )
        why = f"{name} chooses by so many of them, and {have}"
        yield f"shots = {settings['shots']}: {why}; take less, {leave}"
    if name == "mixlora" and settings["experts"] != MIXLORA:
        why = f"mixlora has {MIXLORA}, and would train more or fewer parameters than the others"
        yield f"experts = {settings['experts']}: {why}; take {MIXLORA}, {leave}"
    if name in OF_TWO and settings["top_k"] != 2:
        yield f"top_k = {settings['top_k']}: {name} takes 2 a token; take 2, {leave}"
    size, what = _experts(name, arm, settings)
    if settings["top_k"] > size:
        yield f"top_k = {settings['top_k']}: {name} has {size} ({what}); take 1 to {size}, {leave}"
    if name in BY_TASK:
        domains = sorted({tasks.find(each).domain for each in names})
        parameter = BY_TASK[name]
        if settings[parameter] % len(domains):
            why = f"{name} makes as many of each of {len(domains)} domains ({', '.join(domains)})"
            yield f"{parameter} = {settings[parameter]}: {why}; take a multiple, {leave}"


def _experts(name: str, arm: Arm, settings: Settings) -> tuple[int, str]:
    """Return among how many experts a token's ``top_k`` are, and which parameter says so."""
    if name in COPIED:
        return settings["copies"], "copies"
    if name in ADAPTED:
        return settings["adapters"], "adapters"
    if arm.chosen:
        return settings["experts"], "experts"
    if name == "pesc_bank":
        return len(settings["tasks"].split(",")), "one a task"
    # The others' top_k is fixed (see OF_TWO), or they have none.
    return settings["top_k"], "top_k"


check = Check(known, _needs, idle)
