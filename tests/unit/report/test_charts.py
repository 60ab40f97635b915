"""Axes, charts and confusion matrices as geometry: everything stands inside its drawing and where it belongs."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from paceline.report.charts import (
    HEIGHT,
    MAX_LINES,
    WIDTH,
    layout_chart,
    layout_heat_map,
    linear_axis,
    log2_axis,
    log10_axis,
)
from paceline.report.document import Chart, ChartLine, HeatMap


@pytest.mark.parametrize(
    "low, high, texts",
    [(0, 100, ["0", "20", "40", "60", "80", "100"]), (0, 3.1, ["0", "1", "2", "3", "4"]),
     (0.86, 0.93, ["0.86", "0.88", "0.90", "0.92", "0.94"]),
     (0, 2713, ["0", "1,000", "2,000", "3,000"]), (5, 5, ["5", "6", "7", "8", "9", "10"]),
     (0, 0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
     (0, 4e-7, ["0", "1e-7", "2e-7", "3e-7", "4e-7"]), (-1, 1, ["-1.0", "-0.5", "0.0", "0.5", "1.0"])],
)  # fmt: skip
def test_ticks_are_round_numbers_over_all_values(low, high, texts):
    found = linear_axis(low, high)
    assert [text for _, text in found.ticks] == texts
    assert found.low <= low and found.high >= high


@pytest.mark.parametrize(
    "low, high", [(0, 1e-300), (0, 1e300), (-1e9, 1e9), (1e15, 1e15 + 4), (0, 5e-324), (-5e-324, 0), (-5e-324, -5e-324)]
)
def test_an_axis_over_any_numbers_has_a_few_ticks(low, high):
    assert 2 <= len(linear_axis(low, high).ticks) <= 12


def test_a_tight_axis_ends_with_its_values():
    found = linear_axis(0.0, 12.3, is_tight=True)
    assert (found.low, found.high) == (0.0, 12.3)
    assert [text for _, text in found.ticks] == ["0", "5", "10"]


@pytest.mark.parametrize(
    "low, high, texts",
    [(1, 8, ["1", "2", "4", "8"]), (3, 12, ["4", "8"]), (1, 4096, ["1", "4", "16", "64", "256", "1,024", "4,096"])],
)  # fmt: skip
def test_ticks_of_ranks_are_powers_of_two_as_far_from_one_another(low, high, texts):
    found = log2_axis(low, high)
    assert [text for _, text in found.ticks] == texts
    assert found.position(found.low) == 0 and found.position(found.high) == 1
    distances = [found.position(after) - found.position(before) for (before, _), (after, _) in pairwise(found.ticks)]
    assert distances == pytest.approx([distances[0]] * len(distances))  # logarithms, rounded


@pytest.mark.parametrize("ranks", [1, 4, 96])
def test_a_single_number_of_ranks_stands_in_the_middle_and_no_half_rank_beside_it(ranks):
    found = log2_axis(ranks, ranks)
    assert found.ticks == ((ranks, str(ranks)),)
    assert found.position(ranks) == pytest.approx(0.5)  # logarithms, rounded


@pytest.mark.parametrize(
    "low, high, texts",
    [(1000, 7078, ["1,000", "2,000", "5,000", "10,000"]), (93, 32165, ["10", "100", "1,000", "10,000", "100,000"]),
     (0.3, 0.4, ["0.2", "0.5"]), (5, 5, ["5", "10"]), (1, 1, ["1", "2"]), (2e-7, 1e-6, ["2e-7", "5e-7", "1e-6"])],
)  # fmt: skip
def test_ticks_of_rates_are_round_numbers_around_all_values(low, high, texts):
    found = log10_axis(low, high)
    assert [text for _, text in found.ticks] == texts
    assert found.low <= low and found.high >= high


@pytest.mark.parametrize("low, high", [(1e-300, 1e300), (1, 1e40), (1e-12, 1), (7, 9), (99, 101), (1e98, 1e99), (5, 7)])
def test_a_logarithmic_axis_over_any_positive_numbers_has_a_few_ticks(low, high):
    assert 2 <= len(log10_axis(low, high).ticks) <= 12
    assert 1 <= len(log2_axis(low, high).ticks) <= 8


def chart(*lines, **more):
    return Chart("Loss", "epoch", "cross-entropy", lines, **more)


def numbers_of(found):
    return [
        float(number) for curve in found.curves for piece in curve.pieces for number in re.findall(r"[-\d.]+", piece)
    ]


def test_lines_and_names_stay_inside_the_drawing():
    lines = [ChartLine(f"a line of {index}", [(x, x * index) for x in range(1000)]) for index in range(4)]
    found = layout_chart(chart(*lines))
    xs, ys = numbers_of(found)[::2], numbers_of(found)[1::2]
    assert len(xs) <= 2000 and min(xs) >= found.left and max(xs) <= found.right < WIDTH - 60
    assert min(ys) >= found.top and max(ys) <= found.bottom < HEIGHT
    labels = sorted(curve.label.y for curve in found.curves)
    assert all(after - before >= 13 for before, after in pairwise(labels))


def test_measurements_have_markers_with_tooltips():
    found = layout_chart(chart(ChartLine("validation", [(1, 0.5), (2, 0.25)], has_markers=True)))
    assert [dot.text for dot in found.curves[0].dots] == ["epoch 1: validation 0.5000", "epoch 2: validation 0.2500"]
    assert found.hints == () and found.curves[0].label is None


def test_long_lines_have_tooltip_strips_that_cover_the_chart():
    found = layout_chart(chart(ChartLine("training", [(x, 2 * x) for x in range(500)])))
    assert 50 <= len(found.hints) <= 61
    assert found.hints[0].x == found.left
    assert sum(hint.width for hint in found.hints) == pytest.approx(found.right - found.left)  # sums of floats
    assert found.hints[0].text == "epoch 0: training 0"


def test_a_pause_breaks_the_line():
    points = [(x, 1.0) for x in [*range(20), *range(100, 120)]]
    assert len(layout_chart(chart(ChartLine("cpu", points))).curves[0].pieces) == 2


def test_intervals_are_inside_the_chart_and_in_its_tooltips():
    points = [(1, 100.0), (2, 190.0), (4, 350.0)]
    line = ChartLine(
        "measured", points, has_markers=True, bounds={(1, 100.0): (90.0, 110.0), (4, 350.0): (300.0, 400.0)}
    )
    for more in ({}, {"log_x": True, "log_y": True, "low": None}):
        found = layout_chart(Chart("Speed", "ranks", "images/s", [line], **more))
        bars = found.curves[0].bars
        assert [bar.x for bar in bars] == [found.curves[0].dots[0].x, found.curves[0].dots[2].x]
        for bar, dot in zip(bars, found.curves[0].dots[::2], strict=True):
            assert found.bottom >= bar.low > dot.y > bar.high >= found.top
        assert [dot.text for dot in found.curves[0].dots] == [
            "ranks 1: measured 100 (90 to 110)", "ranks 2: measured 190", "ranks 4: measured 350 (300 to 400)",
        ]  # fmt: skip


def test_a_very_long_interval_does_not_flatten_the_points():
    points = [(1, 10.0), (2, 20.0)]
    line = ChartLine("measured", points, has_markers=True, bounds={(1, 10.0): (-1e6, 1e6), (2, 20.0): (19.0, 21.0)})
    found = layout_chart(Chart("Speed", "ranks", "images/s", [line]))
    assert [mark.text for mark in found.y_ticks] == ["0", "20", "40", "60"]
    assert found.curves[0].bars[0].low == found.bottom and found.curves[0].bars[0].high == found.top
    assert found.curves[0].dots[0].text.endswith("(-1,000,000 to 1,000,000)")


def test_an_interval_that_reaches_zero_is_drawn_a_decade_down_on_a_logarithmic_axis():
    line = ChartLine("measured", [(1, 10.0), (2, 20.0)], has_markers=True, bounds={(1, 10.0): (-5.0, 25.0)})
    found = layout_chart(Chart("Speed", "ranks", "images/s", [line], low=None, log_x=True, log_y=True)).curves[0]
    assert found.bars[0].low == pytest.approx(HEIGHT - 38)  # a tick, 1, which is where the axis stands
    assert found.dots[0].text == "ranks 1: measured 10 (-5 to 25)"


def test_equal_factors_are_equal_lengths_on_two_logarithmic_axes():
    line = ChartLine("ideal", [(1, 10.0), (2, 20.0), (4, 40.0)], has_markers=True)
    dots = layout_chart(Chart("Speed", "ranks", "images/s", [line], low=None, log_x=True, log_y=True)).curves[0].dots
    assert dots[1].x - dots[0].x == pytest.approx(dots[2].x - dots[1].x)  # logarithms, rounded
    assert dots[0].y - dots[1].y == pytest.approx(dots[1].y - dots[2].y)


def test_doubling_distances_are_no_gap():
    points = [(2.0**power, 1.0 + power) for power in range(13)]
    assert len(layout_chart(Chart("t", "ranks", "s", [ChartLine("l", points)], log_x=True)).curves[0].pieces) == 1


def test_a_single_point_is_drawn():
    assert len(layout_chart(chart(ChartLine("loss", [(3, 1.5)]))).curves[0].dots) == 1


def test_of_many_lines_some_are_drawn_and_each_group_is_named_once():
    lines = [
        ChartLine(f"{index}", [(0, index), (1, index)], group=("read", "written")[index % 2]) for index in range(80)
    ]
    found = layout_chart(chart(*lines))
    assert len(found.curves) == MAX_LINES
    assert [curve.label.text for curve in found.curves if curve.label] == ["read", "written"]


def test_a_name_without_room_is_in_a_legend_and_its_label_at_the_line():
    lines = [ChartLine(f"batch 1024 with warm-up of {n} epochs", [(0, n), (1, n)], label=f"{n}") for n in (1, 2)]
    found = layout_chart(chart(*lines))
    assert [curve.label.text for curve in found.curves] == ["1", "2"]
    assert found.legend == (("line-0", lines[0].name), ("line-1", lines[1].name))
    assert layout_chart(chart(*(ChartLine(name, [(0, 1), (1, 1)]) for name in ("read", "written")))).legend == ()
    assert layout_chart(chart(lines[0])).legend == ()


def test_dashed_lines_have_the_colour_of_their_group():
    lines = [ChartLine(f"{group}, {what}", [(0, 1), (1, 2)], group=group, label=group[0], is_dashed=what == "training")
             for group in ("1: batch 128 and on", "2: b") for what in ("validation", "training")]  # fmt: skip
    found = layout_chart(chart(*lines))
    assert [curve.style for curve in found.curves] == [
        "line-group line-0", "line-group line-0 line-dashed", "line-group line-1", "line-group line-1 line-dashed",
    ]  # fmt: skip
    assert [curve.label and curve.label.text for curve in found.curves] == ["1", None, "2", None]
    assert [name for _, name in found.legend] == ["1: batch 128 and on", "2: b"]


def test_a_dashed_line_without_a_group_has_its_own_colour_and_name():
    measured, further = ChartLine("measured", [(0, 1), (1, 2)]), ChartLine("further", [(1, 2), (2, 3)], is_dashed=True)
    found = layout_chart(chart(measured, further))
    assert [curve.style for curve in found.curves] == ["line-group line-0", "line-group line-1 line-dashed"]
    assert [curve.label.text for curve in found.curves] == ["measured", "further"]
    assert found.legend == ()
    long = layout_chart(chart(measured, replace(further, name="extrapolated by a power law", label="law")))
    assert [curve.label.text for curve in long.curves] == ["measured", "law"]
    assert [name for _, name in long.legend] == ["measured", "extrapolated by a power law"]


def matrix(num):
    return HeatMap(
        "m",
        [f"class {index}" for index in range(num)],
        [[int(r == c) * 9 + int(r < c) for c in range(num)] for r in range(num)],
    )


def test_a_small_matrix_names_classes_and_shows_counts():
    found = layout_heat_map(matrix(4))
    assert [name.text for name in found.names] == ["class 0", "class 1", "class 2", "class 3"]
    assert [square.text for square in found.squares] == ["9", "1", "1", "1", "9", "1", "1", "9", "1", "9"]
    assert found.squares[1].hint == "class 0 taken for class 1: 1 of 12, 8.3 %"
    assert sum(square.is_right for square in found.squares) == 4


def test_a_hundred_classes_are_a_few_paths():
    found = layout_heat_map(matrix(100))
    assert found.squares == () and len(found.shades) <= 20
    assert sum(shade.path.count("M") for shade in found.shades) == 100 * 101 // 2


def test_a_class_without_images_has_an_empty_row():
    assert layout_heat_map(HeatMap("m", ["a", "b"], [[0, 0], [1, 3]])).squares[0].y > 0


@pytest.mark.parametrize("level, ys, is_at_end", [(1.0, (1.0, 0.8), True), (0.5, (0.1, 0.9), False)])
def test_the_text_of_a_rule_is_where_neither_lines_nor_the_label_of_the_axis_are(level, ys, is_at_end):
    line = ChartLine("speed", tuple(enumerate(ys)))
    found = layout_chart(Chart("Speed", "ranks", "%", (line,), low=0.0, rule=(level, "ideal")))
    assert found.rule.x == pytest.approx(found.right - 4 if is_at_end else found.left + 4)
