"""Figures draw the numbers they were given, refuse what does not fit, are readable."""

import io
from functools import partial

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread
from scipy import stats

from moebook.lab import plotting
from moebook.lab.plotting import charts, speed
from moebook.lab.plotting.charts import COLOURS, COLUMNS, DARK_COLOURS, INK
from tests.refusals import refused

EFFECTS = pd.DataFrame(
    [
        ["points", "leads", "nano", 2.0, 1.0, 3.0, True],
        ["points", "leads", "smollm2", 1.0, -1.0, 3.0, False],
        ["points", "learns", "nano", -1.0, -2.0, 0.0, False],
        ["nats", "costs", "smollm2", 0.2, 0.1, 0.3, True],
    ],
    columns=COLUMNS,
)
TIMES = pd.DataFrame(
    [
        ["experts", "eager", 16, 0.8],
        ["experts", "own", 0.5, 0.8],
        ["groups", "loop", 2, np.nan],
    ],
    columns=["group", "contender", "value", "floor"],
)
CLOUD = np.array([[0.0, 1.0], [2.0, 3.0]])
STEPS = {"xlabel": "steps", "ylabel": "nats"}


@pytest.fixture(autouse=True)
def style():
    """Draw in the book's look, whatever another test has set."""
    with matplotlib.rc_context():
        plotting.style()
        yield


def texts(artists):
    return [artist.get_text() for artist in artists]


def filled(markers):
    """Whether each marker is filled in its own colour."""
    return [marker.get_markerfacecolor() == marker.get_color() for marker in markers]


def test_a_curve_is_the_mean_of_its_seeds_in_their_range():
    seeds = {"sparse": [[3.0, 2.0, 1.0], [5.0, 4.0, 1.0]]}
    figure = plotting.curves(seeds, steps=[0, 10, 20], yscale="log", **STEPS)
    (axes,) = figure.axes
    (legend,) = figure.legends
    means = [[0, 4.0], [10, 3.0], [20, 1.0]]
    np.testing.assert_allclose(axes.lines[0].get_xydata(), means)
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (1.0, 5.0)
    assert "2 seeds" in texts(legend.get_texts())[0]
    assert axes.get_yscale() == "log"
    figure.draw_without_rendering()
    ticks = {float(text) for text in texts(axes.get_yticklabels())}
    assert {1, 2, 5} <= ticks, "powers of ten would be hard to read"
    below = legend.get_window_extent().y1 < axes.get_window_extent().y0
    assert below, "the legend hides the data"
    figure = plotting.curves({"one": [2.0, 1.0]}, steps=[0, 1], **STEPS)
    assert not figure.axes[0].collections
    assert not figure.legends


def test_bands_that_overlap_are_pale_and_have_an_edge_in_their_colour():
    seeds = {"dense": [[3.0, 1.0], [5.0, 1.0]], "sparse": [[2.0, 2.0], [4.0, 1.0]]}
    (axes,) = plotting.curves(seeds, steps=[0, 1], **STEPS).axes
    for line, band in zip(axes.lines, axes.collections, strict=True):
        assert to_hex(band.get_edgecolor()[0]) == line.get_color().lower()
        assert band.get_facecolor()[0, 3] < 0.1


def test_smoothing_keeps_a_constant_and_is_shorter_at_both_ends():
    lines = {"flat": np.full(9, 2.5), "ramp": np.arange(9.0)}
    figure = plotting.curves(lines, steps=np.arange(9), window=3, **STEPS)
    flat, ramp = (line.get_ydata() for line in figure.axes[0].lines)
    np.testing.assert_allclose(flat, 2.5)
    np.testing.assert_allclose(ramp, [0.5, 1, 2, 3, 4, 5, 6, 7, 7.5])


