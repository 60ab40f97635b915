"""The run directory: its files, its lock, and its JSON-lines files."""

import contextlib
import errno
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import IO, Any, Final

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.files import make_folder, open_lock_file, open_to_read, open_to_write, remove_abandoned, replace_file
from paceline.core.json_file import MAX_BYTES, parse_json, read_json, read_limited
from paceline.core.results import (
    ClassCount,
    ClassTable,
    RunResult,
    calibration_csv,
    classes_csv,
    confusion_csv,
    read_classes_csv,
)

LOCK: Final = ".lock"
NO_LOCKS: Final = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of a file system without locks."""
RECIPE: Final = "recipe.yaml"
"""The resolved recipe in a run directory."""
_MARKER_FILES: Final = ("plan.json", "asked.json")
"""Files that paceline writes before the recipe of a run or of an experiment."""
_NAME_SUFFIX = r"-(\d{8}-\d{6})(?:-(\d+))?"  # time, and a number from 2
_BLOCK_BYTES: Final = 64 << 10


@contextlib.contextmanager
def run_lock(
    folder: Path, launcher_pid: int = 0, *, started_s: float = 0.0, launch: str = "", resume: bool = False
) -> Iterator[float]:
    """Hold the lock of `folder`, which is created. `launcher_pid` started this process (0: none).

    Yield the time of the first start of the run in seconds since 1970: `started_s` of this process, or that of a
    previous holder if this process resumes (`resume`) or has the same non-empty `launch`. A folder that holds nothing
    else afterwards is restored. Raise `RecipeError` if another process has the lock, naming it, and if the folder
    cannot be written to.
    """
    is_new = not folder.exists()
    descriptor = _acquire(folder)
    try:
        before = _read_owner(descriptor)
        # Keep the first start, to count the time of processes that were killed before their first step.
        if (resume or launch == before.get("launch") != "") and isinstance(first_s := before.get("first_s"), float):
            started_s = min(started_s, first_s)
        owner = {"pid": os.getpid(), "host": os.uname().nodename, "launcher_pid": launcher_pid}
        owner |= {"first_s": started_s, "launch": launch}
        with contextlib.suppress(OSError):  # a full disk: the lock holds, only its owner is unknown
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(owner).encode(), 0)
        with contextlib.suppress(OSError):
            remove_abandoned(folder)
        yield started_s
    finally:
        _release(folder, descriptor, is_new=is_new)


def _acquire(folder: Path) -> int:
    """Create and lock the lock file of `folder`; return its descriptor."""
    path = folder / LOCK
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = open_lock_file(path)
        except OSError as error:
            reason = error.strerror
            raise RecipeError(f"--run-dir: {folder} cannot be written to: {reason} (name another)") from None
        try:
            # A POSIX record lock: it works over NFS, and a forked worker that outlives its rank does not keep it.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                holder = _describe_owner(descriptor)
                os.close(descriptor)
                raise RecipeError(f"--run-dir: {folder} is in use by {holder}, or name another)") from None
        # `_release` of another process may have removed the file between opening and locking: retry.
        if _is_same_file(path, descriptor):
            return descriptor
        os.close(descriptor)


def _release(folder: Path, descriptor: int, *, is_new: bool) -> None:
    with contextlib.suppress(OSError):
        if [each.name for each in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            if is_new:
                folder.rmdir()
    os.close(descriptor)  # releases the lock, so last


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _read_owner(descriptor: int) -> dict[str, Any]:
    """Return what the current or previous holder wrote, or {}."""
    try:
        owner = parse_json(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _describe_owner(descriptor: int) -> str:
    owner = _read_owner(descriptor)
    try:
        pid, host, launcher = int(owner["pid"]), str(owner["host"]), int(owner["launcher_pid"])
    except (ValueError, KeyError, TypeError):
        return "another process (wait for it"
    started = f", started by {launcher}" if launcher else ""
    return f"process {pid} on {host}{started} (wait for it, stop it with `kill {launcher or pid}`"


def write_atomic(path: Path, text: str) -> None:
    """Replace a file atomically by `text`, so that readers never see a partial file. Raise `OSError`."""
    with replace_file(path) as file:
        file.write(text.encode())


def removed_error(run: Path) -> str:
    """Return the error message for a run whose folder was removed while it trained."""
    return f"{run}: was removed while the run was training: nothing of it is left to resume (start it again)"


def is_run(path: Path) -> bool:
    """Return whether `path` is the folder of a run, or of an experiment such as a ladder."""
    # A recipe.yaml alone may be among someone's images.
    names = (RECIPE, *_MARKER_FILES)
    recipe, *markers = (os.path.isfile(path / name) for name in names)  # noqa: PTH113 - the method may raise
    return recipe and any(markers)


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint folder of `step`."""
    return f"step-{step:08d}"


