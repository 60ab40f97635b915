"""Format a loss comparison of two trials as table cells."""

from typing import Final

from paceline.core.experiments.ladder import ParityResult
from paceline.report.blocks import TableCell, TableColumn
from paceline.report.sections import cells, intervals

# Columns of `parity_cells`.
PARITY_COLUMNS: Final = (
    TableColumn("loss below"),
    TableColumn("loss"),
    TableColumn("difference"),
    TableColumn("tolerance"),
    TableColumn("loss is", is_number=False),
    TableColumn("why", is_number=False, is_wide=True),
)


def parity_cells(parity: ParityResult) -> list[TableCell]:
    """Return both losses, their difference and tolerance, the outcome and its reason."""
    return [
        cells.loss_cell(parity.loss_below),
        cells.loss_cell(parity.loss),
        intervals.change_interval_cell(parity.gap),
        cells.share_cell(parity.tolerance),
        cells.text_cell(parity.verdict),
        intervals.sentence_cell(parity.why),
    ]
