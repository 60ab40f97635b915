"""The CPU time of a watched command is measured beside it, and never in its way."""

from types import SimpleNamespace

from paceline.watch.command_cpu import CommandCpu


def test_cpu_time_that_cannot_be_read_ends_nothing(monkeypatch):
    meter = CommandCpu()
    monkeypatch.setattr(meter, "_timer", SimpleNamespace())  # has no `read`
    meter.update()
    assert meter.result is None
