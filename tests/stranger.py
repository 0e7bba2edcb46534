"""A stranger's program: it reaches the verdicts from the files alone, without this package.

    python tests/stranger.py FOLDER

FOLDER holds ``results/<notebook>/<protocol>/*.parquet``, ``notebooks/*.yaml`` and
``papers/<paper>/claims.yaml``. It prints, as JSON, each claim's verdict at each scale.
"""

import json
import math
import re
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import yaml
from scipy.stats import t

SIZES = {  # what runs were made on, by how many weights it has
    "nano": "1 M",
    "nano-moe": "1 M",
    "small": "11 M",
    "mid-moe": "41 M",
    "smollm2": "135 M",
}
STUDIES = ("study", "gpu", "paper")  # tiers whose runs decide anything
FEWEST = 3  # seeds of a comparison


class Pool:
    """The runs of one protocol, as a stranger reads them."""

    def __init__(self, folder):
        self.numbers = defaultdict(dict)  # by name and seed
        self.units = {}
        self.date = ""
        self.seeds = set()
        newest = {}
        for path in sorted(folder.glob("*.parquet")):
            table = pq.read_table(path)
            head = json.loads(table.schema.metadata[b"moebook"])
            self.tier = head["tier"]
            self.settings = head["settings"]
            self.protocol = head["protocol"]
            manifest = head["manifest"]
            date = str(manifest.get("date", ""))
            self.date = max(self.date, date)
            self.published = bool(manifest.get("files")) and not head["rows"]
            seed = head["seed"]
            self.seeds.add(seed)
            short = table.select(["name", "unit", "value"]).to_pylist()
            for line, items in zip(short, table["items"], strict=True):
                name = line["name"]
                if line["value"] is None or date < newest.get((name, seed), ""):
                    continue
                newest[name, seed] = date
                self.units[name] = line["unit"]
                each = items.values.to_numpy() if items.is_valid else [line["value"]]
                self.numbers[name][seed] = (line["value"], each)

    @property
    def scale(self):
        base = str(self.settings.get("base", ""))
        if self.published:
            return "the authors' data"
        return SIZES.get(base, base.partition("@")[0])

    def effects(self, value, reference):
        """Rows of what a seed's test items say, the value less its reference."""
        against = [reference] if isinstance(reference, str) else reference
        if not isinstance(against, list):
            against = []
            constant = reference or 0
        else:
            constant = 0
        rows = []
        for seed, (mean, items) in self.numbers.get(value, {}).items():
            others = [self.numbers.get(name, {}).get(seed) for name in against]
            if None in others:
                continue
            lists = [items] + [their for _, their in others]
            if len({len(each) for each in lists}) == 1:
                mine, *theirs = np.array(lists)
                less = np.mean(theirs, axis=0) if theirs else constant
                rows.append(mine - less)
            else:
                rows.append(np.array([mean - np.mean([other for other, _ in others])]))
        if len({len(row) for row in rows}) > 1:
            rows = [np.array([row.mean()]) for row in rows]
        largest = max([1] + [abs(mean) for mean, _ in self.numbers[value].values()])
        return [np.where(abs(row) <= 1e-12 * largest, 0, row) for row in rows]

    def by_task(self, name):
        """Values of the tasks whose mean a value is: a/<task>/b or a/b/<task>."""
        start, _, last = name.rpartition("/")
        names = {}
        for other in self.numbers:
            middle = other.removeprefix(f"{start}/").removesuffix(f"/{last}")
            if other == f"{start}/{middle}/{last}":
                names[middle] = other
            tail = other.removeprefix(f"{name}/")
            if other == f"{name}/{tail}" and "/" not in tail:
                names[tail] = other
        return names

    def average(self, name):
        names = [name] if name in self.numbers else list(self.by_task(name).values())
        every = [mean for each in names for mean, _ in self.numbers[each].values()]
        return np.mean(every) if every else None


def compared(claim, pool):
    """Return the effects of a claim in a pool; None where it is no evidence."""
    if pool.tier not in claim["scales"]:
        return None
    under = claim.get("under") or {}
    if any(pool.settings.get(name) != wanted for name, wanted in under.items()):
        return None
    limits = claim.get("times")
    if limits:
        one, other = (pool.average(name) for name in claim["sizes"])
        if not one or not other or not limits[0] <= one / other <= limits[1]:
            return None
    rows = pool.effects(claim["value"], claim["reference"])
    if not rows:
        return None
    # Arms that differ on no test item can neither do the task.
    alike = len(rows[0]) > 1 and not np.any(rows)
    return None if alike and claim["direction"] != "equal" else np.array(rows)


def ends(effects):
    """Interval at 95 %: seeds and test items each with Student's quantile of their number."""
    squares = 0.0
    for axis in (0, 1):
        means = effects.mean(axis=1 - axis)
        if len(means) > 1:
            quantile = t.ppf(0.975, len(means) - 1)
            squares += quantile**2 * means.var(ddof=1) / len(means)
    return effects.mean() - math.sqrt(squares), effects.mean() + math.sqrt(squares)


def side(claim, low, high):
    """1 where all of an interval lies as claimed, -1 where all of it does not."""
    if claim["direction"] == "greater":
        return int(low > 0) - int(high < 0)
    if claim["direction"] == "less":
        return int(high < 0) - int(low > 0)
    middle = claim["claimed"] or 0
    around = claim["tolerance"] or 0
    if low >= middle - around and high <= middle + around:
        return 1
    return -1 if high < middle - around or low > middle + around else 0