def test_leads_are_paired_by_item_with_students_interval_and_fewer_panels_than_lines():
    right = {
        "dense": [0, 0, 1, 0] * 10,
        "sparse": [1, 0, 1, 0] * 10,
        "wide": [0, 1, 0, 1] * 10,
    }
    tasks = ["sum", "copy"] * 20
    tables = {}
    for arm, correct in right.items():
        tables[arm] = pd.DataFrame({"task": tasks, "correct": correct})
    pairs = [
        ("sparse", "dense"),
        ("wide", "dense"),
        ("sparse", "wide"),
        ("sparse", "other"),
    ]
    figure = plotting.leads(tables, pairs, by="task", title="Leads")
    assert [axes.get_title("left") for axes in figure.axes] == ["sum", "copy"]
    total, copy = figure.axes
    names = ["sparse − dense", "wide − dense", "sparse − wide"]
    assert texts(total.get_yticklabels()) == names
    spans = total.lines[:6:2]
    dots = total.lines[1:6:2]
    assert [dot.get_xdata()[0] for dot in dots] == [50, -50, 100]
    ends = stats.ttest_1samp([100, 0] * 10, 0).confidence_interval()
    np.testing.assert_allclose(spans[0].get_xdata(), ends)
    # Where all items differ alike there is no spread, and so no certainty.
    assert filled([*dots, copy.lines[1]]) == [True, True, False, False]
    assert total.get_xlim() == copy.get_xlim()
    (axes,) = plotting.leads(tables, pairs[:1], by="task").axes
    assert texts(axes.get_yticklabels()) == ["sum", "copy"]
    assert plotting.leads(tables, pairs[3:], by="task") is None
    # A single item has no interval.
    few = {arm: table[:1] for arm, table in tables.items()}
    (axes,) = plotting.leads(few, pairs[:1], by="task").axes
    assert [list(line.get_xdata()) for line in axes.lines] == [[100], [0, 0]]


def test_heat_maps_share_a_colour_scale_and_number_their_cells():
    panels = {"layer 0": np.array([[0.1, 0.9]]), "layer 1": np.array([[0.4, 0.6]])}
    figure = plotting.heatmap(
        panels, rows=["code"], columns=["0", "1"], label="share of tokens"
    )
    images = [axes.images[0] for axes in figure.axes if axes.images]
    assert [image.get_clim() for image in images] == [(0.0, 0.9), (0.0, 0.9)]
    np.testing.assert_array_equal(images[1].get_array(), panels["layer 1"])
    assert texts(figure.axes[0].texts) == [".10", ".90"]
    counts = {"": np.array([[10.0, 20.33, -0.5]])}
    figure = plotting.heatmap(
        counts, rows=["law"], columns=["0", "1", "2"], label="experts"
    )
    assert texts(figure.axes[0].texts) == ["10.00", "20.33", "-.50"]


def test_a_heat_map_ends_at_a_frame_on_light_and_dark_pages():
    shares = {"": [[0.0, 1.0]]}
    axes = plotting.heatmap(shares, rows=["law"], columns="ab", label="").axes[0]
    dark = to_rgb("#121212")  # it shows through what is turned around (moebook.css)
    for side in axes.spines.values():
        assert side.get_visible()
        line = np.array(to_rgb(side.get_edgecolor()))
        assert contrast(line, "white") >= 3
        assert contrast(1 - line * (1 - np.array(dark)), dark) >= 3


def test_cells_of_a_heat_map_are_empty_at_zero_and_where_a_number_has_no_room():
    shares = {"": [[0.004, -0.004, 0.5, np.nan]]}
    figure = plotting.heatmap(shares, rows=["law"], columns=list("abcd"), label="")
    assert texts(figure.axes[0].texts) == [".50"]
    narrow = {"": np.full((1, 40), 0.5)}
    figure = plotting.heatmap(narrow, rows=["law"], columns=[""] * 40, label="")
    assert texts(figure.axes[0].texts) == []


def test_the_label_of_a_heat_maps_colours_is_no_wider_than_the_figure():
    label = "shared experts of the 4 best, averaged over layers"
    figure = plotting.heatmap({"": CLOUD}, rows="ab", columns="xy", label=label)
    figure.draw_without_rendering()
    extent = figure.axes[-1].xaxis.label.get_window_extent()
    assert 0 <= extent.x0 < extent.x1 <= figure.bbox.width


@pytest.mark.parametrize(
    ("columns", "angle"),
    [(["0", "1", "2"], 0), (["LoRAHub", "SMEAR", "PHATGOOSE"] * 3, 30)],
)
def test_names_below_a_heat_map_are_tilted_where_they_would_touch(columns, angle):
    figure = plotting.heatmap(
        {"": np.ones((1, len(columns)))}, rows=["kinship"], columns=columns, label=""
    )
    names = figure.axes[0].get_xticklabels()
    assert {name.get_rotation() for name in names} == {angle}


