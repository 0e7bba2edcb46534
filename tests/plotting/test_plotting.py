"""Figures draw the numbers they were given, refuse those that do not fit, and are readable."""

import io

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from scipy import stats

from moebook import plotting
from moebook.plotting import speed
from moebook.plotting.charts import COLOURS, COLUMNS, DARK_COLOURS, INK
from tests.refusals import refused

EFFECTS = pd.DataFrame(
    [["points", "leads", "nano", 2.0, 1.0, 3.0, True],
     ["points", "leads", "smollm2", 1.0, -1.0, 3.0, False],
     ["points", "learns", "nano", -1.0, -2.0, 0.0, False],
     ["nats", "costs", "smollm2", 0.2, 0.1, 0.3, True]],
    columns=COLUMNS,
)  # fmt: skip
TIMES = pd.DataFrame(
    [["experts", "eager", 16, 0.8], ["experts", "own", 0.5, 0.8], ["groups", "loop", 2, np.nan]],
    columns=["group", "contender", "value", "floor"],
)  # fmt: skip
CLOUD = np.array([[0.0, 1.0], [2.0, 3.0]])
STEPS = {"xlabel": "steps", "ylabel": "nats"}
ONE = {"rows": ["a"], "columns": ["x"], "label": ""}


@pytest.fixture(autouse=True)
def style():
    """Draw in the book's look, whatever another test has set."""
    with matplotlib.rc_context():
        plotting.style()
        yield


def texts(artists):
    return [artist.get_text() for artist in artists]


def test_a_curve_is_the_mean_of_its_seeds_in_their_range_and_smoothing_keeps_a_constant():
    seeds = {"sparse": [[3.0, 2.0, 1.0], [5.0, 4.0, 1.0]]}
    figure = plotting.curves(seeds, steps=[0, 10, 20], yscale="log", **STEPS)
    (axes,), (legend,) = figure.axes, figure.legends
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [[0, 4.0], [10, 3.0], [20, 1.0]])
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (1.0, 5.0)
    assert "2 seeds" in texts(legend.get_texts())[0] and axes.get_yscale() == "log"
    figure.draw_without_rendering()
    shown = [float(text) for text in texts(axes.get_yticklabels())]
    assert {1, 2, 5} <= set(shown), "powers of ten would be hard to read"
    assert legend.get_window_extent().x0 > axes.get_window_extent().x1, "beside the data"
    figure = plotting.curves({"one": [2.0, 1.0]}, steps=[0, 1], **STEPS)
    assert not figure.axes[0].collections and not figure.legends
    lines = {"flat": np.full(9, 2.5), "ramp": np.arange(9.0)}
    figure = plotting.curves(lines, steps=np.arange(9), window=3, **STEPS)
    flat, ramp = (line.get_ydata() for line in figure.axes[0].lines)
    np.testing.assert_allclose(flat, 2.5)
    np.testing.assert_allclose(ramp, [0.5, 1, 2, 3, 4, 5, 6, 7, 7.5])


def test_leads_are_paired_by_item_with_students_interval_and_fewer_panels_than_lines():
    right = {"dense": [0, 0, 1, 0] * 10, "sparse": [1, 0, 1, 0] * 10, "wide": [0, 1, 0, 1] * 10}
    group = ["sum", "copy"] * 20
    tables = {arm: pd.DataFrame({"task": group, "correct": right[arm]}) for arm in right}
    pairs = [("sparse", "dense"), ("wide", "dense"), ("sparse", "wide"), ("sparse", "other")]
    figure = plotting.leads(tables, pairs, by="task", title="Leads")
    assert [axes.get_title("left") for axes in figure.axes] == ["sum", "copy"]
    total, copy = figure.axes
    assert texts(total.get_yticklabels()) == ["sparse − dense", "wide − dense", "sparse − wide"]
    spans, dots = total.lines[:6:2], total.lines[1:6:2]
    assert [dot.get_xdata()[0] for dot in dots] == [50, -50, 100]
    gap = stats.ttest_1samp([100, 0] * 10, 0).confidence_interval()
    np.testing.assert_allclose(spans[0].get_xdata(), gap)
    filled = [dot.get_markerfacecolor() == dot.get_color() for dot in (*dots, copy.lines[1])]
    assert filled == [True, True, True, False]
    assert total.get_xlim() == copy.get_xlim()
    (axes,) = plotting.leads(tables, pairs[:1], by="task").axes
    assert texts(axes.get_yticklabels()) == ["sum", "copy"]
    assert plotting.leads(tables, pairs[3:], by="task") is None


