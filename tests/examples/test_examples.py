"""Each example runs unchanged, and the table that it prints attributes all of its time."""

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
ROUNDING_S = 0.0005
"""Rounding of each number, as the table has three decimals."""


@pytest.fixture(scope="module", params=["plain_loop", "lightning_callback", "accelerate_loop"])
def example_table(request, forking, tmp_path_factory) -> tuple[str, dict[str, float]]:
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
    return next(name for name in rows if name.endswith("measured steps"))


def stages(rows: dict[str, float]) -> dict[str, float]:
    names = list(rows)
    return {name: rows[name] for name in names[: names.index("residual")]}


def test_the_steps_of_both_epochs_after_the_warm_up_are_counted(example_table) -> None:
    _, rows = example_table
    assert total(rows) == "= 37 measured steps"  # two epochs of 20, minus 3


def test_stages_and_residual_add_up_to_the_counted_steps(example_table) -> None:
    _, rows = example_table
    parts = [*stages(rows).values(), rows["residual"]]
    assert sum(parts) == pytest.approx(rows[total(rows)], abs=ROUNDING_S * (len(parts) + 1))
    assert 0 <= rows["residual"] < 0.2 * rows[total(rows)]  # work of Lightning and Accelerate between their stages


def test_steps_warm_up_pauses_and_the_rest_add_up_to_the_wall_clock(example_table) -> None:
    _, rows = example_table
    pauses = [name for name in rows if name.startswith("pause: ")]
    assert sorted(pauses) == ["pause: epoch_boundary", "pause: evaluate"]
    parts = [rows[name] for name in (total(rows), "warm-up", *pauses, "after the last step")]
    assert sum(parts) == pytest.approx(rows["= wall clock"], abs=ROUNDING_S * (len(parts) + 1))
    assert all(part > 0 for part in parts[:-1])


def test_the_slowest_stage_of_each_example_is_in_its_table(example_table) -> None:
    """Either each image takes 2 ms to load, or layers have a million weights and images need no loading."""
    name, rows = example_table
    spent = stages(rows)
    if name == "plain_loop":
        assert spent["data_wait"] >= 37 * 16 * 0.002 - 0.001
        assert spent["data_wait"] == max(spent.values())
    else:
        assert {"forward", "backward"} == set(sorted(spent, key=spent.__getitem__)[-2:])
        assert spent["forward"] + spent["backward"] > 0.5 * rows[total(rows)]
