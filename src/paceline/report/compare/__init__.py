"""Which of several runs is better, and by what: it reads run directories only."""

from paceline.report.compare.judge import compare_runs
from paceline.report.compare.page import build_page
from paceline.report.compare.read import Trained, read_trained
from paceline.report.compare.result import CompareResult, GroupResult

__all__ = ["CompareResult", "GroupResult", "Trained", "build_page", "compare_runs", "read_trained"]
