"""Hundreds of drawn parameters: refused in the reader's own words, or fit to be planned."""

import pytest

from moebook import experiments
from moebook.errors import Refusal
from moebook.lab.pages import plans
from moebook.lab.planning.trainings import TRAINED
from tests.experiments import draws

EACH = 50  # draws a notebook
PLANNED = 1  # of those let through, which the planner takes
CUT = " ... "  # stands where the middle of a long message is left out


@pytest.mark.filterwarnings("ignore:W-ROUTER", "ignore:W-IDLE")
@pytest.mark.parametrize("name", draws.NOTEBOOKS)
def test_drawn_parameters_are_refused_by_their_names_or_can_be_planned(name):
    refused = 0
    taken = 0
    for number in range(EACH):
        draw = draws.by_number(f"{name}/{number}")
        try:
            changed = draws.changes(name, draw)
        except Refusal as refusal:  # a list of numbers that are none, or out of range
            assert refusal.code == "E-RANGE"
            assert refusal.message.startswith("-p: ")
            continue
        settings = draws.smoke(name) | changed
        try:
            experiments.check(name, settings)
        except Refusal as refusal:
            refused += 1
            assert refusal.code == "E-RANGE", (changed, refusal)
            for complaint in refusal.message.split("; and "):
                named = any(parameter in complaint for parameter in changed)
                assert named or CUT in complaint, (changed, complaint)
        else:
            taken += 1
            if taken <= PLANNED and name in TRAINED:
                assert plans.trainings(name, settings)
    assert EACH / 10 < refused < EACH / 2  # neither all nor nothing
