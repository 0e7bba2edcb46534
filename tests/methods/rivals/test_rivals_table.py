"""The arms of Table 1: settings that hold, and rates that some arm of the table was given."""

import pytest

from moebook.methods.rivals import table


@pytest.mark.parametrize(("size", "experts"), [(12, 4), (3, 2), (38, 4)])
def test_every_arm_has_settings_and_takes_the_rate_of_an_arm_with_its_own_settings(
    size, experts
):
    arms = table.arms(size, rate=0.1, searches=40, experts=experts, top_k=2)
    for name, arm in arms.items():
        named = {"named": "one"} if arm.preset.startswith("source_best") else {}
        config = table.MODULES[arm.rival].Config.preset(
            arm.preset, **{**arm.changes, **named}
        )
        of = arms[arm.rated].rated if arm.rated else ""
        assert of == arm.rated
        assert name.startswith((arm.rated, arm.rival))
        if arm.rival == "arrow":
            assert config.top_k <= (experts if arm.bank == "chosen" else size)
    assert set(table.RIVALS) <= set(arms)
    assert len(arms) == 29
    assert [name for name, arm in arms.items() if arm.bank == "chosen"] == [
        "rocket",
        *(f"{name}_chosen" for name in table.RIVALS[1:]),
    ]