def test_heat_maps_share_a_colour_scale_and_loads_stack_to_one_and_number_their_experts():
    panels = {"layer 0": np.array([[0.1, 0.9]]), "layer 1": np.array([[0.4, 0.6]])}
    figure = plotting.heatmap(panels, rows=["code"], columns=["0", "1"], label="share of tokens")
    images = [axes.images[0] for axes in figure.axes if axes.images]
    assert [image.get_clim() for image in images] == [(0.0, 0.9), (0.0, 0.9)]
    np.testing.assert_array_equal(images[1].get_array(), panels["layer 1"])
    assert texts(figure.axes[0].texts) == [".10", ".90"]
    counts = {"": np.array([[10.0, 20.33, -0.5]])}
    figure = plotting.heatmap(counts, rows=["law"], columns=["0", "1", "2"], label="experts")
    assert texts(figure.axes[0].texts) == ["10.00", "20.33", "-.50"]
    (axes,) = plotting.loads({"layer 0": [0.5, 0.49, 0.01], "layer 1": [0.2, 0.3, 0.5]}).axes
    widths = np.array([[bar.get_width() for bar in bars.patches] for bars in axes.containers])
    np.testing.assert_allclose(widths.sum(axis=0), 1.0)
    assert texts(axes.texts) == ["0", "0", "1", "1", "", "2"]


def test_points_keep_their_colours_the_legend_hides_no_label_and_a_map_has_no_numbers():
    panels = {"one": {"pool": CLOUD, "shots": CLOUD + 1}, **{n: {"shots": CLOUD} for n in "abc"}}
    figure = plotting.points(panels, xlabel="x", ylabel="y")
    (one, two, *_), (legend,) = figure.axes, figure.legends
    assert tuple(two.collections[0].get_facecolor()[0][:3]) == to_rgb(COLOURS[1])
    assert texts(legend.get_texts()) == ["pool", "shots"]
    assert one.get_xlim() == two.get_xlim()
    (below, chosen) = plotting.points(panels, above="shots").axes[0].collections
    assert chosen.get_zorder() > below.get_zorder() and chosen.get_linewidths()[0] > 0
    assert np.asarray(one.collections[1].get_offsets()).tolist() == (CLOUD + 1).tolist()
    figure.draw_without_rendering()
    labels = [axes.xaxis.label.get_window_extent() for axes in figure.axes if axes.get_xlabel()]
    assert len(labels) == 3
    assert not any(map(legend.get_window_extent().overlaps, labels))
    figure = plotting.points({"a": {"pool": CLOUD}}, joined=True, xscale="log")
    assert figure.axes[0].lines[0].get_xydata().tolist() == CLOUD.tolist()
    assert figure.axes[0].get_xscale() == "log"
    figure = plotting.points({"map": {"pool": np.random.rand(200, 2)}}, ticks=False)
    (axes,) = figure.axes
    assert len(axes.get_xticks()) == len(axes.get_yticks()) == len(figure.legends) == 0
    assert axes.collections[0].get_alpha() < 0.5


def test_every_effect_lies_at_its_value_with_its_interval_and_its_series_look():
    figure = plotting.forest(EFFECTS, xlabel="effect", title="Found")
    points, nats = figure.axes
    assert [axes.get_xlabel() for axes in figure.axes] == ["effect (points)", "effect (nats)"]
    assert texts(points.get_yticklabels()) == ["leads", "learns"]
    spans, dots = points.lines[:6:2], points.lines[1:6:2]
    places, heights = np.array([dot.get_xydata()[0] for dot in dots]).T
    assert places.tolist() == [2, 1, -1] and heights == pytest.approx([-0.15, 0.15, 1])
    assert [list(span.get_xdata()) for span in spans] == [[1, 3], [-1, 3], [-2, 0]]
    assert [list(span.get_ydata()) for span in spans] == [[height] * 2 for height in heights]
    assert points.get_ylim()[0] > points.get_ylim()[1], "the first row is on top"
    assert [dot.get_markerfacecolor() == dot.get_color() for dot in dots] == [True, False, False]
    assert nats.lines[1].get_ydata()[0] == 0 and list(points.lines[6].get_xdata()) == [0, 0]
    assert figure.get_suptitle() == "Found"
    looks = [(dot.get_color(), dot.get_marker()) for dot in (*dots[:2], nats.lines[1])]
    (legend,) = figure.legends
    shown = [(mark.get_color(), mark.get_marker()) for mark in legend.legend_handles]
    assert looks == [*shown, shown[1]] and shown[0] != shown[1]
    assert texts(legend.get_texts()) == ["nano", "smollm2"]
    assert not plotting.forest(EFFECTS[EFFECTS.series == "nano"], xlabel="effect").legends
    assert plotting.forest(EFFECTS.iloc[:0], xlabel="effect") is None


