"""Joining and restarting ranks: calls of the launcher, not the launcher itself."""

import importlib
import os
import sys

import pytest

from paceline.cli import ranks, start_line
from paceline.core.errors import WorldError
from paceline.core.world import World
from paceline.parallel.launch import LaunchResult, inherit_streams
from paceline.recipe.load import load

KILLED = LaunchResult(137, "rank 1 of 2 was killed by SIGKILL, so all ranks were stopped", was_lost=True)
EXTRA = ["--run-dir", "runs/x"]


class Launches:
    """Stand in for the launcher: return `ends` in order, and record the calls."""

    def __init__(self, *ends: LaunchResult) -> None:
        self.ends, self.calls = list(ends), []

    def __call__(self, command, ranks, environ, **options) -> LaunchResult:
        self.calls.append((command[command.index("paceline") + 1 :], ranks, options))
        self.environ = environ
        return self.ends.pop(0)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch):
    def start(launches: Launches, *words: str, **options) -> int:
        monkeypatch.setattr(sys, "argv", ["paceline", "train", *words])
        monkeypatch.setattr(ranks, "launch", launches)
        return ranks.start_ranks(2, 0, EXTRA, **options)

    return start


# matrix: 11
def test_lost_ranks_are_restarted_to_resume_with_one_warning(started, capsys) -> None:
    launches = Launches(KILLED, LaunchResult(1, was_lost=True), LaunchResult(0))
    assert started(launches, "optim.lr=0.1", "--json", grace_s=7.0, max_restarts=5) == 0
    words = ["optim.lr=0.1", "--json"]
    assert [command for command, _, _ in launches.calls] == [
        ["train", *EXTRA, *words],
        ["train", *EXTRA, "--resume", *words],
        ["train", *EXTRA, "--resume", *words],
    ]
    assert [options for _, _, options in launches.calls] == [
        {"port": 0, "grace_s": 7.0, "attempt": attempt, "streams": inherit_streams} for attempt in range(3)
    ]
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == [
        f"warning: {KILLED.sentence}; restarting all ranks (restart 1 of 5)",
        "warning: a rank failed, so all ranks were stopped; restarting all ranks (restart 2 of 5)",
    ]


def test_ranks_know_the_command_as_typed(started, monkeypatch) -> None:
    launches = Launches(LaunchResult(0))
    started(launches, "optim.lr=0.1", "--ranks=2")
    monkeypatch.setattr(sys, "argv", ["paceline", *launches.calls[0][0]])
    assert "--run-dir" in ranks.typed_command(World())  # a rank that our launcher did not start
    for value in (launches.environ[ranks.COMMAND_VARIABLE], "", "7", "{"):
        monkeypatch.setenv(ranks.COMMAND_VARIABLE, value)
        command = ranks.typed_command(World(launcher="local"))
        assert (command == ("paceline", "train", "optim.lr=0.1", "--ranks=2")) == value.startswith("[")


def test_resume_is_not_passed_twice(started) -> None:
    launches = Launches(KILLED, LaunchResult(0))
    assert started(launches, "--resume", max_restarts=1) == 0
    assert [command.count("--resume") for command, _, _ in launches.calls] == [1, 1]


@pytest.mark.parametrize(
    "end",
    [
        LaunchResult(0),
        LaunchResult(2),
        LaunchResult(4),
        LaunchResult(75),
        LaunchResult(130),
        LaunchResult(143, "asked to stop"),
    ],
)
def test_only_a_lost_rank_is_restarted(started, end: LaunchResult, capsys, monkeypatch) -> None:
    """A launcher that was stopped ignores further signals, which could only change its exit code."""
    ignored: list[bool] = []
    monkeypatch.setattr("paceline.cli.ranks.ignore_stop_signals", lambda: ignored.append(True))
    assert started(Launches(end), max_restarts=5) == end.code
    assert ignored == [True] * (end.code == 75)
    assert capsys.readouterr().err == (f"error: {end.sentence}\n" if end.sentence else "")


def test_after_the_last_restart_the_loss_is_the_runs(started, capsys) -> None:
    launches = Launches(KILLED, KILLED, KILLED)
    assert started(launches, max_restarts=2) == 137
    assert len(launches.calls) == 3
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {KILLED.sentence}"
    assert started(Launches(KILLED)) == 137