def test_loads_stack_to_one_and_number_their_experts():
    shares = {"layer 0": [0.5, 0.49, 0.01], "layer 1": [0.2, 0.3, 0.5]}
    (axes,) = plotting.loads(shares).axes
    sums = np.zeros(2)
    for bars in axes.containers:
        sums += [bar.get_width() for bar in bars.patches]
    np.testing.assert_allclose(sums, 1.0)
    assert texts(axes.texts) == ["0", "0", "1", "1", "", "2"]
    bars = min(bar.get_zorder() for bar in axes.patches)
    for border in axes.lines:
        assert border.get_zorder() < bars, "it would strike through the numbers"


def test_points_keep_their_colours_and_the_legend_hides_no_label():
    panels = {"one": {"pool": CLOUD, "shots": CLOUD + 1}}
    for name in "abcd":
        panels[name] = {"shots": CLOUD}
    figure = plotting.points(panels, xlabel="x", ylabel="y")
    one, two, *_ = figure.axes
    (legend,) = figure.legends
    assert to_rgb(two.collections[0].get_facecolor()[0]) == to_rgb(COLOURS[1])
    assert texts(legend.get_texts()) == ["pool", "shots"]
    assert one.get_xlim() == two.get_xlim()
    assert one.collections[1].get_offsets().tolist() == (CLOUD + 1).tolist()
    figure.draw_without_rendering()
    labels = [axes.xaxis.label for axes in figure.axes if axes.get_xlabel()]
    assert len(labels) == 3
    for label in labels:
        assert not legend.get_window_extent().overlaps(label.get_window_extent())


def test_points_may_lie_on_top_or_be_joined_and_a_map_has_no_numbers():
    panels = {"one": {"pool": CLOUD, "shots": CLOUD + 1}}
    below, chosen = plotting.points(panels, above="shots").axes[0].collections
    assert chosen.get_zorder() > below.get_zorder()
    assert chosen.get_linewidths()[0] > 0
    assert len(chosen.get_facecolors()) and not len(below.get_facecolors()), "hidden"
    figure = plotting.points({"a": {"pool": CLOUD}}, joined=True, xscale="log")
    assert figure.axes[0].lines[0].get_xydata().tolist() == CLOUD.tolist()
    assert figure.axes[0].get_xscale() == "log"
    figure = plotting.points({"map": {"pool": np.random.rand(200, 2)}}, ticks=False)
    (axes,) = figure.axes
    assert len(axes.get_xticks()) == len(axes.get_yticks()) == len(figure.legends) == 0
    assert axes.collections[0].get_alpha() < 0.5


def test_panels_may_have_an_axis_of_their_own():
    panels = {
        "shots": {"here": [(1, 0), (50, 9)]},
        "experts": {"here": [(4, 0), (8, 2)]},
    }
    draw = partial(plotting.points, panels, joined=True, xscale="log")
    one, two = draw(shared="y").axes
    assert one.get_ylim() == two.get_ylim()
    assert [*one.get_xticks()] == [1, 50]
    assert _numbers(two.xaxis) == ["4", "8"]
    one, two = draw(shared="x").axes
    assert one.get_xlim() == two.get_xlim()
    assert one.get_ylim() != two.get_ylim()


def test_the_mark_of_a_large_cloud_is_no_speck_in_the_legend():
    clouds = {"pool": np.random.rand(200, 2), "shots": CLOUD}
    figure = plotting.points({"": clouds}, ticks=False)
    pool, shots = figure.legends[0].legend_handles
    assert [*pool.get_sizes()] == [*shots.get_sizes()] == [charts.MARK]
    assert pool.get_alpha() == 1
    assert figure.axes[0].collections[0].get_sizes()[0] < charts.MARK


def test_a_number_in_a_title_has_a_minus_and_a_word_its_hyphen():
    figure = plotting.points({"": {"one": [(0, 1)]}}, title="tri-way: -0.5, +1, 2-3")
    assert figure.get_suptitle() == "tri-way: −0.5, +1, 2-3"


@pytest.mark.parametrize(
    ("title", "lines"),
    [
        ("one two", ["one two"]),
        ("aaa bbb ccc d", ["aaa bbb", "ccc d"]),
        ("aaa bbbbbb", ["aaa", "bbbbbb"]),
    ],
)
def test_lines_of_a_title_are_few_and_of_about_one_length(title, lines):
    assert charts.balanced(title, 8).split("\n") == lines
    assert charts.balanced(title, 11).count("\n") <= len(lines) - 1


