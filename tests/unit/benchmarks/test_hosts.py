"""Predictions for three and four hosts from one and two, compared with the recorded runs."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paceline.lab.link_timing import SIZES
from paceline.lab.predict.from_run import build_step_model, predict_from_run
from paceline.lab.predict.network import AllReduceMeasurement, build_measured_network
from paceline.lab.predict.points import PredictionRequest

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "hosts", raising=False)
    return importlib.import_module("hosts")


@pytest.fixture
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "results" / "hosts-cpu.json").read_text())
    return found


def again(hosts: ModuleType, recorded: dict[str, Any]) -> dict[str, float]:
    """Return what is predicted from what was recorded of one and of two hosts, and of nothing else."""
    alone, two = (hosts.step_of(recorded["seen"][num]) for num in ("1", "2"))
    predicted: dict[str, float] = hosts.predicted(alone, two, AllReduceMeasurement.model_validate(recorded["network"]))
    return predicted


def test_the_recorded_runs_give_the_predictions_of_then(hosts, recorded):
    predicted = again(hosts, recorded)
    assert list(predicted) == ["3", "4"]
    assert predicted == pytest.approx(recorded["predicted_step_s"], rel=1e-9)  # JSON keeps all digits of a float


def test_three_and_four_hosts_take_within_a_tenth_of_what_was_predicted(hosts, recorded):
    for num, predicted_s in again(hosts, recorded).items():
        measured_s = sorted(recorded["unseen"][num]["measured_s"])
        assert len(measured_s) == 3
        assert predicted_s == pytest.approx(measured_s[1], rel=0.1)  # the promise of the predictor


def test_that_nothing_changes_from_two_hosts_on_would_not_have_been_within_a_tenth(hosts, recorded):
    two_s = sorted(recorded["seen_step_s"]["2"])[1]
    four_s = sorted(recorded["unseen"]["4"]["measured_s"])[1]
    assert four_s > 1.1 * two_s


def test_what_hosts_took_lies_in_the_predicted_interval(hosts, recorded):
    alone, two = (replace(hosts.step_of(recorded["seen"][num]), fixed_s=0.0) for num in ("1", "2"))
    network = build_measured_network(AllReduceMeasurement.model_validate(recorded["network"]))
    for num in (3, 4):  # a single step each, which nothing is added to
        request = PredictionRequest(at=(num,), ranks_per_node=1, rank_batch=two.rank_batch, images=num * two.rank_batch)
        (predicted,) = predict_from_run(build_step_model(two, network, alone), request).predictions
        assert predicted.low_s < sorted(recorded["unseen"][str(num)]["measured_s"])[1] < predicted.high_s


def test_a_step_is_read_as_it_was_written(hosts, recorded):
    step = hosts.step_of(recorded["seen"]["2"])
    assert (step.ranks, step.nodes) == (2, 2)
    assert len(step.buckets) > 1
    assert step.buckets[-1].ready_s > 0


def test_the_typical_run_is_the_median_one(hosts, recorded):
    step = hosts.step_of(recorded["seen"]["2"])
    runs = [replace(step, step_s=each_s) for each_s in (3.0, 1.0, 2.0)]
    assert hosts.typical(runs).step_s == 2.0
    assert hosts.typical(runs[:2]).step_s == 1.0


def test_an_error_is_a_share_of_what_was_measured(hosts):
    assert hosts.compared(1.1, [1.0, 5.0, 0.5]) == {
        "predicted_s": 1.1,
        "median_s": 1.0,
        "measured_s": [1.0, 5.0, 0.5],
        "error": pytest.approx(0.1),
    }


def test_a_machine_that_is_busy_is_reported_in_the_record_and_no_reason_to_refuse(hosts):
    assert hosts.caution_of(2.0, 2) == ""
    assert hosts.caution_of(2.5, 2).startswith("2.50 processes wanted 2 cores")


def test_the_record_is_of_the_code_that_is_here(hosts, recorded):
    assert (recorded["words"], recorded["rank_batch"]) == ([*hosts.ARGUMENTS], hosts.RANK_BATCH)
    times = AllReduceMeasurement.model_validate(recorded["network"]).times
    assert [each.bytes for each in times] == [*SIZES[: len(times)]]
    # All but the first size stop it that take more than a quarter of the second that each has.
    assert all(each.median_s <= 0.25 for each in times[1:-1])
    assert recorded["seen"]["1"]["buckets"] == []  # one rank sends nothing
