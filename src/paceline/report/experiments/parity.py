"""Whether two sides of a pair train alike, as cells of a table."""

from typing import Final

from paceline.core.experiments.ladder import ParityResult
from paceline.report.blocks import Cell, Column
from paceline.report.sections import cells, intervals

PARITY: Final = (
    Column("loss below"),
    Column("loss"),
    Column("difference"),
    Column("tolerance"),
    Column("loss is", is_number=False),
    Column("why", is_number=False, is_wide=True),
)
"""The headings of `parity_cells`."""


def parity_cells(found: ParityResult) -> list[Cell]:
    """Return both losses, how far they are apart and may be, what that says, and why."""
    return [
        cells.loss(found.loss_below),
        cells.loss(found.loss),
        intervals.of_change(found.gap),
        cells.of_share(found.tolerance),
        cells.text(found.verdict),
        intervals.sentence(found.why),
    ]