def test_a_price_is_filled_where_no_lower_loss_costs_as_little():
    loss = [1.0, 3.0, 3.1, 2.0, 1.1]
    step = [3.0, 1.0, 2.0, 2.0, 4.0]
    arms = ["full", "own_lora", "c", "d", "e"]
    table = pd.DataFrame({"loss (nats)": loss, "time of a step": step}, index=arms)
    left, right = plotting.prices(table, title="Paid").axes
    assert texts(left.get_yticklabels()) == ["full", "e", "d", "own lora", "c"]
    assert [line.get_xydata().tolist() for line in right.lines] == [
        [[3, 0]],
        [[4, 1]],
        [[2, 2]],
        [[1, 3]],
        [[2, 4]],
    ]
    assert filled(right.lines) == [True, False, True, True, False]
    assert filled(left.lines) == [True] * 5
    assert left.get_xscale() == right.get_xscale() == "log"


@pytest.mark.parametrize(
    ("losses", "prices", "on_front"),
    [
        ([1.0, 1.0, 1.0], [2.0, 3.0, 3.0], [True, True, True]),
        ([1.0, 1.0, 1.0], [3.0, 3.0, 2.0], [True, True, True]),
        ([1.0, 2.0, 3.0], [3.0, 3.0, 2.0], [True, False, True]),
    ],
)
def test_of_equal_losses_every_price_is_filled_of_equal_prices_the_lowest_loss(
    losses, prices, on_front
):
    table = pd.DataFrame({"loss": losses, "price": prices}, index=[*"abc"])
    _, right = plotting.prices(table, title="Paid").axes
    assert filled(right.lines) == on_front


def test_every_effect_lies_at_its_value_with_its_interval_and_its_series_look():
    figure = plotting.forest(EFFECTS, xlabel="effect", title="Found")
    points, nats = figure.axes
    assert points.get_xlabel() == "effect (points)"
    assert nats.get_xlabel() == "effect (nats)"
    assert figure.get_suptitle() == "Found"
    assert texts(points.get_yticklabels()) == ["leads", "learns"]
    assert points.get_ylim()[0] > points.get_ylim()[1], "the first row is on top"

    spans = points.lines[:6:2]
    dots = points.lines[1:6:2]
    zero = points.lines[6]
    places, heights = np.array([dot.get_xydata()[0] for dot in dots]).T
    assert places.tolist() == [2, 1, -1]
    assert heights == pytest.approx([-0.15, 0.15, 1])
    assert [list(span.get_xdata()) for span in spans] == [[1, 3], [-1, 3], [-2, 0]]
    assert [list(span.get_ydata()) for span in spans] == [[y, y] for y in heights]
    assert list(zero.get_xdata()) == [0, 0]
    assert filled(dots) == [True, False, False]
    assert nats.lines[1].get_ydata()[0] == 0

    (legend,) = figure.legends
    assert texts(legend.get_texts()) == ["nano", "smollm2"]

    def looks(lines):
        return [(line.get_color(), line.get_marker()) for line in lines]

    nano, smollm2 = looks(legend.legend_handles)
    assert nano != smollm2
    assert looks([*dots[:2], nats.lines[1]]) == [nano, smollm2, smollm2]
    assert not plotting.forest(EFFECTS[EFFECTS.series == "nano"], xlabel="").legends
    assert plotting.forest(EFFECTS.iloc[:0], xlabel="effect") is None


def test_what_the_paper_prints_is_marked_once_a_line_also_where_a_row_lacks_it():
    printed = EFFECTS.assign(printed=[np.nan, 5.0, 3.0, np.nan])
    figure = plotting.forest(printed, xlabel="effect")
    marks = {}
    for axes in figure.axes:
        lines = [line for line in axes.lines if line.get_marker() == "|"]
        marks[axes.get_xlabel()] = [line.get_xydata()[0].tolist() for line in lines]
    assert marks == {"effect (points)": [[5, 0], [3, 1]], "effect (nats)": []}
    assert "the paper" in texts(figure.legends[0].get_texts())
    alike = EFFECTS.assign(printed=5.0)
    points, _ = plotting.forest(alike, xlabel="effect").axes
    assert sum(line.get_marker() == "|" for line in points.lines) == 2


