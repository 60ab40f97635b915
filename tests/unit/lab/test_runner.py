"""Trials run in child processes, are read from their run directories, and leave no process behind."""

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from paceline.core.results import RunResult, ThroughputResult, TimeResult
from paceline.core.run_dir import RunDir
from paceline.lab.process import start_process
from paceline.lab.repeat import run_interleaved
from paceline.lab.runner import ReusePolicy, TrialError, TrialRunner, interrupt_on_signals
from paceline.lab.trial import Trial, TrialOutcome
from paceline.recipe.load import Patch, load

from .simulated_machine import Described

RECIPE = load("digits").recipe


def result(
    images_per_s: float, recipe_hash: str = RECIPE.hash, status: str = "completed", **provenance: object
) -> RunResult:
    return RunResult(
        status=status,
        recipe_hash=recipe_hash,
        world_size=2,
        epochs=1.0,
        steps=50,
        images_seen=3200,
        eval=None,
        best=None,
        throughput=ThroughputResult(images_per_s=images_per_s, spread=(images_per_s, images_per_s), n=4, excluded_s=0),
        time=TimeResult(wall_s=4.0, startup_s=1.0, train_s=2.0, eval_s=0, checkpoint_s=0, to_target_s=None),
        stages={},
        verdict={"bottleneck": "unknown", "evidence": "none", "try": ""},
        lr="0.1 at 64",
        weights_sha256="ab",
        provenance=provenance,
    )


class Child:
    """A process that writes a result to the given folder, says `said`, and ends with `code`."""

    def __init__(
        self,
        command: Sequence[str],
        code: int = 0,
        said: str = "",
        images_per_s: float = 100.0,
        provenance: Mapping[str, object] | None = None,
    ) -> None:
        self.command = list(command)
        self.returncode: int | None = None
        self.calls: list[str] = []
        self._ends_with = code
        self._said = said
        self._rate = images_per_s
        self._provenance = provenance or {}

    def communicate(self, *, timeout: float | None = None) -> tuple[str | None, str | None]:
        if not self._ends_with:
            folder = Path(self.command[self.command.index("--run-dir") + 1])
            folder.mkdir(parents=True)
            RunDir(folder).write_result(result(self._rate, **self._provenance))
        self.returncode = self._ends_with
        return None, self._said

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self.calls.append(f"wait {timeout}")
        if timeout is not None and "kill" not in self.calls and self._ends_with == -9:
            raise subprocess.TimeoutExpired("child", timeout)
        self.returncode = -15
        return self.returncode

    def terminate(self) -> None:
        self.calls.append("terminate")

    def kill(self) -> None:
        self.calls.append("kill")
        self.returncode = -9


class Interrupted(Child):
    """A process during which Ctrl-C is pressed."""

    def communicate(self, *, timeout: float | None = None) -> tuple[str | None, str | None]:
        raise KeyboardInterrupt


class Slow(Child):
    """A process that does not end by itself."""

    def communicate(self, *, timeout: float | None = None) -> tuple[str | None, str | None]:
        assert timeout is not None
        raise subprocess.TimeoutExpired("child", timeout)


def runner_in(folder: Path, start: Callable[[Sequence[str]], Child | Described], **options: object) -> TrialRunner:
    """Return what runs trials of digits on two ranks, each in a folder of its own below `folder`."""
    return TrialRunner(
        RECIPE,
        folder / "base.yaml",
        2,
        get_folder=lambda trial, repeat: folder / f"{trial.name}-{repeat}",
        spawn=start,
        **options,
    )


def going_on(
    folder: Path,
    say: Callable[[str], None] = print,
    before_run: Callable[[Trial, int], None] = lambda trial, repeat: None,
    **machine: object,
) -> TrialRunner:
    """Return what runs trials that are not there already, on a machine of which so much is known."""

    def start(command: Sequence[str]) -> Child | Described:
        is_asked = "paceline.measure.machine" in command
        return Described(machine) if is_asked else Child(command, provenance=machine)

    return runner_in(folder, start, reuse_policy=ReusePolicy(folder / "replaced", say), before_run=before_run)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[TrialOutcome]]:
    """Return a function that runs trials with children made by `start`, each in a folder of its own."""

    def all_of(trials: Sequence[Trial], start: Callable[[Sequence[str]], Child]) -> list[TrialOutcome]:
        turns = max(trial.repeats for trial in trials)
        return list(run_interleaved(lambda turn: trials, turns, runner_in(tmp_path, start)))

    return all_of


def named(command: Sequence[str]) -> str:
    return Path(command[command.index("--run-dir") + 1]).name


