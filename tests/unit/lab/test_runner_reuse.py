"""Existing runs are reused unless hardware, versions or code differ; a process describes its machine."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import PacelineError
from paceline.core.run_dir import RunDir
from paceline.lab.process import start_process
from paceline.lab.runner import ReusePolicy, describe_inconsistent_runs, diff_machines, query_machine
from paceline.lab.trial import Trial, TrialOutcome
from paceline.measure.machine import describe_machine

H200 = "NVIDIA H200"


@pytest.mark.parametrize(
    ("before", "here", "others"),
    [
        ({"cpu": "a", "logical_cores": 4}, {"cpu": "b", "logical_cores": 4}, ["a (here b)"]),
        ({"logical_cores": 4}, {"logical_cores": 8}, ["logical cores 4 (here 8)"]),
        ({"torch": "2.10.0", "python": "3.12"}, {"torch": "2.11.0", "python": "3.12"}, ["torch 2.10.0 (here 2.11.0)"]),
        ({"cuda_devices": [H200] * 2}, {}, [f"{H200} (here no GPU)"]),
        ({}, {"cuda_devices": [H200, "other"]}, [f"no GPU (here {H200}, other)"]),
        ({"cuda_devices": [H200] * 2}, {"cuda_devices": [H200] * 8}, []),
        ({"paceline": "1", "paceline_sha256": "a"}, {"paceline": "2", "paceline_sha256": "a"}, []),
        ({"paceline": "1", "paceline_sha256": "a"}, {"paceline": "2", "paceline_sha256": "b"}, ["paceline 1 (here 2)"]),
        (
            {"paceline": "1", "paceline_sha256": "a"},
            {"paceline": "1", "paceline_sha256": "b"},
            ["other code of paceline 1"],
        ),
        ({"paceline": "1"}, {"paceline": "2", "paceline_sha256": "a"}, ["paceline 1 (here 2)"]),
        ({"paceline": "1", "paceline_sha256": ""}, {"paceline": "1", "paceline_sha256": "a"}, []),
        ({"cuda_devices": [H200], "driver": "1"}, {"cuda_devices": [H200], "driver": "2"}, ["driver 1 (here 2)"]),
        ({"memory_bytes": 1, "platform": "x", "threads": 1}, {"memory_bytes": 2, "platform": "y", "threads": 2}, []),
        ({"torch": "2.10.0"}, {"numpy": "2"}, []),
    ],
)
def test_hardware_and_versions_are_compared(before: dict[str, Any], here: dict[str, Any], others: list[str]) -> None:
    assert diff_machines(before, here, on_cpu=False) == others
    assert diff_machines(here, here, on_cpu=False) == []


def test_gpus_play_no_part_for_a_run_on_the_cpu() -> None:
    gpus = {"cuda_devices": [H200], "cuda": "13", "driver": "1", "nccl": "2"}
    assert diff_machines(gpus, {"logical_cores": 4}, on_cpu=True) == []


def test_a_process_reports_what_a_run_would_write_down_of_this_machine() -> None:
    described, here = query_machine(0, 1, start_process), describe_machine()
    of_this_process = {"threads", "paceline", "paceline_sha256"}  # what an edit meanwhile may change
    assert {**described, **dict.fromkeys(of_this_process)} == {**here, **dict.fromkeys(of_this_process)}


class Node:
    """A process of srun's that says what rank 0 says; none that is asked to say it takes its time."""

    def __init__(self, said: str = "", complaint: str = "", code: int = 0, *, is_slow: bool = False) -> None:
        self.returncode: int | None = None
        self._said, self._complaint, self._code, self._is_slow = said, complaint, code, is_slow
        self.is_ended = False

    def communicate(self, *, timeout: float | None = None) -> tuple[str | None, str | None]:
        if self._is_slow:
            raise subprocess.TimeoutExpired("srun", timeout or 0)
        self.returncode = self._code
        return self._said, self._complaint

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return -15

    def terminate(self) -> None:
        self.is_ended = True
        self.returncode = -15

    def kill(self) -> None:
        raise AssertionError("it ends when it is asked to")


def known(nodes: int, ranks: int, **provenance: Any) -> TrialOutcome:
    class Result:
        starved = None

    found: Any = Result()
    found.provenance = provenance
    return TrialOutcome(Trial("a", ranks=ranks, nodes=nodes), 1, RunDir(Path("trials/a")), found, is_reused=True)