def test_times_begin_at_ours_with_the_floor_of_their_group():
    (axes,) = speed.multiples(TIMES, xlabel="time over ours").axes
    ends = []
    for bar in axes.patches:
        ends.append(sorted((bar.get_x(), bar.get_x() + bar.get_width())))
    assert ends == [[1, 16], [0.5, 1], [1, 2]]
    assert axes.get_xscale() == "log"
    (floor,) = (line for line in axes.lines if line.get_linewidth() == 2.5)
    assert floor.get_xydata().tolist() == [[0.8, 0.5], [0.8, 2.5]]
    lines = [text.strip() for text in texts(axes.get_yticklabels())]
    assert lines == ["experts", "eager", "own", "groups", "loop"]


def test_each_power_of_ten_that_times_span_has_its_number():
    spread = TIMES.assign(value=[460, 2014, 0.45], floor=[0.02, 0.02, 0.06])
    figure = speed.multiples(spread, xlabel="time over ours")
    figure.draw_without_rendering()
    numbers = _numbers(figure.axes[0].xaxis)
    assert numbers == ["0.1", "1", "10", "100", "1000"]


def test_the_number_of_a_short_bar_keeps_clear_of_a_floor_above_ours():
    short = TIMES.assign(value=[0.06, 0.95, 1.02], floor=[1.1, 1.1, 1.05])
    figure = speed.multiples(short, xlabel="time over ours")
    figure.draw_without_rendering()
    (axes,) = figure.axes
    floors = [line for line in axes.lines if line.get_linewidth() == 2.5]
    for number in axes.texts:
        for floor in floors:
            assert not number.get_window_extent().overlaps(floor.get_window_extent())


def test_growth_has_logarithmic_axes_and_ours_is_thick():
    ours = np.array([[1.0, 1], [2, 4]])
    floor = np.array([[1.0, 1], [2, 2]])
    series = {"ours": ours, "floor": floor}
    figure = speed.growth({"T": series, "E": series}, xlabel="value", ylabel="ms")
    first = figure.axes[0]
    assert first.get_xscale() == first.get_yscale() == "log"
    assert first.lines[0].get_linewidth() > first.lines[1].get_linewidth()
    many = dict.fromkeys("BTVDFLEKRSN", series)
    figure = speed.growth(many, xlabel="value", ylabel="ms")
    columns = {axes.get_subplotspec().colspan.start for axes in figure.axes}
    assert columns == {0, 1, 2}, "in more the text could not be read on a phone"


def test_what_an_op_reached_stands_beside_what_memory_or_arithmetic_allows_it():
    runs = {"adapters": (5.0, 2e10), "experts": (40.0, 9e10)}
    figure = speed.roofline(runs, flops=1e11, bandwidth=1e10, machine="a card")
    (axes,) = figure.axes
    assert texts(axes.get_yticklabels()) == ["experts", "adapters"]
    assert [line.get_xydata().tolist() for line in axes.lines] == [
        [[90, 0]],
        [[100, 0]],
        [[20, 1]],
        [[50, 1]],
    ]
    (legend,) = figure.legends
    limits = ["limited by arithmetic", "its roof", "limited by memory"]
    assert texts(legend.get_texts()) == limits
    assert figure.get_suptitle() == "1 of 2 cases reach half of what a card allows"


OPS = "route split_experts lora_mixture balance_loss duplicates pesc_step".split()


def measured(draw):
    """A time and how much longer another one took: from no longer to ten thousand times."""
    return 10.0 ** draw.uniform(-4, 4), 1 + 10.0 ** draw.uniform(-2, 4)


@pytest.mark.parametrize("seed", range(2))
def test_figures_of_times_are_readable_whatever_was_measured(seed):
    draw = np.random.default_rng(seed)
    panels = {}
    bars = []
    reached = {}
    for op in OPS:
        for letter in "TEN":
            least, spread = measured(draw)
            ours = np.array([[4.0, least], [64, 1.1 * least], [4096, least * spread]])
            series = {"ours": ours, "fastest other": 1.1 * ours, "floor": ours / 1.1}
            panels[f"{op}, {letter}"] = series
        for contender in ("eager", "PEFT's LoRA", "frozen layer alone"):
            bars.append([f"{op}, 64 tokens", contender, measured(draw)[1], 0.9])
        reached[op.replace("_", " ")] = (measured(draw)[1], 1e9 * measured(draw)[1])
    figures = {
        "growth": speed.growth(panels, xlabel="value of the letter", ylabel="ms"),
        "multiples": speed.multiples(
            pd.DataFrame(bars, columns=TIMES.columns), xlabel="time over ours"
        ),
        "roof": speed.roofline(reached, flops=1e11, bandwidth=1e10, machine="it"),
    }
    assert {name: [*charts.faults(figure)] for name, figure in figures.items()} == {
        "growth": [],
        "multiples": [],
        "roof": [],
    }
    for axes in figures["growth"].axes:  # and each says how long anything took
        assert not axes.get_visible() or _numbers(axes.yaxis), axes.get_title()


