"""Options of `paceline predict-scaling` that have no effect."""

from pathlib import Path
from typing import Any

import pytest

from paceline.cli.options import PredictScalingOptions
from paceline.cli.scale_options import refuse_prediction_options
from paceline.core.errors import RecipeError

CSV, RUN = Path("times.csv"), Path("runs/one")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"RUN: is missing \(name a run directory"),
        ({"points": CSV, "run": RUN}, r"--points: times\.csv and runs/one are both inputs \(leave one out\)"),
        ({"points": CSV, "network": "ndr"}, r"--network: ndr has no effect on a table \(leave it out"),
        ({"points": CSV, "fixed_s": 0.0}, r"--fixed-s: 0\.0 has no effect on a table"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=f"^{message}"):
        refuse_prediction_options(PredictScalingOptions(**options))
