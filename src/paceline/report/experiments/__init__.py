"""What the lab's experiments came to, as tables to paste and as pages. It reads results only, and judges nothing."""

from paceline.report.experiments.tables import write_tables

__all__ = ["write_tables"]
