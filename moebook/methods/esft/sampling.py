"""The data of ESFT: samples that the scores are measured on, and the mix with alignment data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets

from moebook.data import hub, tasks
from moebook.data.padding import padded
from moebook.errors import refuse
from moebook.methods.settings import whole


def rows(
    targets: Iterable[str], alignment: Iterable[str], size: int, *, revisions: str = "", seed: int
) -> dict[str, list[dict[str, str]]]:
    """Draw the training rows of target tasks and of alignment data.

    Args:
        targets: Embedded tasks, or data sets of the hub.
        alignment: The same; of the hub's twice as many rows are drawn, as some prove too long.
        size: Rows of each; an embedded task may have fewer.
        revisions: Commits of the hub's data sets, for `hub.pins`.
        seed: Decides the draws.

    Returns:
        Rows by name.
    """
    pins, found = hub.pins(revisions), {}
    for times, names in ((2, alignment), (1, targets)):
        for name in names:
            if name in tasks.KNOWN:
                count = min(size, tasks.find(name).available("train"))
                found[name] = tasks.rows(name, "train", count, seed)
            else:
                pin = pins.get(name)
                found[name] = hub.load(name, revision=pin, size=times * size, seed=seed)
    return found


def samples(
    rows: Dataset,
    *,
    count: int = 32,
    length: int = 4096,
    packed: bool = True,
    batch: int = 4,
    pad_id: int = 0,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Draw the samples that experts are scored on (Sec. 3.3, "Data Sampling").

    Args:
        rows: Encoded rows with ``input_ids``, in training form: prompt and answer.
        count: Samples; 32 in the paper.
        length: Tokens a sample; 4096 in the paper. Where the rows are too few to fill them all,
            fewer samples are made, the last one shorter.
        packed: Whether a sample is rows one after the other, cut at ``length`` (the paper: "32
            concatenated samples"). Else a sample is one row, left whole, and those longer than
            ``length`` are passed over (as the published logs look).
        batch: Samples a batch.
        pad_id: Token that fills short samples on the right; masked.
        seed: Decides the order of the rows.

    Returns:
        Batches with ``input_ids`` and ``attention_mask`` ``[B, T]``, for `measure`.

    Raises:
        Refusal: E-RANGE for a size below 1, E-DATA when no sample can be made.
    """
    for name, value in (("count", count), ("length", length), ("batch", batch)):
        whole(name, value, 1)
    order = np.random.default_rng(seed).permutation(len(rows)).tolist()
    given = (rows[place]["input_ids"] for place in order)
    made: list[list[int]] = []
    if packed:
        stream: list[int] = []
        while len(stream) < count * length and (ids := next(given, None)) is not None:
            stream += ids
        made = [
            stream[at : at + length] for at in range(0, min(len(stream), count * length), length)
        ]
    else:
        made = [ids for ids in given if 0 < len(ids) <= length][:count]
    if not made:
        refuse("E-DATA", f"no sample of at most {length} tokens in {len(rows)} rows")
    parts = (padded(made[at : at + batch], pad_id) for at in range(0, len(made), batch))
    return [{"input_ids": ids, "attention_mask": mask} for ids, mask in parts]


def mix(task: Dataset, alignment: Dataset, share: float, seed: int) -> Dataset:
    """Mix a task's rows with alignment data, which keeps the general abilities (Sec. 4.3).

    Args:
        task: Encoded rows of the task; all of them are used.
        alignment: Encoded rows of alignment data, drawn without replacement.
        share: Of alignment rows in the mix, in [0, 1): 0.5 in the paper (1:1), 0 as released.
        seed: Decides draw and order.

    Raises:
        Refusal: E-RANGE for a share outside [0, 1), E-DATA when there are too few alignment rows.
    """
    if not 0 <= share < 1:
        refuse("E-RANGE", f"the share of alignment data is {share}, expected a number in [0, 1)")
    wanted = math.floor(len(task) * share / (1 - share) + 0.5)
    if wanted > len(alignment):
        refuse("E-DATA", f"{wanted} alignment rows needed, {len(alignment)} given")
    drawn = alignment.shuffle(seed=seed).select(range(wanted))
    return concatenate_datasets([task, drawn]).shuffle(seed=seed)
