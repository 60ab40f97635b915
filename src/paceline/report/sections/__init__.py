"""Sections of a run report: functions from a `Run` to blocks, without HTML."""
