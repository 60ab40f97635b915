"""What a run did, and where its time went, as one file: HTML, Markdown or JSON. It reads run directories only."""

from paceline.report.write import report_text, write_report

__all__ = ["report_text", "write_report"]
