"""The page of a quote: its rows in the order of a decision, and the chart of few GPUs."""

import importlib.util
import math
import re
from pathlib import Path

import pytest

from paceline.report.document import Chart, ChartRow, ReportPage, Table
from paceline.report.quote_page import build_quote_page
from paceline.report.render import render_html, render_markdown


@pytest.fixture(scope="module")
def quoted():
    path = Path(__file__).with_name("quoted.py")
    spec = importlib.util.spec_from_file_location("quoted", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_table(page: ReportPage) -> Table:
    (table,) = [each for section in page.sections for each in section.blocks if getattr(each, "title", "") == "Plans"]
    return table


def find_chart(page: ReportPage) -> Chart | None:
    charts = [
        chart
        for section in page.sections
        for each in section.blocks
        if isinstance(each, ChartRow)
        for chart in each.charts
    ]
    return charts[0] if charts else None


def test_the_chosen_plan_is_first_and_what_does_not_fit_is_last(quoted) -> None:
    table = find_table(build_quote_page(quoted.priced_result()))
    names = [(row[0].text, row[0].note) for row in table.rows]
    assert names[0][1] == "spot" and names[-1][0] == "1 x v100"
    assert names[1:3] == [("8 x t4", ""), ("1 x t4", "")]  # likely in time, of one cost
    assert "too much" in table.rows[-1][-2].note and "waits for data" in table.rows[0][-3].note
    assert [column.title for column in table.columns][3:5] == ["within 24 h", "for USD 14"]
    assert [cell.text for cell in table.rows[1][3:5]] == ["likely", "yes"]


def test_the_chart_has_the_gpus_of_the_best_plans_with_their_intervals(quoted) -> None:
    result = quoted.priced_result()
    chart = find_chart(build_quote_page(result))
    assert chart is not None and [line.name for line in chart.lines[1:]] == ["t4", "l4", "a100"]
    t4 = chart.lines[1]
    assert t4.points == [(5.0, 11.0), (40.0, 11.0)]
    assert t4.bounds[5.0, 11.0] == pytest.approx((8.8, 13.2))
    assert chart.rule is not None and chart.rule[0] == 14.0 and "budget" in chart.note


def test_without_prices_there_are_gpu_hours_and_no_cost(quoted) -> None:
    page = build_quote_page(quoted.quote_result(quoted.quoted_plan("t4", 8, 3.0), quoted.quoted_plan("l4", 1, 10.0)))
    chart = find_chart(page)
    assert chart is not None and chart.y_label.startswith("GPU-hours")
    assert chart.lines[0].points == [(3.0, 24.0)]
    assert "cost" not in " ".join(column.title for column in find_table(page).columns)


def test_a_plan_that_never_ends_has_a_row_and_no_point(quoted) -> None:
    never = quoted.quoted_plan("t4", 8, math.inf, math.inf)
    page = build_quote_page(quoted.quote_result(never, chosen=None, currency="USD"))
    assert find_chart(page) is None and page.tone == "bad"
    assert find_table(page).rows[0][1].text == "never"
    texts = [text for row in find_table(page).rows for cell in row for text in (cell.text, cell.note)]
    assert "without end" in texts and not any("inf" in text for text in texts)
    assert "never" in render_html(page)


def test_a_free_gpu_has_no_place_on_a_log_axis(quoted) -> None:
    page = build_quote_page(quoted.quote_result(quoted.quoted_plan("t4", 8, 3.0, 0.0), currency="USD"))
    assert find_chart(page) is None


def test_names_are_escaped_in_every_format(quoted) -> None:
    page = build_quote_page(quoted.priced_result())
    html = render_html(page)
    assert "<script>window.hacked" not in html and "window.hacked=1" in html
    assert re.search(r"paceline quote made", html)
    assert "likely" in render_markdown(page)
