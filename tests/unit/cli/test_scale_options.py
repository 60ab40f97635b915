"""Options of `paceline predict-scaling` that have no effect, and command lines from before `scale` was split."""

from pathlib import Path
from typing import Any

import pytest

from paceline.cli.old_spellings import rewrite_scale
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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("scale --predict --points a.csv --at 8", "predict-scaling --points a.csv --at 8"),
        ("scale runs/one --predict --network=ndr", "predict-scaling runs/one --network=ndr"),
        ("scale --collective --ranks 2 --out net.json", "allreduce --ranks 2 --out net.json"),
        ("scale digits --batch-sizes=64,128", "batch-study digits --batch-sizes=64,128"),
        ("submit scale digits --nodes 2 -- --warmups 0ep", "submit batch-study digits --nodes 2 -- --warmups 0ep"),
    ],
)
def test_an_old_spelling_is_rewritten_with_a_note(old: str, new: str) -> None:
    words, note = rewrite_scale(old.split())
    assert words == new.split()
    assert note.startswith("note: ") and new.removeprefix("submit ").split()[0] in note


@pytest.mark.parametrize("line", ["scale digits --ranks 1,2", "train scale --predict", "", "submit digits"])
def test_other_command_lines_stay(line: str) -> None:
    assert rewrite_scale(line.split()) == (line.split(), "")
