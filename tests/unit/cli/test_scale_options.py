"""`paceline scale` answers four questions, and hears no option in vain."""

from pathlib import Path
from typing import Any

import pytest

from paceline.cli.scale_options import scale
from paceline.core.errors import RecipeError

CSV, RUN = Path("times.csv"), "runs/one"


@pytest.fixture
def calls_by_mode(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, ...]]:
    """Return the calls of each mode, which do nothing."""
    calls: dict[str, tuple[Any, ...]] = {}
    for module, name in (
        ("scale", "scale"),
        ("scale_predict", "predict_points"),
        ("scale_predict", "predict_run"),
        ("allreduce", "time_allreduce"),
    ):

        def answer(*args: Any, _name: str = name, **options: Any) -> int:
            calls[_name] = (args, options)
            return 0

        monkeypatch.setattr(f"paceline.cli.{module}.{name}", answer)
    return calls


def test_each_mode_gets_the_options_given(calls_by_mode: dict[str, tuple[Any, ...]]) -> None:
    assert scale(["digits", "seed=1"], ranks="1,2", mode="strong", task=3, as_json=True) == 0
    assert scale(predict=True, points=CSV, at="64", rank_batch=128) == 0
    assert scale([RUN], predict=True, network="ndr", epochs=2.0, run_dir=CSV) == 0
    assert scale(collective=True, ranks="2", out=Path("net.json")) == 0
    (words,), options = calls_by_mode["scale"]
    assert words == ["digits", "seed=1"] and options["ranks"] == "1,2" and options["mode"] == "strong"
    assert options["task"] == 3
    assert options["as_json"] and options["accuracy"] is False and options["nodes"] is None and "at" not in options
    assert calls_by_mode["predict_points"] == ((CSV,), {"at": "64", "rank_batch": 128, "as_json": False})
    (run,), options = calls_by_mode["predict_run"]
    assert run == Path(RUN) and options["network"] == "ndr" and options["epochs"] == 2.0
    assert "at" not in options and options["run_dir"] == CSV
    assert calls_by_mode["time_allreduce"] == (("2", Path("net.json")), {"as_json": False, "oversubscribe": False})


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
def test_options_without_effect_are_refused(
    calls_by_mode: dict[str, tuple[Any, ...]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=f"^{message}"):
        scale(**options)
    assert not calls_by_mode