def test_outcomes_are_read_from_run_directories(run, tmp_path: Path) -> None:
    rates = {"a-1": 100.0, "b-1": 300.0, "a-2": 110.0, "b-2": 310.0}
    outcomes = run(
        [Trial("a", repeats=2), Trial("b", repeats=2)],
        lambda command: Child(command, images_per_s=rates[named(command)]),
    )
    assert [(each.trial.name, each.repeat) for each in outcomes] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert [each.result.throughput.images_per_s for each in outcomes] == [100, 300, 110, 310]
    assert outcomes[1].rundir == RunDir(tmp_path / "b-1")


def test_a_failed_trial_is_reported_in_one_line_and_not_tried_again_while_the_others_go_on(run) -> None:
    started = []

    def start(command: Sequence[str]) -> Child:
        started.append(named(command))
        said = "warning: slow\nerror: data.source: no such folder (fix it)\nerror: rank 1 failed\n"
        return Child(command, 2, said) if named(command).startswith("b") else Child(command)

    outcomes = run([Trial("a", repeats=2), Trial("b", repeats=2), Trial("c", repeats=2)], start)
    assert started == ["a-1", "b-1", "c-1", "a-2", "c-2"]
    failed = outcomes[1]
    assert (failed.result, failed.exit_code, failed.error) == (None, 2, "data.source: no such folder (fix it)")
    assert all(each.result for each in outcomes if each is not failed)


@pytest.mark.parametrize(
    ("code", "said", "error", "exit_code"),
    [
        (1, "Traceback\n  ...\nZeroDivisionError: division\n", "ZeroDivisionError: division", 1),
        (-11, "", "was killed by signal 11", 1),
        (75, "", "ended with exit code 75", 75),
    ],
)
def test_a_process_that_names_no_error_is_reported_by_its_end(run, code, said, error, exit_code) -> None:
    (outcome,) = run([Trial("a")], lambda command: Child(command, code, said))
    assert (outcome.error, outcome.exit_code) == (error, exit_code)


def test_a_run_without_counted_steps_has_failed(run) -> None:
    (outcome,) = run([Trial("a")], lambda command: Child(command, images_per_s=0.0))
    assert outcome.result is None and "no step was measured" in outcome.error


def test_a_run_that_is_made_for_more_than_its_speed_need_not_have_one(tmp_path: Path) -> None:
    reuse_policy = ReusePolicy(tmp_path / "replaced", print)

    def start(command: Sequence[str]) -> Child | Described:
        return Described({}) if "paceline.measure.machine" in command else Child(command, images_per_s=0.0)

    runner = runner_in(tmp_path, start, reuse_policy=reuse_policy, needs_speed=False)
    assert [(made.result is None, made.is_reused) for made in (runner.run(Trial("a"), 1) for _ in range(2))] == [
        (False, False),
        (False, True),
    ]


@pytest.mark.parametrize(("code", "calls"), [(0, ["terminate"]), (-9, ["terminate", "kill"])])
def test_ctrl_c_ends_the_process_that_runs_and_starts_no_other(run, code: int, calls: list[str]) -> None:
    """One that does not end when it is asked to is killed."""
    started: list[Child] = []

    def start(command: Sequence[str]) -> Child:
        started.append(Interrupted(command, code))
        return started[-1]

    with pytest.raises(KeyboardInterrupt):
        run([Trial("a"), Trial("b")], start)
    (child,) = started
    assert [call for call in child.calls if not call.startswith("wait")] == calls
    assert child.calls[-1].startswith("wait")


def test_a_signal_to_stop_interrupts_as_ctrl_c_does_and_only_meanwhile() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interrupt_on_signals():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_started_process_reports_its_output_and_is_no_part_of_our_group() -> None:
    script = "import os, sys; print(os.getpgid(0) == os.getpid(), file=sys.stderr); print('found'); sys.exit(3)"
    process = start_process([sys.executable, "-S", "-c", script])
    assert process.communicate() == ("found\n", "True\n")
    assert process.returncode == 3


def test_a_run_that_takes_too_long_is_ended_and_has_failed(tmp_path: Path) -> None:
    started: list[Child] = []

    def start(command: Sequence[str]) -> Child:
        started.append(Slow(command))
        return started[-1]

    outcome = runner_in(tmp_path, start, timeout_s=90.0).run(Trial("a"), 1)
    assert (outcome.result, outcome.error) == (None, "was terminated after 1 min 30 s")
    assert "terminate" in started[0].calls


def test_a_run_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    """It is the same run only where recipe and ranks are the same; what a kill has left is removed."""
    begun: list[str] = []
    runner = going_on(tmp_path, before_run=lambda trial, repeat: begun.append(trial.name))
    (tmp_path / "a-1").mkdir()
    (tmp_path / "a-1" / "recipe.yaml").write_text("half", encoding="utf-8")
    first = runner.run(Trial("a"), 1)
    assert first.result is not None and not first.is_reused and not (tmp_path / "a-1" / "recipe.yaml").exists()
    again = runner.run(Trial("a"), 1)
    assert again.is_reused and again.result == first.result
    others = [Trial("a", Patch((("optim.lr", 0.5),))), Trial("a", ranks=1)]
    assert [runner.find_existing(other, 1) for other in others] == [None, None]
    assert begun == ["a"]


