"""Parameter counts: the paper's sizes from the hosts' public configurations, nothing allocated."""

import pandas as pd
import pytest

from moebook.errors import Refusal
from moebook.methods import pesc


@pytest.mark.parametrize(
    ("name", "dense", "layers", "width", "printed_total", "narrow"),
    [
        ("llama-2-7b", 6_738_415_616, 32, 4096, 8, 6.9),
        ("llama-2-13b", 13_015_864_320, 40, 5120, 15, 13.2),
        ("yi-34b", 34_388_917_248, 60, 7168, 38, 34.8),
    ],
)
def test_width_512_gives_the_printed_sizes_and_64_does_not(
    name, dense, layers, width, printed_total, narrow
):
    made = pesc.counts(pesc.Config(), name)
    assert made.dense == dense
    assert made.adapters == layers * 8 * 2 * width * 512
    assert made.routers == layers * 8 * width
    assert made.total == dense + made.adapters + made.routers
    assert made.activated == made.total - made.adapters * 6 // 8
    assert round(made.total / 1e9) == printed_total
    released = pesc.counts(pesc.Config.preset("released"), name)
    assert round(released.total / 1e9, 1) == narrow
    assert round(released.total / 1e9) != printed_total


def test_the_printed_sizes_imply_a_width_of_512():
    for name, printed in (("llama-2-7b", 8), ("llama-2-13b", 15), ("yi-34b", 38)):
        low, high = (
            pesc.implied_width(pesc.Config(), name, (printed + d) * 1e9) for d in (-0.5, 0.5)
        )
        assert low < 512 < high
    exact = pesc.counts(pesc.Config(), "yi-34b").total
    assert pesc.implied_width(pesc.Config(adapter_width=64), "yi-34b", exact) == pytest.approx(512)


def test_the_table_of_sizes_agrees_with_the_printed_ones():
    table = pesc.printed_sizes()
    printed = pd.Series({"llama-2-7b": 8, "llama-2-13b": 15, "yi-34b": 38})
    assert (table.total / 1e9).round().to_dict() == printed.to_dict()
    assert not ((table.total_64 / 1e9).round() == printed).any()
    for side, column in ((-0.5, "implied_width_low"), (0.5, "implied_width_high")):
        gained = table[column] * (table.total - table.total_64) / (512 - 64)  # width by width
        rest = table.total - 512 * (table.total - table.total_64) / (512 - 64)
        assert ((gained + rest) / 1e9).to_dict() == pytest.approx((printed + side).to_dict())


def test_only_widths_from_589_to_596_fit_the_printed_activated_size_of_the_13b_host_too():
    printed = {"llama-2-7b": (8, 7), "llama-2-13b": (15, 14), "yi-34b": (38, 35)}
    fitting = []
    for width in (400, 588, 589, 596, 597, 700):  # counts rise with the width: the edges suffice
        made = {name: pesc.counts(pesc.Config(adapter_width=width), name) for name in printed}
        sizes = {
            name: (round(size.total / 1e9), round(size.activated / 1e9))
            for name, size in made.items()
        }
        if sizes == printed:
            fitting.append(width)
    assert fitting == [589, 596]


def test_counts_of_a_configuration_equal_those_of_the_crafted_model(host):
    config = pesc.Config(experts=4, adapter_width=6, host="frozen", layers=(1,))
    model = pesc.craft(host(), config)
    made = pesc.counts(config, model.config)
    assert made.total == sum(parameter.numel() for parameter in model.parameters())
    assert made.adapters == 4 * 2 * 32 * 6


def test_an_unknown_host_names_the_nearest():
    with pytest.raises(Refusal, match="did you mean 'llama-2-7b'"):
        pesc.counts(pesc.Config(), "llama-7b")
