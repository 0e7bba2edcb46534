"""The values of a sweep are read and checked before anything runs."""

import pytest

from moebook.errors import Refusal
from moebook.methods import esft

GOOD = {
    "thresholds_gate": "0.1,0.3",
    "thresholds_token": "0.2",
    "ranks": "4,8",
    "group_sizes": "4",
}


def test_a_sweep_is_read_by_arm():
    found = esft.sweep(**GOOD)
    assert found == {"gate": [0.1, 0.3], "token": [0.2], "lora": [4, 8], "groups": [4]}
    assert all(isinstance(rank, int) for rank in found["lora"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ranks", "4,8,16", r"E-RANGE: thresholds_gate has 2 values \('0.1,0.3'\) and ranks 3"),
        ("ranks", "4,8.5", "E-TYPE: ranks is '4,8.5': .*expected whole numbers with commas"),
        ("ranks", "0,8", "E-RANGE: ranks is 0, expected 1 to 512"),
        ("ranks", "8,4", "E-RANGE: ranks is '8,4', expected rising numbers"),
        ("thresholds_gate", "", "E-TYPE: thresholds_gate is ''"),
        ("thresholds_gate", "0.1,1.5", "E-RANGE: thresholds_gate is 1.5"),
        ("thresholds_gate", "0.1,nan", "E-RANGE: thresholds_gate is"),
        ("thresholds_token", "0.2,0.2", "E-RANGE: thresholds_token is '0.2,0.2'"),
        ("group_sizes", "1,2", "E-RANGE: group_sizes is 1, expected 2 or more"),
    ],
)
def test_a_sweep_that_cannot_run_is_refused(name, text, message):
    with pytest.raises(Refusal, match=message):
        esft.sweep(**GOOD | {name: text})