def test_a_run_of_another_machine_is_made_again_and_kept(tmp_path: Path) -> None:
    """As often as that changes; a line says what differs, and where the old one is."""
    said: list[str] = []
    made = [going_on(tmp_path, said.append, logical_cores=cores).run(Trial("a"), 1) for cores in (4, 8, 8, 4)]
    assert [each.is_reused for each in made] == [False, False, True, False]
    assert said == [
        f"a, run 1: is run again: the existing run had logical cores {before} (here {here}); it is kept in "
        f"{tmp_path / 'replaced' / name}"
        for before, here, name in ((4, 8, "a-1"), (8, 4, "a-1-2"))
    ]
    places = (tmp_path / "replaced" / "a-1", tmp_path / "replaced" / "a-1-2", tmp_path / "a-1")
    assert [RunDir(place).read_result().provenance["logical_cores"] for place in places] == [4, 8, 4]


def test_a_run_with_other_code_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("class Net: ...", encoding="utf-8")
    own = {"own:Net": {"file": str(tmp_path / "own.py"), "sha256": "not that of the file"}}
    (tmp_path / "a-1").mkdir()
    RunDir(tmp_path / "a-1").write_result(result(1.0, own_parts=own))
    said: list[str] = []
    assert not going_on(tmp_path, said.append).run(Trial("a"), 1).is_reused
    assert "had other code of own:Net;" in said[0]


def test_the_machine_is_queried_once_and_only_where_there_is_something_to_compare(tmp_path: Path) -> None:
    asked: list[Sequence[str]] = []

    def start(command: Sequence[str]) -> Child | Described:
        is_asked = "paceline.measure.machine" in command
        asked.extend([command] if is_asked else [])
        return Described({}) if is_asked else Child(command)

    runner = runner_in(tmp_path, start, reuse_policy=ReusePolicy(tmp_path / "replaced", print))
    runner.run(Trial("a"), 1)
    assert asked == []
    assert [runner.run(Trial("a"), 1).is_reused for _ in range(2)] == [True, True]
    assert len(asked) == 1


def test_a_machine_that_does_not_report_what_it_is_is_no_failure_of_the_trial(tmp_path: Path) -> None:
    """The next time it may, so no lasting verdict comes of it, as of any other refusal of a run."""

    def start(command: Sequence[str]) -> Child:
        return Slow(command) if "paceline.measure.machine" in command else Child(command)

    runner = runner_in(tmp_path, start, reuse_policy=ReusePolicy(tmp_path / "replaced", print))
    runner.run(Trial("a"), 1)
    with pytest.raises(TrialError, match="cannot describe its machine: no answer in 10 min 00 s") as caught:
        runner.run(Trial("a"), 1)
    assert caught.value.exit_code == 2 and runner.find_existing(Trial("a"), 1) is not None


def test_a_run_that_cannot_be_put_away_is_no_failure_of_the_trial(tmp_path: Path) -> None:
    going_on(tmp_path, logical_cores=4).run(Trial("a"), 1)
    (tmp_path / "replaced").write_text("a file", encoding="utf-8")
    with pytest.raises(TrialError, match=r"a-1: cannot be moved: .* \(name another --run-dir\)"):
        going_on(tmp_path, logical_cores=8).run(Trial("a"), 1)
    assert (tmp_path / "a-1" / "result.json").is_file()


@pytest.mark.parametrize("status", ["preempted", "failed"])
def test_a_run_that_was_not_ended_is_made_again(tmp_path: Path, status: str) -> None:
    (tmp_path / "a-1").mkdir()
    RunDir(tmp_path / "a-1").write_result(result(1.0, status=status))
    assert going_on(tmp_path).find_existing(Trial("a"), 1) is None


HOLD = """
import sys
from pathlib import Path
from paceline.core.run_dir import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_what_is_still_being_written_is_not_removed(tmp_path: Path) -> None:
    """A run may outlive whoever started it, who was killed."""
    (tmp_path / "a-1").mkdir()
    (tmp_path / "a-1" / "recipe.yaml").write_text("half", encoding="utf-8")
    runner = going_on(tmp_path)
    command = [sys.executable, "-c", HOLD, str(tmp_path / "a-1")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(TrialError, match=f"a-1 is in use by process {other.pid} on"):
            runner.run(Trial("a"), 1)
        assert (tmp_path / "a-1" / "recipe.yaml").read_text(encoding="utf-8") == "half"
        other.kill()
    assert runner.run(Trial("a"), 1).result is not None
