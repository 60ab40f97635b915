"""The timeline of a run: what each process did at which time."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.report.document import BarChart, KeyValueList, Table
from paceline.report.read_run import FirstRecords, RunData, read_run
from paceline.report.series import downsample
from paceline.report.timeline_sections import timeline_section

BEGIN_S = 1000.0
KILLED = (
    {"event": "start", "started_s": BEGIN_S, "startup_s": 10.0, "from_step": 0, "trained_s": 0.0, "world_size": 2},
    {"event": "end", "ended_s": BEGIN_S + 50, "step": 40, "trained_s": 40.0, "how": "killed"},
)
RESUMED = (
    {
        "event": "start",
        "started_s": BEGIN_S + 70,
        "startup_s": 5.0,
        "from_step": 30,
        "trained_s": 30.0,
        "world_size": 1,
    },
    {"event": "end", "ended_s": BEGIN_S + 100, "step": 55, "trained_s": 55.0, "how": "target_reached"},
)
PAUSES = (
    {"name": "evaluate", "step": 20, "unix_s": BEGIN_S + 30, "pause_s": 4.0},
    {"name": "checkpoint", "step": 30, "unix_s": BEGIN_S + 40, "pause_s": 0.001},
)


def records(*rows) -> FirstRecords:
    return FirstRecords(rows, len(rows))


def run_of(*attempts, pauses=PAUSES, **fields) -> RunData:
    return RunData(Path("run"), attempts=records(*attempts), pauses=records(*pauses), **fields)


def blocks_of(run, kind):
    section = timeline_section(run)
    assert section is not None
    return [block for block in section.blocks if isinstance(block, kind)]


def drawn(run) -> list[list[tuple[str, float]]]:
    """Return the segments of each row, with their ends in seconds."""
    (chart,) = blocks_of(run, BarChart)
    rows = []
    for row in chart.rows:
        at, ends = 0.0, []
        for part in row.parts:
            at += 100 * part.share
            ends.append((part.colour.removeprefix("c-"), round(at)))
        rows.append(ends)
    return rows


def test_a_run_without_attempts_has_no_timeline() -> None:
    assert timeline_section(RunData(Path("run"))) is None


def test_the_step_that_unfreezes_layers_is_marked() -> None:
    pause = {"name": "unfreeze", "step": 20, "unix_s": BEGIN_S + 30, "pause_s": 0.002}
    run = run_of(*KILLED, pauses=(pause,))
    assert ("unfreeze", 60) in drawn(run)[0]
    assert any("unfreezings" in str(block.rows) for block in blocks_of(run, KeyValueList))


def test_each_process_is_a_row_of_what_it_did() -> None:
    first, second = drawn(run_of(*KILLED, *RESUMED))
    assert first == [
        ("start-up", 10), ("useful", 30), ("evaluate", 34), ("useful", 40), ("checkpoint", 40), ("rework", 50)
    ]  # fmt: skip
    assert second == [("none", 50), ("down", 70), ("start-up", 75), ("useful", 100)]


def test_the_table_has_the_processes_and_the_pauses_are_added_up() -> None:
    run = run_of(*KILLED, *RESUMED)
    (table,) = blocks_of(run, Table)
    assert [row[-1].text for row in table.rows] == ["killed at step 40", "target reached at step 55"]
    assert [row[-2].value for row in table.rows] == [50.0, 30.0]
    (facts,) = blocks_of(run, KeyValueList)
    assert [(name, cell.value) for name, cell in facts.rows] == [("evaluations", 4.0), ("checkpoints", 0.001)]


def test_slow_steps_are_marked_in_the_process_that_made_them() -> None:
    rates = {5: 100.0, 10: 100.0, 15: 20.0, 20: 100.0, 25: 100.0, 35: 30.0, 40: 100.0}
    steps = downsample([{"step": at, "trained_s": float(at), "images_per_s": rate} for at, rate in rates.items()])
    first, second = drawn(run_of(*KILLED, *RESUMED, pauses=(), steps=steps))
    assert first[1:4] == [("useful", 20), ("wrong", 25), ("useful", 40)]
    assert [kind for kind, _ in second].count("wrong") == 0  # no step between 25 and 35 was logged by one process


def test_a_process_without_an_end_lasts_until_it_was_last_heard_of() -> None:
    steps = downsample([{"step": 10, "trained_s": 15.0, "images_per_s": 1.0}])
    (row,) = drawn(run_of(KILLED[0], pauses=(), steps=steps))
    (chart,) = blocks_of(run_of(KILLED[0], pauses=(), steps=steps), BarChart)
    assert len(row) == 2 and chart.scale[-1] == "25.0 s" and chart.rows[0].text == "no end recorded"


@pytest.mark.parametrize("value", [None, "x", math.inf, math.nan, -1e30, 1e30, [], {}, True])
def test_records_of_another_form_are_no_error(value) -> None:
    for index in range(2):
        for key in ("started_s", "startup_s", "ended_s", "step", "from_step", "trained_s", "world_size", "how"):
            rows = [dict(each) for each in (*KILLED, *RESUMED)]
            rows[index][key] = value
            timeline_section(run_of(*rows))
    for key in ("name", "unix_s", "pause_s"):
        timeline_section(run_of(*KILLED, pauses=({**PAUSES[0], key: value},)))


def test_thousands_of_pauses_stay_a_short_row(runs, tmp_path) -> None:
    rundir = runs.write_run(tmp_path / "run", runs.SMALL)
    pauses = [
        {"name": "evaluate", "step": 1, "unix_s": runs.BEGIN_S + each / 100, "pause_s": 0.001} for each in range(9999)
    ]
    rundir.pauses.write_text("".join(f"{json.dumps(each)}\n" for each in pauses))
    run = read_run(rundir)
    assert run.pauses.total == 9999
    (chart,) = blocks_of(replace(run), BarChart)
    assert all(len(row.parts) <= 300 for row in chart.rows)
