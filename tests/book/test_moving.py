"""What a reader moves shows the right numbers, in Chromium, and a table without scripts."""

import json
import re
from pathlib import Path

import pytest

from moebook.methods import pesc
from moebook.notebook import moving

STATIC = Path(__file__).parents[2] / "book" / "_static"
MOVE = """(moves => {
  for (const [name, value] of Object.entries(moves)) {
    const label = [...document.querySelectorAll("label")].find(e => e.innerText === name)
    const field = document.getElementById(label.htmlFor)
    if (field.type === "checkbox") field.checked = value; else field.value = value
    field.dispatchEvent(new Event("input", { bubbles: true }))
  }
  const shown = [...document.querySelectorAll(".moe-move dl > div")]
  return Object.fromEntries(shown.map(e => [e.children[0].innerText, e.children[1].innerText]))
})"""


@pytest.fixture
def moved(browser, tmp_path):
    """Open a page's fragment alone; return what moves its fields and reads the numbers shown."""

    def open_(fragment):
        raw = "\n".join(re.findall(r"```\{raw\} html\n(.*?)\n```", fragment, re.DOTALL))
        scripts = "".join(
            f"<script src='{path.as_uri()}'></script>" for path in STATIC.glob("*.js")
        )
        page = tmp_path / "page.html"
        page.write_text(f"<!doctype html><meta charset=utf-8>{raw}{scripts}", encoding="utf-8")
        browser.open(page.as_uri())
        assert browser.errors == []
        return lambda **moves: browser.run(f"{MOVE}({json.dumps(moves)})")

    return open_


def press(browser, label, key, times=1):
    """Put the focus on a field by its label and press a key, as a reader without a mouse does."""
    find = f"[...document.querySelectorAll('label')].find(e => e.innerText === '{label}')"
    browser.run(f"document.getElementById({find}.htmlFor).focus()")
    for kind in ("rawKeyDown", "keyUp") * times:
        browser.call(
            "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=39
        )


@pytest.mark.browser
def test_pescs_sizes_follow_the_formula_and_its_counts(moved, browser):
    shown = moved(moving.sizes())
    assert browser.run("document.querySelectorAll('details tbody tr').length") == 3
    for host, experts, top, width in (("llama-2-7b", 8, 2, 64), ("yi-34b", 4, 3, 100),
                                      ("llama-2-13b", 8, 2, 593)):  # fmt: skip
        moves = {"experts E": experts, "experts per token K": top, "adapter width R": width}
        numbers = shown(host=host, **moves)
        config = pesc.Config(experts=experts, top_k=top, adapter_width=width)
        size = pesc.counts(config, host)
        assert numbers["adapters, 2LEDR"] == f"{size.adapters:,}"
        assert numbers["routers, LED"] == f"{size.routers:,}"
        stored = 2 * (size.adapters + size.routers)
        amount = f"{stored / 1e9:.2f} GB" if stored >= 1e9 else f"{stored / 1e6:.2f} MB"
        assert numbers["both, stored in 16 bits"] == amount
        assert numbers["used by a token, 2LKDR + LED"] == f"{size.activated - size.dense:,}"
        assert numbers["whole model"].startswith(f"{size.total / 1e9:.3f} billion")
        assert numbers["used by a token, with the host"].startswith(
            f"{size.activated / 1e9:.3f} billion"
        )
    assert "rounds to the printed 14" in numbers["used by a token, with the host"]
    press(browser, "adapter width R", "ArrowRight", 4)
    numbers = shown()
    assert "does not round to the printed 14" in numbers["used by a token, with the host"]
    numbers = shown(**{"layers L": 2, "model width D": 256, "experts E": 5})
    assert (
        numbers["adapters, 2LEDR"] == f"{2 * 2 * 5 * 256 * 597:,}" and "whole model" not in numbers
    )
