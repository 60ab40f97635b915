"""Differences are put back one at a time, and each gets its share of the gap."""

import pytest

from paceline.core.watch_result import WatchResult
from paceline.lab.why_rerun import (
    NotMeasuredError,
    find_masked_argument,
    find_recipe_changes,
    find_script_changes,
    list_left,
    measure_changes,
    replace_arguments,
    replace_variables,
)
from paceline.recipe.load import Patch, load

FACTORS = {"slow": 2.0, "slower": 1.5, "nothing": 1.0}
CHANGES = [(name,) for name in FACTORS]


def measure(changes):
    factor = 1.0
    for (name,) in changes:
        factor *= FACTORS[name]
    return factor


def test_each_difference_gets_its_share_of_the_gap():
    seen = []
    result = measure_changes(
        measure, CHANGES, ["version.torch"], ratio=4.0, steps=5, repeats=3, report=lambda line: seen.append(line)
    )
    shares = {each.differences: each.share for each in result.rows}
    assert shares == pytest.approx({("slow",): 0.5, ("slower",): 0.2925, ("nothing",): 0.0}, abs=1e-3)
    assert result.whole.differences == tuple(FACTORS)
    assert result.whole.share == pytest.approx(0.7925, abs=1e-3)
    assert result.left == ("version.torch",)
    assert [line.rpartition(": ")[2] for line in seen[:2]] == ["the first run", "slow"]
    assert seen[5].endswith("slow, slower, nothing")  # every other turn runs backwards


def test_a_difference_that_cannot_run_leaves_the_others():
    def fail(changes):
        if ("slow",) in changes:
            raise NotMeasuredError("out of memory")
        return measure(changes)

    result = measure_changes(fail, CHANGES, [], ratio=4.0, steps=5, repeats=2, report=lambda line: None)
    assert [each.error for each in result.rows] == ["out of memory", "", ""]
    assert result.rows[1].ratio.value == pytest.approx(1.5)


def test_a_first_run_that_fails_ends_it():
    def fail(changes):
        raise NotMeasuredError("no steps")

    with pytest.raises(NotMeasuredError, match="no steps"):
        measure_changes(fail, CHANGES, [], ratio=2.0, steps=5, repeats=2, report=lambda line: None)


def test_arguments_are_replaced_added_and_removed():
    ours = ["python", "train.py", "data", "--lr", "0.1", "--workers=4", "--amp"]
    theirs = ["python", "train.py", "data", "--lr", "0.2", "--workers=0", "--ema"]
    assert replace_arguments(ours, theirs, ["--workers"]) == [*ours[:5], "--workers=0", "--amp"]
    assert replace_arguments(ours, theirs, ["--amp", "--ema"]) == [*ours[:6], "--ema"]


def test_words_of_a_launcher_stay():
    launch = ["torchrun", "--nproc_per_node", "2", "--set", "a"]
    ours = [*launch, "train.py", "--set", "b", "--x", "--set", "c", "--lr", "1"]
    theirs = ["torchrun", "--nproc_per_node", "4", "train.py", "--lr", "2"]
    assert replace_arguments(ours, theirs, []) == ours
    changed = replace_arguments(ours, theirs, ["--lr"])
    assert changed[:6] == ours[:6]
    assert changed[-2:] == ["--lr", "2"]
    assert replace_arguments(ours, theirs, ["--nproc_per_node"])[:6] == ours[:6]


def watched(*words, **setup):
    verdict = {"bottleneck": "unknown", "evidence": ""}
    return WatchResult(paceline="1", command=("python", "train.py", *words), exit_code=0, verdict=verdict, setup=setup)


def test_what_can_be_put_back_of_a_script():
    first, second = watched("--a", "1", "x"), watched("--a", "2", "y")
    names = ["version.torch", "argv.--a", "argv.1", "env.OMP_NUM_THREADS", "code.train.py:main"]
    changes = find_script_changes(first, second, names)
    assert changes == [("argv.--a",), ("env.OMP_NUM_THREADS",)]
    assert list(list_left(names, changes)) == ["version.torch", "argv.1", "code.train.py:main"]


def test_secrets_and_cut_variables_are_not_put_back():
    first = watched("--api-key", "***", **{"env.MALLOC_A": "1"})
    second = watched("--token", "***", "--x=2", **{"env.MALLOC_A": "x" * 1000})
    names = ["argv.--token", "argv.--x", "env.MALLOC_A", "env.HOME", "env.CUDA_VISIBLE_DEVICES"]
    assert find_script_changes(first, second, names) == [("argv.--x",)]
    assert find_masked_argument(first.command) == "--api-key"
    assert find_masked_argument(("python", "train.py", "--x=2")) is None


def test_only_recorded_variables_come_from_the_runs():
    first = watched(**{"env.OMP_NUM_THREADS": "1", "env.PATH": "evil", "env.MALLOC_A": "x" * 1000})
    second = watched(**{"env.MKL_NUM_THREADS": "2", "env.CUDA_VISIBLE_DEVICES": "7"})
    environ = {"PATH": "bin", "CUDA_VISIBLE_DEVICES": "3", "NCCL_DEBUG": "INFO", "MALLOC_A": "y"}
    assert replace_variables(environ, first, second, ["OMP_NUM_THREADS", "MKL_NUM_THREADS"]) == {
        "PATH": "bin",
        "CUDA_VISIBLE_DEVICES": "3",
        "MALLOC_A": "y",
        "MKL_NUM_THREADS": "2",
    }


def test_what_can_be_put_back_of_a_recipe():
    first = load("digits").recipe
    second = load("digits", Patch.parse(["model.width=0.5", "optim.name=adamw", "train.eval_every=1ep"])).recipe
    names = ["torch", "model.width", "optim.name", "optim.lr", "optim.betas", "train.eval_every", "train.epochs"]
    assert find_recipe_changes(first, second, names) == [("model.width",), ("optim.name", "optim.betas")]