@pytest.mark.parametrize(("kills", "is_explained"), [((3, 4), True), ((3, 3), False)])
def test_a_rank_that_the_kernel_killed_for_its_memory_is_explained(
    started, capsys, monkeypatch, kills: tuple[int, int], is_explained: bool
) -> None:
    counts = iter(kills)
    monkeypatch.setattr(ranks, "oom_kills", lambda: next(counts))
    assert started(Launches(KILLED)) == 137
    message = capsys.readouterr().err
    assert ("out of memory" in message and "train.accumulate=auto" in message) == is_explained


# matrix: 47
@pytest.mark.parametrize("has_loopback", [True, False])
def test_ranks_of_one_node_talk_on_its_loopback_interface(monkeypatch, has_loopback: bool) -> None:
    names = [(1, "lo"), (2, "eth0")] if has_loopback else [(2, "eth0")]
    monkeypatch.setattr("socket.if_nameindex", lambda: names)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "RANK", "WORLD", "MASTER_", "PACELINE_"))]:
        monkeypatch.delenv(name)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "TORCH_CPP_LOG_LEVEL": "FATAL"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that what is set in its place goes with this test
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert ranks.enter_world().rank == 1
    assert os.environ.get("GLOO_SOCKET_IFNAME") == ("lo" if has_loopback else None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    ranks.enter_world()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes this a machine with so many cores and GPUs."""

    def be(cores: int, gpus: int = 0) -> None:
        for module in (ranks, start_line):
            monkeypatch.setattr(module, "usable_cores", lambda: cores)
            monkeypatch.setattr(module, "count_gpus", lambda environ: gpus)

    return be


@pytest.mark.parametrize(("cores", "most"), [(1, 16), (2, 16), (4, 16), (5, 20), (64, 256)])
def test_more_ranks_than_a_small_multiple_of_the_cores_are_refused_unless_insisted_on(machine, cores, most) -> None:
    machine(cores)
    ranks.refuse_too_many(most, "auto", oversubscribe=False)
    ranks.refuse_too_many(most + 1, "cpu", oversubscribe=True)
    with pytest.raises(WorldError, match=rf"^--ranks: {most + 1} on {cores} CPU cores?.*at most {most}.*--oversubscr"):
        ranks.refuse_too_many(most + 1, "cpu", oversubscribe=False)


def test_more_ranks_than_gpus_are_refused_even_when_insisted_on_but_not_on_cpus(machine) -> None:
    machine(64, gpus=2)
    ranks.refuse_too_many(2, "auto", oversubscribe=False)
    ranks.refuse_too_many(3, "cpu", oversubscribe=False)
    for oversubscribe in (False, True):
        with pytest.raises(WorldError, match=r"^--ranks: 3 is more than the 2 GPUs .*parallel\.device=cpu"):
            ranks.refuse_too_many(3, "auto", oversubscribe=oversubscribe)


def test_ranks_of_a_launcher_cannot_be_overridden(machine) -> None:
    machine(1)
    recipe = load("digits").recipe
    world = World(1, 64, 1, 64, launcher="torchrun")
    assert ranks.ranks_to_start("auto", world, recipe.parallel) == 64
    with pytest.raises(WorldError, match=r"^--oversubscribe: .*torchrun started \(leave it out\)"):
        ranks.ranks_to_start("auto", world, recipe.parallel, oversubscribe=True)
    local = World(1, 64, 1, 64, launcher="local", launcher_pid=7)  # started with the words of who has insisted
    assert ranks.ranks_to_start("64", local, recipe.parallel, oversubscribe=True) == 64


def test_the_first_line_names_ranks_and_hardware(machine) -> None:
    machine(2)
    version = importlib.import_module("paceline").__version__
    assert start_line.starting_message(1, "auto") == f"paceline {version}: starting 1 rank on 2 CPU cores"
    machine(64, gpus=4)
    assert start_line.starting_message(4, "auto").endswith(": starting 4 ranks on 4 GPUs")
    assert start_line.starting_message(4, "cpu").endswith(": starting 4 ranks on 64 CPU cores")
