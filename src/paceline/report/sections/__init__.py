"""Sections of a run report: functions from a `RunData` to blocks, without HTML."""