def _numbers(axis):
    """The numbers that an axis shows."""
    return axis.get_major_formatter().format_ticks(axis.get_majorticklocs())


@pytest.mark.parametrize(
    ("least", "most", "numbers"),
    [
        (0.055, 0.085, ["0.06", "0.07", "0.08"]),
        (0.9, 11, ["1", "2", "5", "10"]),
        (0.5, 2_000, ["1", "10", "100", "1000"]),
        (3, 4, ["3.2", "3.4", "3.6", "3.8"]),
    ],
)
def test_a_logarithmic_axis_has_as_many_round_numbers_as_it_has_room_for(
    least, most, numbers
):
    axes = Figure(figsize=(2, 1.2), dpi=100).subplots()
    axes.set(yscale="log", ylim=(least, most))
    charts.logarithmic(axes.yaxis)
    assert _numbers(axes.yaxis) == numbers


curves = partial(plotting.curves, {"a": [1.0]}, **STEPS)
heatmap = partial(plotting.heatmap, rows=["a"], columns=["x"], label="")
REFUSALS = [
    (partial(curves, steps=[0, 1]), "E-SHAPE: .* 1 points; st"),
    (partial(curves, steps=[0], window=0), "E-RANGE: curves: w"),
    (
        partial(plotting.forest, EFFECTS.drop(columns="low"), xlabel=""),
        r"E-KEYS: .* \['low'\]",
    ),
    *(
        (
            partial(plotting.forest, EFFECTS.assign(**{name: names}), xlabel=""),
            f"E-DATA: forest: a row has no {name}; name it",
        )
        for name in ("panel", "line", "series")
        for names in (None, ["a", None, "b", "b"])
    ),
    (partial(heatmap, {}), "E-DATA: no panels"),
    (partial(heatmap, {"p": CLOUD}), r"E-SHAPE: heatmap: panel 'p' is \(2, 2\)"),
    (
        partial(plotting.loads, {"a": [0.5, 0.5], "b": [0.5, 0.6]}),
        "E-RANGE: .* row 'b'",
    ),
    (partial(plotting.loads, {"a": [0.5, 0.5], "b": [1.0]}), "E-SHAPE: .* row 'b'"),
    (
        partial(plotting.points, {"p": {"a": np.zeros(3)}}),
        "E-SHAPE: points: 'a' of 'p' is",
    ),
    (partial(plotting.points, {}), "E-DATA: no panels"),
    (
        partial(speed.multiples, TIMES.assign(value=0.0), xlabel=""),
        "E-RANGE: multiples",
    ),
    (
        partial(speed.roofline, {}, flops=0.0, bandwidth=1.0, machine=""),
        "E-RANGE: roofline",
    ),
]


@pytest.mark.parametrize(("draw", "message"), REFUSALS)
def test_what_cannot_be_drawn_is_refused(draw, message):
    refused(message, draw)


