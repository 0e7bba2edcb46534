"""The primer's toy router, by the page's text: its figure and its answers are held to this."""

import numpy as np


def trained(cells, strength, *, temperature=1.0, steps=100, top=1):
    """Return the toy's loads and mean probabilities after so many steps.

    ``cells`` are the logits of the page's table, 8 tokens by 4 experts.
    """
    logits, skill = np.array(cells, float).reshape(8, 4), np.zeros(4)
    for step in range(steps + 1):
        p = np.exp(logits / temperature)
        p /= p.sum(1, keepdims=True)
        chosen = (-logits).argsort(1, kind="stable").argsort(1) < top
        load = chosen.sum(0) / chosen.sum()
        if step < steps:
            skill = skill + 0.1 * load
            gain = chosen * skill - strength * 4 * load
            slope = p * (gain - (p * gain).sum(1, keepdims=True)) / temperature
            logits = logits + 0.1 * (slope + slope.sum(0))
    return load, p.mean(0)