def test_times_begin_at_ours_growth_has_logarithmic_axes_and_the_roof_is_flat_from_its_edge_on():
    axes, right = speed.multiples(TIMES, xlabel="time over ours").axes
    bars = [*axes.patches, *right.patches]
    ends = [sorted((bar.get_x(), bar.get_x() + bar.get_width())) for bar in bars]
    assert ends == [[1, 16], [0.5, 1], [1, 2]] and axes.get_xlim() == right.get_xlim()
    floors = [line.get_xydata().tolist() for line in axes.lines if line.get_linewidth() == 2.5]
    assert floors == [[[0.8, 0.5], [0.8, 2.5]]] and axes.get_xscale() == "log"
    shown = [[text.strip() for text in texts(a.get_yticklabels())] for a in (axes, right)]
    assert shown == [["experts", "eager", "own"], ["groups", "loop"]]
    series = {"ours": np.array([[1.0, 1], [2, 4]]), "floor": np.array([[1.0, 1], [2, 2]])}
    figure = speed.growth({"T": series, "E": series}, xlabel="value", ylabel="ms")
    first, _ = (axes for axes in figure.axes if axes.get_visible())
    assert first.get_xscale() == first.get_yscale() == "log"
    assert first.lines[0].get_linewidth() > first.lines[1].get_linewidth()
    figure = speed.roofline({"experts": (40.0, 5e10)}, flops=1e11, bandwidth=1e10)
    roof = figure.axes[0].lines[0].get_xydata()
    assert roof == pytest.approx(np.array([[5, 50], [10, 100], [80, 100]]))


@pytest.mark.parametrize(("draw", "message"), [
    (lambda: plotting.curves({"a": [1.0]}, steps=[0, 1], **STEPS), "E-SHAPE: .* 1 points; st"),
    (lambda: plotting.curves({"a": [1.0]}, steps=[0], window=0, **STEPS), "E-RANGE: curves: w"),
    (lambda: plotting.forest(EFFECTS.drop(columns="low"), xlabel=""), r"E-KEYS: .* \['low'\]"),
    (lambda: plotting.heatmap({}, **ONE), "E-DATA: no panels"),
    (lambda: plotting.heatmap({"p": CLOUD}, **ONE), r"E-SHAPE: heatmap: panel 'p' is \(2, 2\)"),
    (lambda: plotting.loads({"a": [0.5, 0.5], "b": [0.5, 0.6]}), "E-RANGE: loads: row 'b'"),
    (lambda: plotting.loads({"a": [0.5, 0.5], "b": [1.0]}), "E-SHAPE: loads: row 'b'"),
    (lambda: plotting.points({"p": {"a": np.zeros(3)}}), "E-SHAPE: points: 'a' of 'p' is"),
    (lambda: plotting.points({}), "E-DATA: no panels"),
    (lambda: speed.multiples(TIMES.assign(value=0.0), xlabel=""), "E-RANGE: multiples"),
    (lambda: speed.roofline({}, flops=0.0, bandwidth=1.0), "E-RANGE: roofline"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_refused(draw, message):
    refused(message, draw)


def test_text_has_a_contrast_of_four_and_a_half_and_a_styled_figure_is_opaque():
    for colour in COLOURS:
        pair = np.array([to_rgb(colour), to_rgb("white" if colour in DARK_COLOURS else INK)])
        channels = np.where(pair <= 0.04045, pair / 12.92, ((pair + 0.055) / 1.055) ** 2.4)
        low, high = sorted(channels @ [0.2126, 0.7152, 0.0722])  # luminance by WCAG 2
        assert (high + 0.05) / (low + 0.05) >= 4.5
    with matplotlib.rc_context():
        plotting.style()
        cycle = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
        figure = plotting.loads({"layer 0": [0.5, 0.5]})
        page = io.BytesIO()
        figure.savefig(page)
    assert [to_rgb(f"#{colour.lstrip('#')}") for colour in cycle] == [*map(to_rgb, COLOURS)]
    page.seek(0)
    np.testing.assert_array_equal(imread(page)[0, 0], [1.0, 1.0, 1.0, 1.0])
