"""The tables of arms: every arm of every notebook says in one line what it is."""

from pathlib import Path

import pytest

from moebook import lists, models, together
from moebook.experiments import banks, crafts, described, every
from moebook.lab.run import sources
from moebook.methods.rivals import mixlora, table

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sources.notebooks(ROOT)
ARMS = every.arms({name: notebook.defaults for name, notebook in NOTEBOOKS.items()})


@pytest.mark.parametrize("notebook", ARMS)
def test_every_arm_says_what_it_is_and_no_two_say_the_same(notebook):
    texts = ARMS[notebook]
    assert texts
    assert all(texts.values())
    assert len(set(texts.values())) == len(texts)


@pytest.mark.parametrize(
    "name", [n for n in NOTEBOOKS if "arms" in NOTEBOOKS[n].defaults]
)
def test_the_arms_that_a_notebook_runs_by_itself_are_told(name):
    asked = NOTEBOOKS[name].defaults["arms"]
    assert lists.arms(asked, ARMS[name])  # refuses a name that is not among them


def test_every_choice_of_banks_is_told():
    assert set(ARMS["banks"]) == set(banks.CHOICES)


def test_the_table_marks_the_arms_of_a_run():
    table = described({"dense": "the base", "sparse": "adapters"}, {"sparse": None})
    assert table["in this run"].to_dict() == {"dense": "", "sparse": "yes"}
    assert table["what it is"].tolist() == ["the base", "adapters"]


def mixlora_of_rivals(base):
    """MixLoRA as *Rocket's rivals* puts it on a base."""
    arm = table.arms(12, rate=0.1, searches=40, experts=4, top_k=2)["mixlora"]
    config = mixlora.Config.preset(arm.preset, **arm.changes)
    return mixlora.attach(base, None, config).model


def mixlora_of_together(base):
    """MixLoRA as *Together* puts it on a base."""
    setup = together.Setup(base, None, {}, together.Config(parameters=158_000))
    return crafts.mixlora(setup, base, {})


@pytest.mark.parametrize(
    ("notebook", "made"),
    [("rivals", mixlora_of_rivals), ("together", mixlora_of_together)],
)
def test_mixlora_trains_where_its_line_says_at_queries_and_values_alone(notebook, made):
    model = made(models.load("nano")[0])
    places = set()
    for name, part in model.named_parameters():
        if part.requires_grad:
            layer = name.partition("layers.")[2].split(".")
            places.add(layer[2])  # layers.0.self_attn.q_proj: the projection
    assert places == {"q_proj", "v_proj"}
    assert "query and value" in ARMS[notebook]["mixlora"]
