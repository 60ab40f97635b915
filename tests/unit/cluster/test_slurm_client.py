"""Submitting, querying and following jobs, with stand-ins for Slurm's programs."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cluster.slurm_client import FileTail, JobState, SlurmClient, SlurmError, follow_until_end, parse_state

SHOWN = """JobId=12 JobName=evil JobState=COMPLETED Reason=None ExitCode=9:9
   UserId=me(1) GroupId=me(1) MCS_label=N/A
   Priority=1 Nice=0 Account=(null) QOS=(null)
   JobState=FAILED Reason=NonZeroExitCode Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=75:0
   Command=/runs/a b/job/job.sh
   StdErr=/runs/a b/job/12.out
   StdOut=/runs/a b/job/12.out
"""


@pytest.fixture
def programs(tmp_path: Path):
    """Return a function that puts a stand-in for each program on the PATH."""
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1", "SLURM_CONF": "/s", "RANK": "3"}
    environ |= {"SLURM_JWT": "secret", "MASTER_ADDR": "node1", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "a"}
    environ |= {"PACELINE_END_TIME": "9", "PACELINE_STORE_FD": "3", "PACELINE_CACHE": "mine"}

    def work(**does: str) -> SlurmClient:
        for name, text in does.items():
            (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
            (tmp_path / name).chmod(0o755)
        return SlurmClient(environ)

    return work


def test_a_job_is_parsed_whatever_its_name():
    state = parse_state(SHOWN)
    assert state == JobState("FAILED", "NonZeroExitCode", 2, 75, 0, Path("/runs/a b/job/12.out"))
    assert str(state) == "failed (NonZeroExitCode), exit code 75, restart 2"
    with pytest.raises(SlurmError, match="reports no such job"):
        parse_state("No jobs in the system\n")


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (JobState("COMPLETED"), 0),
        (JobState("FAILED", code=2), 2),
        (JobState("CANCELLED", signal=15), 143),
        (JobState("TIMEOUT"), 1),
        (JobState("NODE_FAIL"), 1),
    ],
)
def test_the_end_of_a_job_is_an_exit_code(state: JobState, code: int):
    assert state.has_ended and state.exit_code == code


def test_a_script_is_queued_after_others_and_without_the_submitters_place_in_a_job(programs, tmp_path: Path):
    slurm = programs(sbatch=f'echo "$*" > {tmp_path}/words; env > {tmp_path}/environ; echo "42;cluster"')
    assert slurm.submit(Path("/runs/job.sh"), after=("7", "8")) == "42"
    assert (tmp_path / "words").read_text() == "--parsable --dependency=afterany:7:8 /runs/job.sh\n"
    names = {line.partition("=")[0] for line in (tmp_path / "environ").read_text().splitlines()}
    assert {"SLURM_CONF", "SLURM_JWT", "PACELINE_CACHE"} <= names
    assert not names & {"SLURM_JOB_ID", "RANK", "MASTER_ADDR", "GROUP_RANK", "TORCHELASTIC_RUN_ID"}
    assert not names & {"PACELINE_END_TIME", "PACELINE_STORE_FD"}


def test_an_error_of_slurm_is_one_line(programs):
    said = (
        "sbatch: error: invalid partition specified: no\nsbatch: error: Batch job submission failed: Invalid partition"
    )
    slurm = programs(sbatch=f"printf '%s\\n' '{said}' >&2; exit 1", scontrol="exit 1")
    wanted = "sbatch: invalid partition specified: no; Batch job submission failed: Invalid partition"
    with pytest.raises(SlurmError) as refused:
        slurm.submit(Path("/job.sh"))
    assert str(refused.value) == wanted
    with pytest.raises(SlurmError, match="scontrol: failed without a message"):
        slurm.query_job("1")


def test_a_missing_program_is_named(programs):
    with pytest.raises(SlurmError, match=r"sbatch: is not on the PATH"):
        SlurmClient({"PATH": "/nowhere"}).submit(Path("/job.sh"))


class Watched:
    """Follows a job whose states come from a list, and writes lines meanwhile."""

    def __init__(self, path: Path, *states: JobState | str) -> None:
        self._states = iter(states)
        self._path = path
        self.reported: list[str] = []
        self.lines: list[str] = []

    def poll(self) -> JobState:
        state = next(self._states)
        while isinstance(state, str):
            with self._path.open("a") as file:
                file.write(state)
            state = next(self._states)
        if state.state == "UNKNOWN":
            raise SlurmError("scontrol: no answer")
        return state

    def follow(self) -> JobState:
        return follow_until_end(self.poll, self.reported.append, self.lines.append, lambda: None, self._path)


RUNNING, PENDING, FAILED = JobState("RUNNING"), JobState("PENDING", "Priority"), JobState("FAILED", code=2)


def test_state_changes_and_complete_lines_are_reported(tmp_path: Path):
    states = (PENDING, PENDING, RUNNING, "a\nb", RUNNING, "c\nlast", JobState("COMPLETED"))
    watched = Watched(tmp_path / "out", *states)
    assert watched.follow().exit_code == 0
    assert watched.reported == ["pending (Priority)", "running", "completed"]
    assert watched.lines == ["a", "bc", "last"]


def test_an_end_that_slurm_takes_back_is_none(tmp_path: Path):
    again = JobState("PENDING", "BeginTime", restarts=1)
    watched = Watched(tmp_path / "out", RUNNING, FAILED, again, FAILED, FAILED)
    assert watched.follow() == FAILED
    assert watched.reported == ["running", "pending (BeginTime), restart 1", "failed, exit code 2"]


def test_failed_queries_are_retried_a_limited_number_of_times(tmp_path: Path):
    silent = [JobState("UNKNOWN")] * 15
    watched = Watched(tmp_path / "out", *silent, RUNNING, *silent, JobState("COMPLETED"))
    assert watched.follow().state == "COMPLETED"
    with pytest.raises(SlurmError, match="no answer"):
        Watched(tmp_path / "out", RUNNING, *silent, *silent).follow()


def test_a_missing_output_file_has_no_lines(tmp_path: Path):
    def lines(path: Path | None) -> Iterator[str]:
        return FileTail().read_lines(path, include_partial=True)

    assert list(lines(None)) == [] and list(lines(tmp_path / "none")) == [] and list(lines(tmp_path)) == []
    (tmp_path / "out").write_bytes(b"caf\xe9\r\n")
    assert list(lines(tmp_path / "out")) == ["caf\ufffd"]
