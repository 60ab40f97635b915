"""Runs are compared within a turn, and inconclusive comparisons are marked."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.results import RunResult, ThroughputResult, TimeResult
from paceline.core.run_dir import RunDir
from paceline.lab import profile as under_test
from paceline.lab.probes import SkippedProbe
from paceline.lab.profile import Profile, ThroughputSummary, build_profile, compute_efficiency, count_devices
from paceline.lab.trial import Trial, TrialOutcome
from paceline.recipe.load import Patch, load

from .simulated_machine import starved

DIGITS = load("digits").recipe


def result(images_per_s: float, **more: Any) -> RunResult:
    spread = (images_per_s - 10, images_per_s + 10)
    values = {
        "status": "completed",
        "recipe_hash": "0123456789ab",
        "world_size": 2,
        "epochs": 1.0,
        "steps": 50,
        "images_seen": 3200,
        "eval": None,
        "best": None,
        "throughput": ThroughputResult(images_per_s=images_per_s, spread=spread, n=4, excluded_s=0),
        "time": TimeResult(wall_s=4.0, startup_s=1.0, train_s=2.0, eval_s=0, checkpoint_s=0, to_target_s=None),
        "stages": {},
        "verdict": {"bottleneck": "unknown", "evidence": "none", "ceiling": "at most 9x", "try": ""},
        "lr": "0.1 at 64",
        "weights_sha256": "ab",
        "provenance": {"device": "cpu", "threads": 1},
    }
    return RunResult.model_validate({**values, **more})


def runs(name: str, *rates: float | None) -> list[TrialOutcome]:
    """Return the outcomes of a trial by turn; None is a run that failed."""
    patch = Patch((("measure.trace", 40),)) if name == "trace" else Patch((("train.steps", 50),))
    trial = Trial(name, patch, len(rates))
    return [
        TrialOutcome(trial, turn, RunDir(Path(name)), None, "it broke", 1)
        if rate is None
        else TrialOutcome(trial, turn, RunDir(Path(name)), result(rate))
        for turn, rate in enumerate(rates, start=1)
    ]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch):
    """Return a function from outcomes to their profile; costs have their own test."""
    monkeypatch.setattr(under_test, "compute_efficiency", lambda *args: {})

    def of(*outcomes: TrialOutcome, left_out: tuple[SkippedProbe, ...] = ()) -> Profile:
        return build_profile(outcomes, DIGITS, recipe_hash="ba98", steps=40, left_out=left_out)

    return of


def test_the_rate_of_one_run_scatters_as_its_windows_do_and_that_of_more_as_they_do() -> None:
    assert ThroughputSummary.from_results([result(100.0)]) == ThroughputSummary(100.0, (90.0, 110.0), 1)
    assert ThroughputSummary.from_results([result(100.0), result(300.0), result(120.0)]) == ThroughputSummary(
        120.0, (100.0, 300.0), 3
    )


def test_a_probe_is_compared_with_the_base_of_its_own_turn(found) -> None:
    """The machine slows down to half: the ratio stays, where that of the medians would be 3 too."""
    profile = found(*runs("base", 100.0, 50.0), *runs("free-data", 300.0, 150.0))
    (probe,) = profile.probes
    assert (probe.ratio, probe.ratio_spread) == (3.0, (3.0, 3.0))
    assert profile.ceilings.free_data == 3.0
    assert profile.verdict["ceiling"] == "without data loading: at most 3.0x"


def test_a_probe_that_was_faster_once_and_slower_once_is_not_distinguished_from_the_base(found) -> None:
    profile = found(*runs("base", 100.0, 100.0), *runs("free-data", 90.0, 130.0), *runs("free-model", 900.0, 800.0))
    doubt = "(not distinguishable from 1.0x: free-data)"
    assert profile.verdict["ceiling"] == f"without data loading: at most 1.10x; without the model: at most 8.5x {doubt}"


def test_in_a_single_turn_windows_are_compared(found) -> None:
    """A run of 100 has windows from 90 to 110, one of 125 from 115: they are apart. One of 115 begins at 105."""
    profile = found(*runs("base", 100.0), *runs("free-data", 125.0), *runs("free-copy", 115.0))
    assert profile.verdict["ceiling"].endswith("(not distinguishable from 1.0x: free-copy)")


def test_a_probe_that_was_slower_shows_nothing_but_the_scatter_of_the_machine(found) -> None:
    """Less work does not take longer, however far apart the two are."""
    profile = found(*runs("base", 100.0), *runs("free-data", 50.0))
    assert (
        profile.verdict["ceiling"] == "without data loading: at most 0.50x (not distinguishable from 1.0x: free-data)"
    )


def test_failed_runs_are_listed_with_what_did_not_fit_and_good_turns_of_theirs_count(found) -> None:
    misfit = SkippedProbe("free-copy", "no such field")
    failed = [*runs("free-data", 200.0, None), *runs("free-model", None)]
    profile = found(*runs("base", 100.0, 100.0), *failed, left_out=(misfit,))
    assert [(probe.trial.name, probe.ratio) for probe in profile.probes] == [("free-data", 2.0)]
    assert profile.left_out == (misfit, SkippedProbe("free-data", "it broke"), SkippedProbe("free-model", "it broke"))


def test_a_trace_is_no_probe_and_without_probes_the_estimate_of_the_base_stands(found) -> None:
    profile = found(*runs("base", 100.0), *runs("trace", 80.0))
    assert profile.probes == () and profile.verdict == result(1).verdict


def test_buckets_that_were_timed_aside_are_the_profiles_and_no_probe(found) -> None:
    """Of the run that timed them nothing else is kept."""
    exposed, buckets = {"exposed_s": 0.003, "share": 0.1}, {"bytes": 8, "wire_s": 0.01, "overlap": 0.7}
    base = replace(runs("base", 100.0)[0], result=result(100.0, communication=exposed))
    aside = replace(runs("buckets", 80.0)[0], result=result(80.0, communication=exposed | buckets))
    profile = found(base, aside)
    assert profile.probes == () and profile.base.images_per_s == 100.0
    assert profile.to_dict()["communication"] == {**exposed, **buckets, "buckets": []}
    assert profile.timed_run == "buckets"


def test_a_network_that_cannot_be_counted_is_reported_and_the_rest_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise NotImplementedError("aten::strange\nis not known")

    monkeypatch.setattr(under_test, "compute_efficiency", refuse)
    profile = build_profile(runs("base", 100.0), DIGITS, recipe_hash="ba98", steps=40, left_out=())
    reason = "resnet18_cifar cannot be counted: NotImplementedError: aten::strange is not known"
    assert (profile.cost, profile.left_out) == ({}, (SkippedProbe("cost", reason),))


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.write_json("plan.json", {"num_classes": 10, "channels": 1, "image_size": 16})
    return run


def test_what_a_device_of_known_peak_reaches_is_a_share_of_it(rundir: RunDir) -> None:
    """Two ranks share the images; 67 TFLOP/s is what the vendor says of an H200 in fp32."""
    on_gpus = result(1000.0, provenance={"device": "cuda", "cuda_devices": ["NVIDIA H200"] * 2})
    cost = compute_efficiency(DIGITS, rundir, on_gpus, 1000.0)
    assert cost["achieved_flops_per_s"] == cost["flops_per_image"] * 500
    assert cost["peak_flops_per_s"] == 67e12
    assert cost["mfu"] == pytest.approx(cost["achieved_flops_per_s"] / 67e12)
    assert cost["roofline_share"] == pytest.approx(1000 / cost["roofline_images_per_s"])
    assert "NVIDIA H200" in cost["peak_source"]


def test_of_a_device_of_unknown_peak_only_what_it_does_is_reported(rundir: RunDir) -> None:
    unknown = result(1000.0, provenance={"device": "cuda", "cuda_devices": ["Some GPU"]})
    cost = compute_efficiency(DIGITS, rundir, unknown, 1000.0)
    assert cost["flops_per_image"] > 0 and cost["parameters"] > 0
    assert {name for name, value in cost.items() if value is None} == {
        *("peak_flops_per_s", "mfu", "roofline_images_per_s", "roofline_share")
    }


def test_one_process_of_dataparallel_computes_on_all_gpus() -> None:
    recipe = load("ddp-post/dataparallel").recipe
    four = result(1.0, world_size=1, provenance={"device": "cuda", "cuda_devices": ["NVIDIA H200"] * 4})
    assert count_devices(recipe.parallel, four) == 4
    assert count_devices(DIGITS.parallel, four) == 1


def test_a_profile_beside_other_programs_has_neither_ceilings_nor_advice(found) -> None:
    base, probes = runs("base", 100.0, 100.0), runs("free-data", 390.0, 390.0)
    assert "3.9x" in found(*base, *probes).verdict["ceiling"]
    assert probes[1].result is not None
    profile = found(*base, probes[0], replace(probes[1], result=starved(probes[1].result)))
    assert profile.verdict["bottleneck"] == "cpu-starved"
    assert profile.verdict["evidence"].startswith("Other processes held the cores 62 % of the time in 1 of 4 runs")
    assert (profile.verdict["ceiling"], profile.verdict["try"]) == ("", "")
    assert profile.to_dict()["ceilings"] == {}
