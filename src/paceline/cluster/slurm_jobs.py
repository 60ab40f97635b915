"""Hand scripts to Slurm, ask how a job is, and follow it to its end by `sbatch` and `scontrol` alone.

Accounting (`sacct`) is not there on every cluster. Slurm forgets a job a few minutes after its end (MinJobAge, 300 s by
default).
"""

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.errors import PacelineError
from paceline.core.files import open_to_read

_LIMIT_S: Final = 60.0
_PATIENCE: Final = 20
"""Questions in a row that may go unanswered: controllers are restarted, and are slow at times."""
_ENDED: Final = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
# Of `scontrol show job`, in which a job's name cannot begin a line.
_STATE: Final = re.compile(r"^ +JobState=(\S+) Reason=(\S+)", re.MULTILINE)
_CODE: Final = re.compile(r"^ +Requeue=\d+ Restarts=(\d+) .*ExitCode=(\d+):(\d+)", re.MULTILINE)
_OUTPUT: Final = re.compile(r"^ +StdOut=(.+)", re.MULTILINE)
# What describes the job, or the rank, that a submission comes from: a new job is to have its own.
_OF_THE_SUBMITTER: Final = re.compile(
    r"SLURM_(?!(CONF|CLUSTERS|JWT)$)\w+|SRUN_\w+|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|"
    r"TORCHELASTIC_\w+|PACELINE_(END_TIME|STORE_FD|LAUNCHER_PID|ATTEMPT)"
)


class SlurmError(PacelineError):
    """What Slurm has refused, or does not know."""


@dataclass(frozen=True)
class JobState:
    """How a job is, in Slurm's words; `code` and `signal` are how it has ended, 0 before that."""

    state: str
    reason: str = ""
    restarts: int = 0
    code: int = 0
    signal: int = 0
    output: Path | None = None

    @property
    def has_ended(self) -> bool:
        """Whether this is the end of it, unless Slurm queues it again."""
        return self.state in _ENDED

    @property
    def exit_code(self) -> int:
        """The exit code that says how it has ended: the job's own, a shell's for a signal, or 1."""
        if self.state == "COMPLETED":
            return 0
        return self.code or (128 + self.signal if self.signal else 1)

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason not in ("", "None") and self.state != "COMPLETED" else ""
        restarts = f", restart {self.restarts}" if self.restarts else ""
        code = f", exit code {self.exit_code}" if self.has_ended and self.exit_code else ""
        return f"{self.state.lower().replace('_', ' ')}{reason}{code}{restarts}"


@dataclass(frozen=True)
class Slurm:
    """Slurm's programs, found and run in `environ`."""

    environ: Mapping[str, str]
    warn: Callable[[str], None] = lambda line: None
    """Is told what sbatch says besides the number of the job that it has queued."""

    def submit(self, script: Path, after: Sequence[str] = ()) -> str:
        """Queue a script, to start when the jobs in `after` have ended, however they did; return the job's number.

        Raise `SlurmError` with what Slurm says.
        """
        depends = [f"--dependency=afterany:{':'.join(after)}"] if after else []
        said, besides = self._run(["sbatch", "--parsable", *depends, str(script)])
        for line in filter(None, besides.splitlines()):
            self.warn(line)
        return said.strip().partition(";")[0]

    def look(self, job: str) -> JobState:
        """Return how a job is. Raise `SlurmError` where it is not known, or no longer."""
        said, _ = self._run(["scontrol", "show", "job", job])
        return read_state(said)

    def cancel(self, jobs: Sequence[str]) -> None:
        """End jobs, wherever they are."""
        self._run(["scancel", *jobs])

    def _run(self, command: Sequence[str]) -> tuple[str, str]:
        """Return what a program says and what it warns of. Raise `SlurmError` where it fails."""
        environ = {name: value for name, value in self.environ.items() if not _OF_THE_SUBMITTER.fullmatch(name)}
        try:
            ended = subprocess.run(
                list(command),
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=_LIMIT_S,
            )
        except FileNotFoundError:
            raise SlurmError(f"{command[0]}: is not on the PATH (submit where Slurm is)") from None
        except subprocess.TimeoutExpired:
            raise SlurmError(f"{command[0]}: has not answered in {_LIMIT_S:.0f} s (see sinfo)") from None
        if ended.returncode:
            raise SlurmError(f"{command[0]}: {_complaint(ended.stderr or ended.stdout, command[0])}")
        return ended.stdout, ended.stderr


def read_state(text: str) -> JobState:
    """Return what `scontrol show job` has said of one job. Raise `SlurmError` where it says nothing of one."""
    state, code, output = _STATE.search(text), _CODE.search(text), _OUTPUT.search(text)
    if state is None or code is None:
        raise SlurmError("scontrol: says nothing of the job (see scontrol show job)")
    restarts, number, signal = map(int, code.groups())
    return JobState(state[1], state[2], restarts, number, signal, Path(output[1]) if output else None)


def follow(
    look: Callable[[], JobState],
    say: Callable[[str], None],
    hear: Callable[[str], None],
    pause: Callable[[], None],
    output: Path | None = None,
) -> JobState:
    """Follow a job to its end; return that. `say` is told each change, `hear` each new line of what the job says.

    `output` is its file, where Slurm need not be asked for it. `pause` is called between looks. An end other than
    completion counts when it is seen twice, as Slurm may be about to queue the job again. Raise `SlurmError` when Slurm
    has not answered for long.
    """
    said, before, tail = "", None, Tail()
    for now in _looks(look, pause):
        is_end = now.state == "COMPLETED" or (now.has_ended and now == before)
        if str(now) != said and (is_end or not now.has_ended):
            said = str(now)
            say(said)
        for line in tail.lines(output or now.output, to_the_end=is_end):
            hear(line)
        if is_end:
            return now
        before = now
    raise AssertionError("looks have no end")


def _looks(look: Callable[[], JobState], pause: Callable[[], None]) -> Iterator[JobState]:
    """Yield how a job is, again and again; a question that is not answered is asked again."""
    unanswered = 0
    while True:
        try:
            now = look()
        except SlurmError:
            unanswered += 1
            if unanswered > _PATIENCE:
                raise
        else:
            unanswered = 0
            yield now
        pause()


class Tail:
    """The lines that a file grows by."""

    def __init__(self) -> None:
        self._offset = 0

    def lines(self, path: Path | None, *, to_the_end: bool) -> Iterator[str]:
        """Yield whole lines that were not there before, and with `to_the_end` what comes after the last of them."""
        if path is None or not path.exists():
            return
        with contextlib.suppress(OSError), open_to_read(path) as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n") and not to_the_end:
                    return
                self._offset += len(line)
                yield line.decode("utf-8", "replace").rstrip("\r\n")


def _complaint(said: str, program: str) -> str:
    """Return what a program of Slurm's complains of, in one line."""
    lines = [re.sub(rf"^{program}: (error: |fatal: )?", "", line).strip() for line in said.splitlines()]
    return "; ".join(line for line in lines if line) or "has failed and does not say why"
