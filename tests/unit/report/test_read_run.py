"""Long files are parsed in part: evenly, with their first and last record."""

import json
from itertools import pairwise

import pytest

from paceline.report.read_run import TolerantReader
from paceline.report.write import render_report

MAX = 200


@pytest.fixture
def read(tmp_path):
    """Return a function from the text of a file to the numbers of the records that are read, and the problems."""

    def sample(text):
        path = tmp_path / "steps.jsonl"
        path.write_bytes(text)
        reader = TolerantReader()
        records, is_sample = reader.read_sample(path, MAX)
        return [record["n"] for record in records], is_sample, reader.problems

    return sample


def lines(num, pad=""):
    return b"".join(json.dumps({"n": index, "pad": pad}).encode() + b"\n" for index in range(num))


@pytest.mark.parametrize("num", [1, MAX, 2 * MAX])
def test_a_file_that_is_not_long_is_read_whole(read, num):
    assert read(lines(num)) == (list(range(num)), False, [])


@pytest.mark.parametrize("num", [5000, 98_765])
def test_of_a_long_file_evenly_spaced_records_are_read_with_the_first_and_the_last(read, num):
    found, is_sample, problems = read(lines(num))
    assert is_sample and problems == []
    assert (found[0], found[-1]) == (0, num - 1) and 0.95 * MAX <= len(found) <= MAX
    assert len({after - before for before, after in pairwise(found[:-1])}) == 1


def test_an_incomplete_record_is_skipped(read):
    found, is_sample, problems = read(lines(5000) + b'{"n": 5000, "pa')
    assert is_sample and found[-1] == 4999 and problems == []


def test_a_long_file_with_a_giant_line_is_read_around_it(read):
    """A line of 3 MB is never read at once."""
    found, is_sample, _ = read(lines(5000) + lines(1, "x" * 3_000_000) + lines(5000))
    assert is_sample and found[0] == 0 and found[-1] == 4999 and len(found) < MAX


def test_damaged_lines_of_a_long_file_are_counted(read):
    found, _, problems = read(lines(5000) + b"x" * 30 + b"\n" + b"y\n" * 60_000 + lines(1))
    assert found[0] == 0 and found[-1] == 0
    assert len(problems) == 1 and problems[0].endswith("lines are not records and were skipped")


def test_the_page_of_a_long_run_notes_the_sample_and_has_its_end(runs, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.report.read_run._MAX_STEPS", 2000)
    monkeypatch.setattr("paceline.report.read_run._MAX_SAMPLES_PER_NODE", 250)
    rundir = runs.write_run(tmp_path / "run", runs.Shape(steps=3, samples=3, gpus=8))
    for path, num, key, first in ((rundir.steps, 5000, "step", 1), (rundir.telemetry(0), 1100, "unix_s", 0)):
        row = json.loads(path.read_text().splitlines()[0])
        with path.open("w") as file:
            file.writelines(json.dumps({**row, key: first + index}) + "\n" for index in range(num))
    text = render_report(rundir, "md")
    assert "steps.jsonl is long: paceline read 1,668 of the logged steps" in text
    assert "Telemetry is long: paceline read at most 221 samples per node" in text
    data = json.loads(render_report(rundir, "json"))
    for series in (data["steps"], data["telemetry"][0]):
        assert series["is_sample"] and series["records"] <= 2000 and len(series["points"]) <= 500
    ends = data["telemetry"][0]["points"]
    assert (ends[0]["unix_s"], ends[-1]["unix_s"]) == (0, 1099)
