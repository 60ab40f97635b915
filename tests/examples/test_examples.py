"""Each example runs as it stands, and the table that it prints accounts for all of its time."""

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
ROUNDING_S = 0.0005
"""Of each number, as the table has three decimals."""


@pytest.fixture(scope="module", params=["plain_loop", "lightning_callback", "accelerate_loop"])
def told(request, forking, tmp_path_factory) -> tuple[str, dict[str, float]]:
    """Return the name of an example, and the seconds of each row of its table."""
    library = request.param.partition("_")[0]
    if find_spec("torch" if library == "plain" else library) is None:
        pytest.skip(f"{library} is not installed (pip install {library})")
    script = EXAMPLES / f"{request.param}.py"
    process = forking.start([str(script)], tmp_path_factory.mktemp(library), {**os.environ, "COLUMNS": "120"})
    out, err = process.communicate()
    assert process.returncode == 0, err
    table = out[out.index("\nstage ") :]
    rows = re.findall(r"^(\S.*?) {2,}(-?\d+\.\d{3})\b", table, re.MULTILINE)
    return request.param, {name: float(seconds) for name, seconds in rows}


def total(rows: dict[str, float]) -> str:
    return next(name for name in rows if name.endswith("counted steps"))


def stages(rows: dict[str, float]) -> dict[str, float]:
    names = list(rows)
    return {name: rows[name] for name in names[: names.index("residual")]}


def test_the_steps_of_both_epochs_are_counted_but_for_the_warm_up(told) -> None:
    _, rows = told
    assert total(rows) == "= 37 counted steps"  # two epochs of 20, less 3


def test_stages_and_what_none_covers_are_the_counted_steps(told) -> None:
    _, rows = told
    parts = [*stages(rows).values(), rows["residual"]]
    assert sum(parts) == pytest.approx(rows[total(rows)], abs=ROUNDING_S * (len(parts) + 1))
    assert 0 <= rows["residual"] < 0.2 * rows[total(rows)]  # what Lightning and Accelerate do between their stages


def test_steps_warm_up_pauses_and_the_rest_are_the_wall_clock(told) -> None:
    _, rows = told
    pauses = [name for name in rows if name.startswith("pause: ")]
    assert sorted(pauses) == ["pause: epoch_boundary", "pause: evaluate"]
    parts = [rows[name] for name in (total(rows), "warm-up", *pauses, "after the last step")]
    assert sum(parts) == pytest.approx(rows["= wall clock"], abs=ROUNDING_S * (len(parts) + 1))
    assert all(part > 0 for part in parts[:-1])


def test_what_each_example_is_made_to_spend_its_time_in_is_what_the_table_says(told) -> None:
    """Images that take 2 ms each; or layers of a million weights, with images that are there at once."""
    name, rows = told
    spent = stages(rows)
    if name == "plain_loop":
        assert spent["data_wait"] >= 37 * 16 * 0.002 - 0.001
        assert spent["data_wait"] == max(spent.values())
    else:
        assert {"forward", "backward"} == set(sorted(spent, key=spent.__getitem__)[-2:])
        assert spent["forward"] + spent["backward"] > 0.5 * rows[total(rows)]