def luminance(colour):
    """Relative luminance by WCAG 2."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def contrast(one, other):
    """Contrast of two colours by WCAG 2, at least 1."""
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colour", COLOURS)
def test_text_has_a_contrast_of_four_and_a_half(colour):
    text = "white" if colour in DARK_COLOURS else INK
    assert contrast(colour, text) >= 4.5


def test_a_styled_figure_has_our_colours_and_is_opaque():
    cycle = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
    assert [f"#{colour.lstrip('#')}" for colour in cycle] == list(COLOURS)
    page = io.BytesIO()
    plotting.loads({"layer 0": [0.5, 0.5]}).savefig(page)
    page.seek(0)
    np.testing.assert_array_equal(imread(page)[0, 0], [1.0, 1.0, 1.0, 1.0])


def test_tasks_and_arms_are_named_in_words():
    table = [[0.0, 1.0]]
    figure = plotting.heatmap(
        {"nano_moe": table}, rows=["own_choice"], columns=[1, "intent_json"], label=""
    )
    axes = figure.axes[0]
    assert axes.get_title(loc="left") == "nano moe"
    assert texts(axes.get_xticklabels()) == ["1", "intent json"]
    assert texts(axes.get_yticklabels()) == ["own choice"]
    lines = {"intent_json": [1.0], "licence": [2.0]}
    (legend,) = plotting.curves(lines, **STEPS | {"steps": [0]}).legends
    assert texts(legend.get_texts()) == ["intent json", "licence"]


def crowded(axes):
    axes.set_xticks([0, 0.01], ["a long label", "another one"])


def with_nan(axes):
    axes.set_xticks([0], ["nan"])


def titles_that_meet(axes):
    axes.set_title("the title of a panel")
    axes.text(0, 1.03, "what is drawn there", transform=axes.transAxes)


def without_points(axes):
    axes.plot([0, 1], [np.nan, np.nan])


def named_as_in_code(axes):
    axes.figure.legend(axes.lines, ["pesc/real_chat"])


def named_as_a_study(axes):
    axes.figure.legend(axes.lines, ["higher\n(5 seeds: mean, range)"])


def promised_in_the_legend_alone(axes):
    absent = matplotlib.lines.Line2D([0], [0], color=COLOURS[1])
    axes.figure.legend([*axes.lines, absent], ["dense", "sparse\n(5 seeds)"])


def with_a_fourth_colour(axes):
    lines = [axes.plot([0, 1], color=colour)[0] for colour in (*COLOURS[:4], INK)]
    axes.figure.legend(lines, list("abcde"))


def with_four_intervals(axes):
    for place, colour in enumerate(COLOURS[:4]):
        axes.errorbar([place], [0], yerr=1, color=colour, label="abcd"[place])
    axes.figure.legend()


def with_four_hollow_points(axes):
    for place, colour in enumerate(COLOURS[:4]):
        label = "abcd"[place]
        axes.scatter([place], [0], facecolors="none", edgecolors=colour, label=label)
    axes.figure.legend()


def with_four_marks_on_grey(axes):
    for place, colour in enumerate(COLOURS[:4]):
        axes.plot(
            [place], [0], color="0.4", marker="o", mfc=colour, label="abcd"[place]
        )
    axes.figure.legend()


def test_what_is_black_grey_white_or_hollow_has_no_colour():
    figure, axes = charts.single(2.0)
    for place, grey in enumerate((INK, "0.5", "black", "white")):
        label = "abcd"[place]
        axes.bar([place], [1], fill=False, edgecolor=grey, label=label)
        axes.scatter([place], [0], facecolors="none", edgecolors=grey)
        axes.plot([place], [0], color=grey, marker="o", mfc="white")
    figure.legend([*axes.patches, *axes.collections, *axes.lines], list("abcdefghijkl"))
    assert not any("coloured" in fault for fault in charts.faults(figure))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (with_four_intervals, "the legend has 4 coloured series; expected at most 3"),
        (with_four_hollow_points, "the legend has 4 coloured series"),
        (with_four_marks_on_grey, "the legend has 4 coloured series"),
        (with_a_fourth_colour, "the legend has 4 coloured series; expected at most 3"),
        (promised_in_the_legend_alone, "the legend has 'sparse', which no panel draws"),
        (crowded, "'another one' lies over 'a long label'"),
        (with_nan, "'nan' says NaN"),
        (titles_that_meet, "'the title of a panel' lies over|lies over 'the title"),
        (without_points, "a series has no point"),
        (named_as_in_code, "the legend says 'pesc/real_chat'"),
        (named_as_a_study, "the legend says 'higher'"),
    ],
)
def test_what_cannot_be_read_in_a_figure_is_warned_of_and_refused_in_the_book(
    spoil, told
):
    curve = {"a": [1.0, 2.0]}
    figure = plotting.curves(curve, steps=[0, 1], xlabel="step", ylabel="loss (nats)")
    plotting.check(figure, "good")
    spoil(figure.axes[0])
    with pytest.warns(UserWarning, match=f"W-FIGURE: .*({told})"):
        charts.finished(figure)
    refused(f"E-BOOK: figure spoilt: .*({told})", plotting.check, figure, "spoilt")