class _Inside:
    """Path of a file or folder in a run directory, by its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunDir", owner: type["RunDir"]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDir:
    """Paths of everything that a run writes."""

    path: Path

    recipe = _Inside(RECIPE)
    """The resolved recipe."""
    checkpoints = _Inside("checkpoints")
    """The folder of checkpoints, one folder each."""
    dataset = _Inside("dataset.json")
    """JSON file with the classes in order and the normalization of pixels."""
    steps = _Inside("steps.jsonl")
    """JSON lines, one per logged step."""
    evals = _Inside("evals.jsonl")
    """JSON lines, one per evaluation."""
    metrics = _Inside("metrics.csv")
    """CSV file, one row per evaluation."""
    classes = _Inside("classes.csv")
    """CSV file of the last evaluation, one row per class."""
    confusion = _Inside("confusion.csv")
    """The confusion matrix of the last evaluation, as CSV."""
    calibration = _Inside("calibration.csv")
    """CSV file of the last evaluation, one row per bin of confidence."""
    temperatures = _Inside("temperatures.json")
    """JSON file with the temperature of each calibrated checkpoint, which `paceline eval --calibrate` writes."""
    predictions = _Inside("predictions.csv")
    """CSV file of the last evaluation, one row per image, with `log.predictions`."""
    quote = _Inside("quote.json")
    """JSON file of `paceline quote`, with `log.quote`."""
    tensorboard = _Inside("tensorboard")
    """TensorBoard's event files."""
    attempts = _Inside("attempts.jsonl")
    """JSON lines at the start and end of each process of rank 0."""
    pauses = _Inside("pauses.jsonl")
    """JSON lines, one per evaluation and checkpoint, with its wall-clock time."""
    warnings = _Inside("warnings.jsonl")
    """JSON lines, one per warning."""
    hard_images = _Inside("hard_images.jsonl")
    """JSON lines, one per measurement of the losses that `data.sampler=hard` draws images by."""
    bad_images = _Inside("bad_images.jsonl")
    """JSON lines, one per image that could not be read and was skipped."""
    trace = _Inside("trace")
    """The folder of Chrome traces, one file per rank."""
    merged_trace = _Inside("trace.json.gz")
    """The Chrome trace of all ranks on one time axis."""
    worst = _Inside("worst")
    """The folder of thumbnails of misclassified images, and `worst.json`, which lists them."""
    inputs = _Inside("inputs")
    """The folder of training images of the first step as the model sees them, and `inputs.json`, which lists them."""
    profile = _Inside("profile.json")
    """The result of `paceline profile`, as JSON."""
    reference = _Inside("reference.safetensors")
    """Features of training images, which `paceline probe` writes for `paceline predict --reject`."""
    report = _Inside("report.html")
    """The report, one HTML file."""

    @classmethod
    def claim(cls, recipe_name: str, now: datetime) -> "RunDir":
        """Create a new folder `runs/RECIPE-TIME`, numbered if the name is taken. Raise `RecipeError` on failure."""
        stem = Path("runs") / f"{recipe_name}-{now:%Y%m%d-%H%M%S}"
        for path in chain([stem], (stem.with_name(f"{stem.name}-{number}") for number in range(2, 1000))):
            try:
                path.mkdir(parents=True)  # fails if it exists, so of several processes one gets the name
            except FileExistsError:
                continue
            except OSError as error:
                raise RecipeError(f"{path}: cannot be made: {error.strerror} (name another with --run-dir)") from None
            return cls(path)
        raise RecipeError(f"{stem}: too many runs in one second (name one with --run-dir)")

    @classmethod
    def newest_of(cls, recipe_name: str, predicate: Callable[["RunDir"], bool] = lambda run: True) -> "RunDir | None":
        """Return the newest run in `runs/RECIPE-TIME` for which `predicate` is true, or None."""
        named = re.compile(re.escape(recipe_name) + _NAME_SUFFIX)
        found = [
            (match[1], int(match[2] or 1), path)
            for path in _folders(Path("runs"))
            if (match := named.fullmatch(path.name))
        ]
        runs = (cls(path) for *_, path in sorted(found, reverse=True))
        return next((run for run in runs if run.recipe.is_file() and predicate(run)), None)

    @classmethod
    def existing(cls, path: Path) -> "RunDir":
        """Return the run in `path`, with `~` expanded. Raise `RecipeError` if it is not a run."""
        run = cls(Path(os.path.expanduser(path)))  # noqa: PTH111 - the method raises without a home directory
        if not is_run(run.path):
            missing = "plan.json" if os.path.lexists(run.recipe) else RECIPE
            raise RecipeError(f"{path}: is not a run directory (it has no {missing}; see runs/)")
        return run

    def release(self) -> None:
        """Remove a claimed folder that is still empty."""
        with contextlib.suppress(OSError):
            if {each.name for each in self.path.iterdir()} == {LOCK}:
                (self.path / LOCK).unlink()
            self.path.rmdir()
            self.path.parent.rmdir()

    def telemetry(self, node: int) -> Path:
        """Return the telemetry file of a node, one JSON line per sample."""
        return self.path / f"telemetry.node{node}.jsonl"

    def all_telemetry(self) -> list[Path]:
        """Return the telemetry files of all nodes."""
        return sorted(self.path.glob("telemetry.node*.jsonl"))

    def stacks(self, rank: int) -> Path:
        """Return the file with the thread stacks of a hanging rank."""
        return self.path / f"stacks.rank{rank}.txt"

    def samples(self, rank: int) -> Path:
        """Return the file of the samples that a rank trained on, one JSON line per step."""
        return self.path / f"steps.rank{rank}.jsonl"

    def all_samples(self) -> list[Path]:
        """Return the existing sample files of all ranks, sorted by name."""
        return sorted(self.path.glob("steps.rank*.jsonl"))

    def refuse_another_run(self, *, resume: bool) -> None:
        """Raise `RecipeError` if the folder already holds a run and `resume` is False."""
        try:
            has_run = self.recipe.exists()
        except OSError as error:
            raise RecipeError(f"--run-dir: {self.path} cannot be read: {error.strerror} (name another)") from None
        if has_run and not resume:
            raise RecipeError(f"--run-dir: {self.path} already holds a run (add --resume, or name another)")

    def refuse_links(self) -> None:
        """Raise `RecipeError` if a folder that a run writes into is a link."""
        others = [self.path / name for name in ("job", "probes", "wandb", "mlruns")]
        for folder in (self.checkpoints, self.tensorboard, self.trace, self.worst, self.inputs, *others):
            if folder.is_symlink():
                fix = "put the folder itself there, or give the run a whole --run-dir on that disk"
                raise RecipeError(f"--run-dir: {folder} is a link, and nothing is written through links ({fix})")

    def create(self) -> None:
        """Create the folder. Raise `RecipeError` on failure."""
        try:
            make_folder(self.checkpoints, parents=True)
        except OSError as error:
            raise RecipeError(f"--run-dir: {self.path} cannot be made: {error.strerror} (name another)") from None

    def write_json(self, name: str, values: Any) -> None:
        """Write `values` to file `name` atomically. Raise `PacelineError` on failure."""
        self._write(self.path / name, json.dumps(values, indent=2) + "\n")

    def add_bad_image(self, row: dict[str, str | int]) -> None:
        """Add an image to `bad_images.jsonl` unless it is listed. Ignores write errors, such as a full disk."""
        with contextlib.suppress(OSError):
            rows = list(read_lines(self.bad_images))
            if not any(all(each.get(key) == row[key] for key in ("split", "index")) for each in rows):
                write_atomic(self.bad_images, "".join(json.dumps(each) + "\n" for each in (*rows, row)))

    def read_plan(self) -> dict[str, Any]:
        """Return the values of `plan.json`, or {} if it cannot be read."""
        try:
            plan = read_json(self.path / "plan.json")
        except (OSError, ValueError):
            return {}
        return plan if isinstance(plan, dict) else {}

    def write_classes(self, table: ClassTable) -> None:
        """Write `classes.csv`, and `confusion.csv` and `calibration.csv` if the table has them."""
        write_atomic(self.classes, classes_csv(table))
        if table.confusion:
            write_atomic(self.confusion, confusion_csv(table))
        if table.calibration:
            write_atomic(self.calibration, calibration_csv(table))

    def read_classes(self) -> tuple[ClassCount, ...]:
        """Return the classes of the last evaluation, or () without one. Raise `PacelineError` for a damaged file."""
        try:
            return read_classes_csv(read_limited(self.classes).decode())
        except FileNotFoundError:
            return ()
        except (OSError, ValueError) as error:
            raise PacelineError(f"{self.classes}: cannot be read: {error} (remove it)") from None

    def write_result(self, result: RunResult) -> None:
        """Write `result.json`, which marks the run as finished. Raise `PacelineError` on failure."""
        self._write(self.path / "result.json", result.model_dump_json(indent=2) + "\n")

    def read_result(self) -> RunResult:
        """Return the result. Raise `PacelineError` if there is none or it cannot be read."""
        path = self.path / "result.json"
        try:
            return RunResult.model_validate_json(read_limited(path))
        except FileNotFoundError:
            raise PacelineError(f"{path}: the run has not finished (continue it with --resume)") from None
        except OSError as error:
            raise PacelineError(f"{path}: cannot be read: {error.strerror} (name another run)") from None
        except ValueError as error:
            first = str(error).splitlines()[0]
            raise PacelineError(f"{path}: is not a result: {first} (run it again)") from None

    def _write(self, path: Path, text: str) -> None:
        try:
            write_atomic(path, text)
        except OSError as error:
            if not self.path.is_dir():
                raise PacelineError(removed_error(self.path)) from None
            raise PacelineError(f"{path}: cannot be written: {error.strerror} (fix that, and add --resume)") from None


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append a record to a JSON-lines file, and remove a partial last line that a kill left."""
    with open_to_write(path, "a+b") as file:
        _drop_partial_line(file)
        file.write(json.dumps(record).encode() + b"\n")


def _drop_partial_line(file: IO[bytes]) -> None:
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _BLOCK_BYTES)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        end = start + newline + 1
        if newline >= 0:
            break
    file.truncate(end)


def read_lines(
    path: Path, skipped: Callable[[int], None] | None = None, *, of_steps: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON-lines file, without a partial last line; none if the file is missing.

    With `of_steps` a record needs an int `step`. Invalid lines are reported to `skipped` by number, from 1; without it,
    raise `PacelineError`. Raise it also for a file that cannot be read, such as a pipe.
    """
    try:
        file = open_to_read(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise PacelineError(f"{path}: cannot be read: {error.strerror} (move it away)") from None
    with file:
        for number, line in enumerate(_lines(file), start=1):
            record = _parse_record(line)
            if record is not None and (not of_steps or isinstance(record.get("step"), int)):
                yield record
            elif skipped is not None:
                skipped(number)
            else:
                raise PacelineError(f"{path}: line {number} is not a record (remove the line)")


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield complete lines; of a line longer than `MAX_BYTES`, only its beginning."""
    while line := file.readline(MAX_BYTES):
        if line.endswith(b"\n"):
            yield line
        elif len(line) == MAX_BYTES:
            yield line
            while (rest := file.readline(MAX_BYTES)) and not rest.endswith(b"\n"):
                pass


def _parse_record(line: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _folders(path: Path) -> list[Path]:
    return [each for each in path.iterdir() if each.is_dir()] if path.is_dir() else []