def exact(claim, pool):
    return bool(claim.get("exact")) or pool.published


def extent(claim, pool, effects):
    """What is known of the effect: an interval, or one number where nothing was drawn."""
    if exact(claim, pool):
        return effects.mean(), effects.mean()
    return ends(effects)


def verdict(claim, pool, effects):
    """Say what a pool decides about a claim."""
    if claim.get("untestable") and pool.tier != "paper":
        return "not testable here"
    if claim.get("presupposes"):
        above, below = claim["presupposes"]
        if not ends(np.array(pool.effects(above, below)))[0] > 0:
            return "not testable here"
    computed = exact(claim, pool)
    low, high = extent(claim, pool, effects)
    where = side(claim, low, high)
    if computed:
        sides = {side(claim, seed, seed) for seed in effects.mean(axis=1)}
        for task, name in pool.by_task(claim["value"]).items():
            reference = claim["reference"]
            if isinstance(reference, str):
                reference = pool.by_task(reference).get(task)
                if reference is None:
                    continue
            rows = pool.effects(name, reference)
            if len(rows) == len(effects):
                mean = np.mean(rows)
                sides.add(side(claim, mean, mean))
        if len(sides) > 1:
            return "inconclusive"
    else:
        against = claim["kind"] == "direction" or claim["reference"] is not None
        few = len(effects) < FEWEST and against
        if pool.tier not in STUDIES or few:
            return "inconclusive"
    claimed = claim["claimed"]
    if where < 0:
        return "direction fails"
    if where > 0:
        near = claimed is not None and abs(effects.mean() - claimed) <= (
            claim["tolerance"] or 0
        )
        as_large = pool.tier == "paper" and not pool.published
        return "reproduced" if near and as_large else "direction holds"
    half = (high - low) / 2
    if claimed is None or not half or claim["direction"] not in ("greater", "less"):
        return "inconclusive"
    if not low <= claimed <= high:
        return "excludes the paper's size"
    return "too small to see here" if abs(claimed) < half else "inconclusive"


def planned(path, name):
    """The seeds that a head plans, ``# Seeds: 0-9``; none where it says why it stopped."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    told = re.search(rf"^# {name}: ([\d,-]+)$", text, re.MULTILINE)
    seeds = set()
    if not told or "\n# Stopped: " in text:
        return seeds
    for span in told[1].split(","):
        first, _, last = span.partition("-")
        seeds |= set(range(int(first), int(last or first) + 1))
    return seeds


def running(path, pool):
    """Whether a study has yet to run seeds that its head plans."""
    return not planned(path, "Seeds") <= pool.seeds


def have_all(claim, pool, path):
    """Whether all seeds that decide a claim, planned first or once more, measured it."""
    names = [claim["value"]]
    reference = claim["reference"]
    if isinstance(reference, str):
        names.append(reference)
    if isinstance(reference, list):
        names += reference
    wanted = planned(path, "Seeds") | planned(path, "Ten other seeds")
    return all(wanted <= pool.numbers[name].keys() for name in names)


def deciders(folder):
    """Which protocols' heads name a claim: lines ``# Decides: id, id``."""
    named = defaultdict(set)
    for path in folder.glob("*.yaml"):
        _, protocol, _ = path.name.split(".")
        notebook = path.name.partition(".")[0][3:]
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("# Decides: "):
                for claim in line.removeprefix("# Decides: ").split(","):
                    named[claim.strip()].add((notebook, protocol))
    return named


def main(folder):
    pools = {}
    for place in folder.glob("results/*/*"):
        if place.parent.name != "withdrawn" and list(place.glob("*.parquet")):
            pools[place.parent.name, place.name] = Pool(place)
    heads = {
        tuple(path.name[3:].split(".")[:2]): path
        for path in folder.glob("notebooks/*.yaml")
    }
    pools = {
        name: pool
        for name, pool in pools.items()
        if name not in heads or not running(heads[name], pool)
    }
    named = deciders(folder / "notebooks")
    verdicts = {}
    for path in sorted(folder.glob("papers/*/claims.yaml")):
        for claim in yaml.safe_load(path.read_text(encoding="utf-8")):
            if claim.get("ended"):
                continue
            scales = defaultdict(list)
            for (notebook, protocol), pool in pools.items():
                if notebook != claim["notebook"][3:]:
                    continue
                effects = compared(claim, pool)
                if effects is not None:
                    decides = (notebook, protocol) in named[claim["id"]]
                    decides = decides and have_all(
                        claim, pool, heads[notebook, protocol]
                    )
                    scales[pool.scale].append((decides, pool, effects))
            verdicts[claim["id"]] = {
                scale: judged(claim, every) for scale, every in scales.items()
            }
    return verdicts


def judged(claim, every):
    """The verdict at one scale, of what decides there and what computed the same."""
    computed = [one for one in every if exact(claim, one[1])]
    deciding = [one for one in every if one[0]]
    if not deciding and len(computed) == len(every):
        deciding = [max(every, key=lambda one: one[1].date)]
    if not deciding:
        return "exploratory"
    ((_, pool, effects),) = deciding
    if exact(claim, pool):
        sides = {side(claim, *extent(claim, p, found)) for _, p, found in computed}
        if len(sides) > 1:
            return "inconclusive"
    return verdict(claim, pool, effects)


if __name__ == "__main__":
    json.dump(main(Path(sys.argv[1])), sys.stdout, indent=1)
    assert "moebook" not in sys.modules
