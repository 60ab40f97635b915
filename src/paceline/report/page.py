"""Assemble the report page of a run."""

from dataclasses import dataclass
from typing import Final

from paceline import __version__
from paceline.report.blocks import Page
from paceline.report.run import Run
from paceline.report.sections import overview
from paceline.report.sections.classes import classes
from paceline.report.sections.health import health
from paceline.report.sections.learning import learning
from paceline.report.sections.origin import origin
from paceline.report.sections.profile import profile
from paceline.report.sections.ranks import ranks
from paceline.report.sections.telemetry import telemetry
from paceline.report.sections.time import loader, time
from paceline.report.sections.upkeep import upkeep


@dataclass(frozen=True)
class Limits:
    """Limits of a page: classes listed, and bytes of all thumbnails."""

    classes: int = 1000
    picture_bytes: int = 400_000


FULL: Final = Limits()


def build_page(run: Run, limits: Limits = FULL) -> Page:
    """Return the report of a run, its sections in the order of a reader's interest."""
    status, tone = overview.status(run)
    # `profile` returns None for a run that was not profiled.
    sections = [
        learning(run),
        time(run),
        loader(run),
        ranks(run),
        profile(run),
        telemetry(run),
        classes(run, max_classes=limits.classes, max_picture_bytes=limits.picture_bytes),
        upkeep(run),
        origin(run),
    ]
    return Page(
        title=run.name,
        subtitle=overview.subtitle(run),
        status=status,
        tone=tone,
        figures=overview.figures(run),
        verdict=overview.verdict(run),
        health=health(run),
        notices=overview.notices(run),
        problems=run.problems,
        sections=[section for section in sections if section is not None],
        paceline=__version__,
    )
