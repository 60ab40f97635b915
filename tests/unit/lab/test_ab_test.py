"""A/B tests find the faster setting, and report failures and settings that cannot be compared."""

import math
from pathlib import Path

import pytest

from paceline.core.run_dir import RunDir
from paceline.lab.ab_test import ABResult, TrialBench, classify_failure, run_ab_test
from paceline.lab.patches import build_measurement_patch
from paceline.lab.trial import Trial, TrialOutcome, apply_patch
from paceline.recipe.load import Patch, load
from paceline.recipe.schema import Recipe

from .simulated_machine import Machine

DIGITS = load("digits").recipe
MEASURED = apply_patch(DIGITS, build_measurement_patch(DIGITS, 20, Patch(), lr_share=0.1))
BF16 = Patch((("train.precision", "bf16"),))


def is_bf16(recipe: Recipe) -> bool:
    return recipe.train.precision == "bf16"


def speed(recipe: Recipe) -> float:
    return (150.0 if is_bf16(recipe) else 100.0) * (1 + 0.01 * recipe.seed)


def run_test(machine: Machine, *, repeats: int = 2, is_same: bool = True) -> ABResult:
    bench = TrialBench(MEASURED, machine.run)
    return run_ab_test(bench, ("best", "other"), (Patch(), BF16), steps=20, repeats=repeats, must_match_losses=is_same)


def test_a_drift_that_meets_both_of_a_pair_is_no_doubt(tmp_path: Path) -> None:
    test_result = run_test(Machine(MEASURED, tmp_path, speed), repeats=3)
    assert test_result.status == "won"
    assert test_result.ratio is not None and test_result.ratio.low == pytest.approx(1.5)
    assert (len(test_result.baseline), len(test_result.candidate), len(test_result.runs)) == (3, 3, 3)
    assert test_result.parity is not None and test_result.parity.verdict == "same"


@pytest.mark.parametrize(("gap", "status"), [(1.0, "won"), (1.019, "won"), (1.021, "differs"), (0.97, "differs")])
def test_the_losses_of_one_pair_have_to_agree_within_the_tolerance(gap: float, status: str, tmp_path: Path) -> None:
    machine = Machine(MEASURED, tmp_path, speed, loss=lambda recipe: 2.0 * (gap if is_bf16(recipe) else 1.0))
    assert run_test(machine, repeats=1).status == status


def test_losses_that_differ_by_more_than_the_tolerance_on_average_forbid_it_though_they_scatter(tmp_path: Path) -> None:
    gaps = (1.04, 1.05, 1.03)
    machine = Machine(MEASURED, tmp_path, speed, loss=lambda recipe: gaps[recipe.seed] if is_bf16(recipe) else 1.0)
    test_result = run_test(machine, repeats=3)
    assert test_result.parity is not None and test_result.parity.verdict == "open"
    assert (test_result.status, test_result.why) == ("differs", test_result.parity.why)


@pytest.mark.parametrize(
    ("repeats", "loss", "doubt"),
    [
        (1, 2.0, "; not proved to train alike"),
        (2, math.nan, "; not proved to train alike: no losses of the same steps were recorded after the warm-up ("),
    ],
)
def test_a_gain_without_a_proof_that_both_train_alike_is_noted(
    repeats: int, loss: float, doubt: str, tmp_path: Path
) -> None:
    test_result = run_test(Machine(MEASURED, tmp_path, speed, loss=lambda recipe: loss), repeats=repeats)
    assert test_result.status == "won"
    assert doubt in test_result.why


def test_what_may_train_otherwise_is_rated_by_speed_alone(tmp_path: Path) -> None:
    machine = Machine(MEASURED, tmp_path, speed, loss=lambda recipe: 9.0 if is_bf16(recipe) else 1.0)
    test_result = run_test(machine, is_same=False)
    assert (test_result.status, test_result.parity) == ("won", None)
    assert "alike" not in test_result.why


def test_a_pair_ends_with_the_first_run_that_fails(tmp_path: Path) -> None:
    machine = Machine(MEASURED, tmp_path, speed, fails=lambda recipe: "it broke" if is_bf16(recipe) else "")
    test_result = run_test(machine, repeats=3)
    assert (test_result.status, test_result.why, test_result.ratio, test_result.runs) == (
        "failed",
        "it broke",
        None,
        (),
    )
    assert len(machine.made) == 2


def test_the_one_it_was_compared_with_is_named_where_that_fails(tmp_path: Path) -> None:
    machine = Machine(MEASURED, tmp_path, speed, fails=lambda recipe: "" if is_bf16(recipe) else "CUDA out of memory")
    test_result = run_test(machine)
    assert (test_result.status, test_result.why) == ("failed", "its baseline failed: out of memory")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB", "no_room"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8", "no_room"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "no_room"),
        ("numpy.core._exceptions._ArrayMemoryError: Unable to allocate 3 GiB", "no_room"),
        ("MemoryError", "no_room"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "no_room"),
        ("was killed by signal 9", "no_room"),
        ("rank 1 of 2 was killed by SIGKILL, so all ranks were ended", "no_room"),
        ("was killed by signal 11", "failed"),
        ("data.loader: native reads packs, and this is digits", "failed"),
    ],
)
def test_running_out_of_memory_is_distinguished_from_other_failures(error: str, status: str) -> None:
    assert classify_failure(TrialOutcome(Trial("one"), 1, RunDir(Path("one")), None, error, 1))[0] == status


@pytest.mark.parametrize("who", [is_bf16, lambda recipe: not is_bf16(recipe)])
def test_nothing_wins_if_other_processes_used_the_cores(who, tmp_path: Path) -> None:
    test_result = run_test(Machine(MEASURED, tmp_path, speed, is_busy=lambda recipe: who(recipe) and recipe.seed == 0))
    assert test_result.status == "starved"
    assert "held the cores 62 % of the time in 1 of 4 runs" in test_result.why
