"""Axes, charts and confusion matrices as geometry: everything stands inside its drawing and where it belongs."""

import re
from itertools import pairwise

import pytest

from paceline.report.axis import axis
from paceline.report.blocks import Chart, HeatMap, Line
from paceline.report.heat import grid
from paceline.report.plot import HEIGHT, MAX_LINES, WIDTH, plot


@pytest.mark.parametrize(
    "low, high, texts",
    [(0, 100, ["0", "20", "40", "60", "80", "100"]), (0, 3.1, ["0", "1", "2", "3", "4"]),
     (0.86, 0.93, ["0.86", "0.88", "0.90", "0.92", "0.94"]),
     (0, 2713, ["0", "1,000", "2,000", "3,000"]), (5, 5, ["5", "6", "7", "8", "9", "10"]),
     (0, 0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
     (0, 4e-7, ["0", "1e-7", "2e-7", "3e-7", "4e-7"]), (-1, 1, ["-1.0", "-0.5", "0.0", "0.5", "1.0"])],
)  # fmt: skip
def test_ticks_are_round_numbers_over_all_values(low, high, texts):
    found = axis(low, high)
    assert [text for _, text in found.ticks] == texts
    assert found.low <= low and found.high >= high


@pytest.mark.parametrize(
    "low, high", [(0, 1e-300), (0, 1e300), (-1e9, 1e9), (1e15, 1e15 + 4), (0, 5e-324), (-5e-324, 0), (-5e-324, -5e-324)]
)
def test_an_axis_over_any_numbers_has_a_few_ticks(low, high):
    assert 2 <= len(axis(low, high).ticks) <= 12


def test_a_tight_axis_ends_with_its_values():
    found = axis(0.0, 12.3, is_tight=True)
    assert (found.low, found.high) == (0.0, 12.3)
    assert [text for _, text in found.ticks] == ["0", "5", "10"]


def chart(*lines, **more):
    return Chart("Loss", "epoch", "cross-entropy", lines, **more)


def numbers_of(found):
    return [
        float(number) for curve in found.curves for piece in curve.pieces for number in re.findall(r"[-\d.]+", piece)
    ]


def test_lines_and_names_stay_inside_the_drawing():
    lines = [Line(f"a line of {index}", [(x, x * index) for x in range(1000)]) for index in range(4)]
    found = plot(chart(*lines))
    xs, ys = numbers_of(found)[::2], numbers_of(found)[1::2]
    assert len(xs) <= 2000 and min(xs) >= found.left and max(xs) <= found.right < WIDTH - 60
    assert min(ys) >= found.top and max(ys) <= found.bottom < HEIGHT
    labels = sorted(curve.label.y for curve in found.curves)
    assert all(after - before >= 13 for before, after in pairwise(labels))


def test_measurements_are_marked_and_tell_their_value():
    found = plot(chart(Line("validation", [(1, 0.5), (2, 0.25)], marked=True)))
    assert [dot.text for dot in found.curves[0].dots] == ["epoch 1: validation 0.5000", "epoch 2: validation 0.2500"]
    assert found.hints == () and found.curves[0].label is None


def test_long_lines_tell_their_values_in_strips_that_cover_the_chart():
    found = plot(chart(Line("training", [(x, 2 * x) for x in range(500)])))
    assert 50 <= len(found.hints) <= 61
    assert found.hints[0].x == found.left
    assert sum(hint.width for hint in found.hints) == pytest.approx(found.right - found.left)  # sums of floats
    assert found.hints[0].text == "epoch 0: training 0"


def test_a_pause_breaks_the_line():
    points = [(x, 1.0) for x in [*range(20), *range(100, 120)]]
    assert len(plot(chart(Line("cpu", points))).curves[0].pieces) == 2


def test_a_single_point_is_drawn():
    assert len(plot(chart(Line("loss", [(3, 1.5)]))).curves[0].dots) == 1


def test_of_many_lines_some_are_drawn_and_each_group_is_named_once():
    lines = [Line(f"{index}", [(0, index), (1, index)], group=("read", "written")[index % 2]) for index in range(80)]
    found = plot(chart(*lines))
    assert len(found.curves) == MAX_LINES
    assert [curve.label.text for curve in found.curves if curve.label] == ["read", "written"]


def matrix(num):
    return HeatMap(
        "m",
        [f"class {index}" for index in range(num)],
        [[int(r == c) * 9 + int(r < c) for c in range(num)] for r in range(num)],
    )


def test_each_class_of_a_few_is_named_and_each_count_told():
    found = grid(matrix(4))
    assert [name.text for name in found.names] == ["class 0", "class 1", "class 2", "class 3"]
    assert [square.text for square in found.squares] == ["9", "1", "1", "1", "9", "1", "1", "9", "1", "9"]
    assert found.squares[1].hint == "class 0 taken for class 1: 1 of 12, 8.3 %"
    assert sum(square.is_right for square in found.squares) == 4


def test_a_hundred_classes_are_a_few_paths():
    found = grid(matrix(100))
    assert found.squares == () and len(found.shades) <= 20
    assert sum(shade.path.count("M") for shade in found.shades) == 100 * 101 // 2


def test_a_class_without_images_has_an_empty_row():
    assert grid(HeatMap("m", ["a", "b"], [[0, 0], [1, 3]])).squares[0].y > 0
