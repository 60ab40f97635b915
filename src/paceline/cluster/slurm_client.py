"""Submit scripts to Slurm, query jobs, and follow one to its end, by `sbatch` and `scontrol`."""

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.errors import PacelineError
from paceline.core.files import open_to_read

_TIMEOUT_S: Final = 60.0
_MAX_UNANSWERED: Final = 20
"""Consecutive failed queries to tolerate: controllers restart, and can be slow."""
_FINAL_STATES: Final = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
# Output of `scontrol show job`; a job's name cannot begin a line of it.
_STATE: Final = re.compile(r"^ +JobState=(\S+) Reason=(\S+)", re.MULTILINE)
_CODE: Final = re.compile(r"^ +Requeue=\d+ Restarts=(\d+) .*ExitCode=(\d+):(\d+)", re.MULTILINE)
_OUTPUT: Final = re.compile(r"^ +StdOut=(.+)", re.MULTILINE)
# Variables of the submitting job or rank, which a new job must not inherit.
_SUBMITTER_VARIABLE: Final = re.compile(
    r"SLURM_(?!(CONF|CLUSTERS|JWT)$)\w+|SRUN_\w+|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|"
    r"TORCHELASTIC_\w+|PACELINE_(END_TIME|STORE_FD|LAUNCHER_PID|ATTEMPT|COMMAND)"
)


class SlurmError(PacelineError):
    """Error reported by Slurm."""


@dataclass(frozen=True)
class JobState:
    """State of a job in Slurm's terms; `code` and `signal` are 0 until it ends."""

    state: str
    reason: str = ""
    restarts: int = 0
    code: int = 0
    signal: int = 0
    output: Path | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the state is final, unless Slurm requeues the job."""
        return self.state in _FINAL_STATES

    @property
    def exit_code(self) -> int:
        """Exit code of the job, 128 plus its signal, or 1."""
        if self.state == "COMPLETED":
            return 0
        return self.code or (128 + self.signal if self.signal else 1)

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason not in ("", "None") and self.state != "COMPLETED" else ""
        restarts = f", restart {self.restarts}" if self.restarts else ""
        code = f", exit code {self.exit_code}" if self.has_ended and self.exit_code else ""
        return f"{self.state.lower().replace('_', ' ')}{reason}{code}{restarts}"


@dataclass(frozen=True)
class SlurmClient:
    """Client of Slurm's commands, run in `environ`."""

    environ: Mapping[str, str]
    warn: Callable[[str], None] = lambda line: None
    """Called with each line that sbatch prints besides the job ID."""

    def submit(self, script: Path, after: Sequence[str] = ()) -> str:
        """Queue a script, to start after the jobs in `after` end in any way; return the job ID.

        Raise `SlurmError` with Slurm's message.
        """
        depends = [f"--dependency=afterany:{':'.join(after)}"] if after else []
        output, besides = self._run(["sbatch", "--parsable", *depends, str(script)])
        for line in filter(None, besides.splitlines()):
            self.warn(line)
        return output.strip().partition(";")[0]

    def query_job(self, job: str) -> JobState:
        """Return the state of a job. Raise `SlurmError` for an unknown or forgotten one."""
        output, _ = self._run(["scontrol", "show", "job", job])
        return parse_state(output)

    def cancel(self, jobs: Sequence[str]) -> None:
        """Cancel jobs."""
        self._run(["scancel", *jobs])

    def _run(self, command: Sequence[str]) -> tuple[str, str]:
        environ = {name: value for name, value in self.environ.items() if not _SUBMITTER_VARIABLE.fullmatch(name)}
        try:
            ended = subprocess.run(
                list(command),
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=_TIMEOUT_S,
            )
        except FileNotFoundError:
            raise SlurmError(f"{command[0]}: is not on the PATH (submit where Slurm is)") from None
        except subprocess.TimeoutExpired:
            raise SlurmError(f"{command[0]}: has not answered in {_TIMEOUT_S:.0f} s (see sinfo)") from None
        if ended.returncode:
            raise SlurmError(f"{command[0]}: {_error_text(ended.stderr or ended.stdout, command[0])}")
        return ended.stdout, ended.stderr


def parse_state(text: str) -> JobState:
    """Parse the output of `scontrol show job`. Raise `SlurmError` if it describes no job."""
    state, code, output = _STATE.search(text), _CODE.search(text), _OUTPUT.search(text)
    if state is None or code is None:
        raise SlurmError("scontrol: reports no such job (see scontrol show job)")
    restarts, number, signal = map(int, code.groups())
    return JobState(state[1], state[2], restarts, number, signal, Path(output[1]) if output else None)


def follow_until_end(
    query: Callable[[], JobState],
    on_state: Callable[[str], None],
    on_line: Callable[[str], None],
    pause: Callable[[], None],
    output: Path | None = None,
) -> JobState:
    """Poll a job until it ends, and return its final state.

    `on_state` gets each state change, `on_line` each new line of output. `output` is the output file, if known
    without asking Slurm. `pause` is called between polls. Raise `SlurmError` after too many failed queries.
    """
    last_text, before, tail = "", None, FileTail()
    for now in _poll_states(query, pause):
        # Slurm may be about to requeue a job that failed, so any end but completion must be seen twice.
        is_end = now.state == "COMPLETED" or (now.has_ended and now == before)
        if str(now) != last_text and (is_end or not now.has_ended):
            last_text = str(now)
            on_state(last_text)
        for line in tail.read_lines(output or now.output, include_partial=is_end):
            on_line(line)
        if is_end:
            return now
        before = now
    raise AssertionError("polling never ends")


def _poll_states(query: Callable[[], JobState], pause: Callable[[], None]) -> Iterator[JobState]:
    unanswered = 0
    while True:
        try:
            now = query()
        except SlurmError:
            unanswered += 1
            if unanswered > _MAX_UNANSWERED:
                raise
        else:
            unanswered = 0
            yield now
        pause()


class FileTail:
    """Read the lines that are appended to a file."""

    def __init__(self) -> None:
        self._offset = 0

    def read_lines(self, path: Path | None, *, include_partial: bool) -> Iterator[str]:
        """Yield new complete lines, and with `include_partial` an incomplete last one."""
        if path is None or not path.exists():
            return
        with contextlib.suppress(OSError), open_to_read(path) as file:
            file.seek(self._offset)
            for line in file:
                # The rest of the line may still be written: read it again at the next poll.
                if not line.endswith(b"\n") and not include_partial:
                    return
                self._offset += len(line)
                yield line.decode("utf-8", "replace").rstrip("\r\n")


def _error_text(output: str, program: str) -> str:
    lines = [re.sub(rf"^{program}: (error: |fatal: )?", "", line).strip() for line in output.splitlines()]
    return "; ".join(line for line in lines if line) or "failed without a message"
