"""Format a loss comparison of two trials as table cells."""

from typing import Final

from paceline.core.experiments.ladder import ParityResult
from paceline.report.blocks import Cell, Column
from paceline.report.sections import cells, intervals

# Columns of `parity_cells`.
PARITY: Final = (
    Column("loss below"),
    Column("loss"),
    Column("difference"),
    Column("tolerance"),
    Column("loss is", is_number=False),
    Column("why", is_number=False, is_wide=True),
)


def parity_cells(parity: ParityResult) -> list[Cell]:
    """Return both losses, their difference and tolerance, the outcome and its reason."""
    return [
        cells.loss(parity.loss_below),
        cells.loss(parity.loss),
        intervals.of_change(parity.gap),
        cells.of_share(parity.tolerance),
        cells.text(parity.verdict),
        intervals.sentence(parity.why),
    ]