def test_a_run_on_nodes_is_compared_with_a_job_step_of_its_shape() -> None:
    started: list[Sequence[str]] = []

    def start(command: Sequence[str]) -> Node:
        started.append(command)
        return Node(json.dumps({"logical_cores": 2}))

    earlier = ReusePolicy(Path("replaced"), print, max_nodes=2)
    for nodes, ranks, others in ((2, 4, []), (2, 4, []), (1, 4, []), (4, 8, [])):
        assert earlier.find_differences(known(nodes, ranks, logical_cores=2), ranks, start, on_cpu=True) == others
    assert [command[:6] for command in started] == [
        ["srun", f"--nodes={nodes}", "--ntasks=4", f"--ntasks-per-node={4 // nodes}", "--relative=0",
         "--kill-on-bad-exit=1"]
        for nodes in (2, 1)
    ]  # fmt: skip
    assert all("--output=0" in command for command in started)
    assert earlier.find_differences(known(2, 4, logical_cores=1), 4, start, on_cpu=True) == ["logical cores 1 (here 2)"]
    assert earlier.find_differences(known(4, 8, logical_cores=1), 8, start, on_cpu=True) == [], (
        "here it could not be made again"
    )


def test_consistent_runs_need_no_caution() -> None:
    """A step of another shape may have been given other cores."""
    gpus = {"cuda_devices": [H200], "torch": "2.11.0", "own_parts": {"own:Net": {"sha256": "a"}}}
    made = [known(1, 1, logical_cores=8, **gpus), known(2, 8, logical_cores=2, **gpus)]
    assert (
        describe_inconsistent_runs([*made, *made])
        == describe_inconsistent_runs(made[:1])
        == describe_inconsistent_runs([])
        == ""
    )
    failed = TrialOutcome(Trial("b"), 1, RunDir(Path("trials/b")), None, "no room")
    assert describe_inconsistent_runs([failed, *made]) == ""


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"cpu": "old"}, "old (a, run 1: new)"),
        ({"torch": "2.10.0"}, "torch 2.10.0 (a, run 1: 2.11.0)"),
        ({"cuda_devices": ["A100"]}, f"A100 (a, run 1: {H200})"),
        ({"own_parts": {"own:Net": {"sha256": "b"}}}, "other code of own:Net than a, run 1"),
    ],
)
def test_runs_that_could_not_be_made_again_are_reported_where_they_differ(
    other: dict[str, Any], difference: str
) -> None:
    machine = {"cpu": "new", "torch": "2.11.0", "cuda_devices": [H200], "own_parts": {"own:Net": {"sha256": "a"}}}
    first, others = known(1, 1, **machine), known(4, 8, **{**machine, **other})
    last = replace(others, trial=Trial("b", ranks=8, nodes=4), repeat=2)
    sentence = "Not all runs were made under the same conditions, so they differ by more than what was varied: "
    assert describe_inconsistent_runs([first, last]) == f"{sentence}b, run 2 had {difference}."
    assert (
        describe_inconsistent_runs([first, last, first, last]) == f"{sentence}b, run 2 (and 1 more) had {difference}."
    )


def test_cores_are_compared_between_runs_of_one_shape() -> None:
    made = [known(1, 1, logical_cores=8), known(2, 2, logical_cores=4), known(2, 2, logical_cores=2)]
    assert describe_inconsistent_runs(made).endswith(": a, run 1 had logical cores 2 (a, run 1: 4).")


def test_gpus_are_no_part_of_what_runs_on_the_cpu_have_in_common() -> None:
    made = [known(0, 1, device="cpu", cuda_devices=[H200]), known(0, 2, device="cpu")]
    assert describe_inconsistent_runs(made) == ""
    assert describe_inconsistent_runs([made[0], known(0, 2, device="cuda")]) != ""


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (Node(complaint="srun: error: no such node\n", code=1), "srun: error: no such node"),
        (Node(is_slow=True), "no answer in 10 min 00 s"),
    ],
)
def test_what_does_not_report_where_it_is_is_an_error(node: Node, why: str) -> None:
    with pytest.raises(PacelineError, match=f"cannot describe its machine: {why}"):
        query_machine(1, 1, lambda command: node)
    assert node.poll() is not None


def test_a_run_that_cannot_be_put_away_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "replaced").write_text("a file", encoding="utf-8")
    with pytest.raises(PacelineError, match=r"trials/a: cannot be moved: .* \(name another --run-dir\)"):
        ReusePolicy(tmp_path / "replaced", print).archive(known(0, 1), ["logical cores 4 (here 8)"])
