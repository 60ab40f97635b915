"""`paceline scale` answers four questions, and hears no option in vain."""

from pathlib import Path
from typing import Any

import pytest

from paceline.cli.options import ScaleOptions
from paceline.cli.scale_options import ScaleMode, select_mode
from paceline.core.errors import RecipeError

CSV, RUN = Path("times.csv"), "runs/one"


def test_each_mode_is_selected_by_its_options() -> None:
    assert select_mode(ScaleOptions(args=["digits", "seed=1"], ranks="1,2", mode="strong", task=3)) == ScaleMode.RANKS
    assert select_mode(ScaleOptions(predict=True, points=CSV, at="64", rank_batch=128)) == ScaleMode.POINTS
    assert select_mode(ScaleOptions(args=[RUN], predict=True, network="ndr", epochs=2.0)) == ScaleMode.RUN
    assert select_mode(ScaleOptions(collective=True, ranks="2", out=Path("net.json"))) == ScaleMode.COLLECTIVE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"points": CSV}, r"--points: times\.csv is input for a prediction \(add --predict\)"),
        ({"predict": True}, r"--predict: needs a run \(write "),
        ({"predict": True, "args": [RUN, "seed=1"]}, r"--predict: needs a run \(write "),
        ({"predict": True, "points": CSV, "args": [RUN]}, r"--points: times\.csv and runs/one are both .*leave one"),
        ({"collective": True, "args": [RUN]}, r"--collective: times all-reduces, .*\(leave those out\)"),
        (
            {"predict": True, "args": [RUN], "task": 1},
            r"--task: 1 has no effect in this mode \(leave it out; it is for m",
        ),
        (
            {"at": "8"},
            r"--at: 8 has no effect in this mode \(leave it out; it is for --predict --points or --predict RUN\)",
        ),
        ({"predict": True, "points": CSV, "network": "ndr"}, r"--network: ndr has no effect in this mode"),
        ({"predict": True, "args": [RUN], "accuracy": True}, r"--accuracy: True has no effect in this mode"),
        ({"collective": True, "steps": 4}, r"--steps: 4 has no effect in this mode"),
        ({"out": CSV}, r"--out: times\.csv has no effect in this mode \(leave it out; it is for --collective\)"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=f"^{message}"):
        select_mode(ScaleOptions(**options))
