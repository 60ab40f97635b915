"""Polling interval of a job that is followed."""

from types import SimpleNamespace

from paceline.cli.submit import _Backoff


def test_polling_slows_down_until_something_changes(monkeypatch):
    paused_s: list[float] = []
    monkeypatch.setattr("paceline.cli.submit.time", SimpleNamespace(sleep=paused_s.append))
    pause = _Backoff()
    for _ in range(12):
        pause()
    assert paused_s[:3] == [2, 3, 4.5] and max(paused_s) == paused_s[-1] == 30
    pause.reset()
    pause()
    assert paused_s[-1] == 2
