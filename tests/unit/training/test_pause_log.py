"""`pauses.jsonl`: a line per pause, even if it ends in an error, and none on a full disk."""

import json

import pytest

from paceline.training.pause_log import build_pause_log, no_log


def test_a_pause_is_logged_with_its_begin_and_length(tmp_path):
    times = iter([100.0, 102.5, 200.0, 201.0])
    log = build_pause_log(tmp_path / "pauses.jsonl", lambda: next(times))
    with log("evaluate", 7):
        pass
    with pytest.raises(RuntimeError), log("checkpoint", 9):
        raise RuntimeError
    rows = [json.loads(line) for line in (tmp_path / "pauses.jsonl").read_text().splitlines()]
    assert rows == [
        {"name": "evaluate", "step": 7, "unix_s": 100.0, "pause_s": 2.5},
        {"name": "checkpoint", "step": 9, "unix_s": 200.0, "pause_s": 1.0},
    ]


def test_a_disk_that_refuses_the_line_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    with build_pause_log(tmp_path / "file" / "pauses.jsonl")("evaluate", 1):
        pass
    with no_log("evaluate", 1):
        pass
