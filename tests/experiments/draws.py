"""Draws of declared parameters, in range, as a reader might change them: valid together or not."""

import random
import re
from pathlib import Path

from moebook import experiments
from moebook.lab.run import parameters, sources

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = tuple(experiments.CHECKS)

# Where a run happens and where rows come from: not drawn, another machine would be needed.
ELSEWHERE = {
    *("tier", "device", "base", "second", "revisions", "data_folder", "mix", "source"),
    *("pool_sets", "benchmarks", "bank_folder", "published", "chat", "retrain"),
}
# Texts as readers write them; the last ones of each are slips.
RATES = ("", "0.001", "0.001,0.002", "1e-3, 2e-3", "0.001,1e-3", "abc", "5", "0")
TASKS = ("gcd", "isa,docstring", "gcd,isa,kinship", "gcd,gcd", "gcd, isa", "gdc", "")
MEMBERS = ("", "sums,licence,kinship", "sums,gcd", "sums", "sums,sums", "smus,gcd")
SHOWN = ("kinship_told", "copyleft,kinship_told", "gcd_plus", "kinship_tld", "")
NUMBERS = ("0.1,0.3", "0.2", "4,8", "2", "8,4", "0", "x", "")
TEXTS = {
    "rates": RATES,
    "fixed_rates": ("", "dense=0.004", "dense=0.1,sparse=0.2", "sparse", "dense=2"),
    "tasks": TASKS,
    "tasks_code": ("python_eval", "docstring,python_eval", "pyhton_eval", ""),
    "tasks_mathematics": ("gcd", "gcd,equations", "gcd,gcd", ""),
    "tasks_text": ("isa", "kinship,licence", "gcd", ""),
    "general": ("gcd", "equations,kinship", "isa", "general_time", "genral_time", ""),
    "alignment": ("gcd", "general_time,gcd", "isa", "general_tiem", ""),
    "members": MEMBERS,
    "targets": SHOWN,
    "encoder": ("minilm", "/nonexistent"),
    "new": ("kinship_told", "gcd", "kinship_tld", ""),
    "thresholds_gate": NUMBERS,
    "thresholds_token": NUMBERS,
    "ranks": NUMBERS,
    "group_sizes": NUMBERS,
}
# The most with which a run at smoke stays one of seconds.
AFFORDABLE = {
    "steps": 8,
    "rate_steps": 3,
    "align_steps": 3,
    "new_steps": 3,
    "gate_steps": 4,
    "epochs": 2,
    "bank_epochs": 2,
    "batch": 16,
    "accumulate": 4,
    "repeats": 2,
    "draws": 2,
    "searches": 8,
    "checkpoints": 2,
    "experts": 8,
    "adapters": 8,
    "copies": 6,
    "parameters": 400_000,
    "adapter_width": 64,
    "max_length": 400,
    "sample_length": 128,
    "text_length": 96,
    "stream_rows": 5000,
}
ROWS = 40  # the most of every other number


def smoke(name):
    """Return a notebook's parameters at its protocol smoke."""
    notebook = sources.find(ROOT, name)
    return notebook.defaults | notebook.settings("smoke")


def known(name):
    """Return the arms that a notebook has at smoke, by name."""
    module = getattr(experiments, name)
    if hasattr(module, "known"):
        return module.known(smoke(name))
    return module.CHOICES if name == "banks" else module.ARMS


def arms(name, draw, *, affordable):
    """Draw arms: one, two, none, one that is misspelt, or all, which take a minute."""
    names = list(known(name))
    kind = draw.randrange(12)
    if kind < 7 or (kind == 11 and affordable):
        return draw.choice(names)
    if kind < 9:
        return ",".join(draw.sample(names, 2))
    return {9: f"{names[0]}x", 10: "", 11: "all"}[kind]


def changes(name, draw, *, affordable=False):
    """Draw one to four of a notebook's parameters, and a value of each in its declared range.

    What is ``affordable`` runs within seconds at smoke.
    """
    declared = sources.find(ROOT, name).parameters
    names = [other for other in declared if other not in ELSEWHERE]
    chosen = draw.sample(names, draw.randint(1, 4))
    if affordable and "arms" not in chosen:
        chosen.append("arms")
    if affordable and "again" in names and "again" not in chosen:
        chosen.append("again")
    drawn = {}
    for parameter in chosen:
        if parameter in ("arms", "again"):
            drawn[parameter] = arms(name, draw, affordable=affordable)
        else:
            drawn[parameter] = value(declared[parameter], draw, affordable=affordable)
    parameters.check(declared, drawn, "-p")
    return drawn


def value(parameter, draw, *, affordable):
    """Draw a value that a parameter's rule allows; its ends are as likely as what is between."""
    if parameter.type is bool:
        return draw.random() < 0.5
    if parameter.choices:
        return draw.choice(parameter.choices)
    if parameter.type is str:
        return draw.choice(TEXTS[parameter.name])
    # A range with or without its ends, as in [1, 64] or (0, 1].
    form = re.fullmatch(r"([\[(])(\S+), (\S+)([\])])", parameter.rule)
    left, low_text, high_text, right = form.groups()
    low = float(low_text)
    high = float(high_text)
    if parameter.type is int:
        if affordable:
            high = min(high, AFFORDABLE.get(parameter.name, ROWS))
        near = [
            low,
            low + 1,
            low + 2,
            high,
            draw.uniform(low, min(high, 50 * low + 50)),
        ]
        return int(min(high, draw.choice(near)))
    inside = [
        draw.uniform(low, min(high, low + 1)),
        low + 1e-6,
        min(high, low + 1) - 1e-6,
    ]
    ends = []
    if left == "[":
        ends.append(low)
    if right == "]":
        ends.append(high)
    return draw.choice(inside + ends)


def by_number(number):
    """Return the draw of a number, alike on every machine."""
    return random.Random(f"parameters/{number}")
