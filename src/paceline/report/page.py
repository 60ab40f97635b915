"""Assemble the report page of a run."""

from dataclasses import dataclass
from typing import Final

from paceline import __version__
from paceline.report.blocks import ReportPage
from paceline.report.run import RunData
from paceline.report.sections import overview
from paceline.report.sections.classes import classes_section
from paceline.report.sections.health import health_findings
from paceline.report.sections.learning import learning_section
from paceline.report.sections.origin import provenance_section
from paceline.report.sections.profile import profile_section
from paceline.report.sections.ranks import ranks_section
from paceline.report.sections.telemetry import telemetry_section
from paceline.report.sections.time import loader_section, time_section
from paceline.report.sections.upkeep import reliability_section


@dataclass(frozen=True)
class PageLimits:
    """Limits of a page: classes listed, and bytes of all thumbnails."""

    classes: int = 1000
    picture_bytes: int = 400_000


FULL_LIMITS: Final = PageLimits()


def build_run_page(run: RunData, limits: PageLimits = FULL_LIMITS) -> ReportPage:
    """Return the report of a run, its sections in the order of a reader's interest."""
    status, tone = overview.run_status(run)
    # `profile_section` returns None for a run that was not profiled.
    sections = [
        learning_section(run),
        time_section(run),
        loader_section(run),
        ranks_section(run),
        profile_section(run),
        telemetry_section(run),
        classes_section(run, max_classes=limits.classes, max_thumbnail_bytes=limits.picture_bytes),
        reliability_section(run),
        provenance_section(run),
    ]
    return ReportPage(
        title=run.name,
        subtitle=overview.run_subtitle(run),
        status=status,
        tone=tone,
        figures=overview.key_figures(run),
        verdict=overview.summarize_bottleneck(run),
        health=health_findings(run),
        notices=overview.run_notices(run),
        problems=run.problems,
        sections=[section for section in sections if section is not None],
        paceline=__version__,
    )
