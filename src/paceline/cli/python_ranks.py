"""`paceline.train(ranks=N)`: start the ranks as `paceline train --ranks N` does, and return the result."""

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from paceline.cli.notebook import NotebookView, is_notebook, open_view
from paceline.cli.ranks import COMMAND_VARIABLE, launch_verb
from paceline.core.errors import CheckpointError, NonFiniteLossError, PacelineError, RecipeError
from paceline.core.files import write_new
from paceline.core.results import RunResult
from paceline.core.run_dir import RunDir, read_lines
from paceline.core.units import count
from paceline.parallel.launch import INTERRUPTED, PREEMPTED
from paceline.recipe.consent import TRUST_CODE, has_plugins
from paceline.recipe.load import LoadedRecipe
from paceline.recipe.plugins import plugins_of
from paceline.recipe.schema import Recipe
from paceline.recipe.yaml import to_yaml_text
from paceline.training.logging.base import from_step_row

_ERROR_PREFIX: Final = "error: "
_COLOR_VARIABLES: Final = ("FORCE_COLOR", "CLICOLOR_FORCE")
"""By which a kernel makes programs draw as in a terminal; these lines are shown as text."""
_CLOSE_S: Final = 2.0
"""Seconds that output gets to arrive after the ranks have ended: a process that they left behind may keep a pipe."""
_FOLLOW_S: Final = 0.5


def train_on_ranks(
    num_ranks: int,
    recipe: str | Path | Recipe | Mapping[str, Any],
    overrides: Sequence[str],
    loaded: LoadedRecipe,
    rundir: RunDir,
    *,
    resume: bool,
) -> RunResult:
    """Train `recipe`, which is `loaded` with `overrides`, on `num_ranks` processes of this machine.

    An interrupt stops them with a checkpoint. Raise `PacelineError` for what a rank has failed by.
    """
    _require_importable(loaded.recipe)
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        name = _write_recipe(recipe, Path(folder))
        options = ["--ranks", str(num_ranks), "--run-dir", str(rundir.path)]
        options += [*(["--resume"] if resume else []), *([TRUST_CODE] if has_plugins(loaded.recipe) else [])]
        environ = {
            **{name: value for name, value in os.environ.items() if name not in _COLOR_VARIABLES or not is_notebook()},
            COMMAND_VARIABLE: json.dumps(["python", *sys.argv]),
            "PYTHONPATH": os.pathsep.join(each or str(Path.cwd()) for each in sys.path),
        }
        with _open_outputs(num_ranks, rundir) as outputs:
            ended = launch_verb(
                ["train", *options, name, *overrides],
                num_ranks,
                environ,
                grace_s=loaded.recipe.checkpoint.grace.seconds,
                streams=outputs.streams,
            )
    if ended.code == INTERRUPTED:
        raise KeyboardInterrupt
    if ended.code not in (0, PREEMPTED):
        kinds = {each.exit_code: each for each in (CheckpointError, NonFiniteLossError)}
        message = ended.sentence or outputs.describe_error(ended.code)
        raise kinds.get(ended.code, PacelineError)(message)
    return rundir.read_result().of(rundir.path)


def _require_importable(recipe: Recipe) -> None:
    """Raise `RecipeError` for a plugin that a new process could not import."""
    for plugin in plugins_of(recipe):
        module = plugin.name.partition(":")[0]
        try:
            is_known = module != "__main__" and importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):
            is_known = False
        if not is_known:
            raise RecipeError(
                f"{plugin.field}: {plugin.name} is defined in a notebook, a terminal or a file that other processes "
                f"cannot import (move it to a module, such as parts.py beside it, or leave ranks out)"
            )


def _write_recipe(recipe: str | Path | Recipe | Mapping[str, Any], folder: Path) -> str:
    """Return the name of `recipe`, or of a file in `folder` with its values."""
    if isinstance(recipe, str | Path):
        return str(recipe)
    values = recipe.given_values() if isinstance(recipe, Recipe) else dict(recipe)
    base = values.get("extends")
    if isinstance(base, str) and Path(base).expanduser().exists():  # a file extends another from its own folder
        values["extends"] = str(Path(base).expanduser().resolve())
    path = folder / "script.yaml"  # as a recipe of this process is named
    write_new(path, to_yaml_text(values))
    return str(path)


class _Outputs:
    """Pass on what the ranks print, and keep their errors.

    In a notebook, and where this process's stdout is not a file either, stdout comes through a pipe.
    """

    def __init__(self, num_ranks: int, view: NotebookView | None) -> None:
        self._num_ranks = num_ranks
        self._view = view
        self._errors: list[tuple[int, str]] = []  # in the order of arrival
        self._readers: list[threading.Thread] = []
        self._writers = [self._open_pipe(partial(self._read_stderr, rank)) for rank in range(num_ranks)]
        self._stdout = None if view is None and _has_stdout() else self._open_pipe(self._print)

    def streams(self, rank: int) -> tuple[int | None, int | None]:
        """Return the descriptors for the stdout and the stderr of `rank`; None is this process's own."""
        return self._stdout, self._writers[rank]

    def describe_error(self, code: int) -> str:
        """Return the first error that a rank has printed, with its rank unless all have the same."""
        rank, message = next(iter(self._errors), (0, f"the ranks ended with exit code {code}"))
        is_common = code == PacelineError.exit_code and (rank == 0 or (0, message) in self._errors)
        is_named = is_common or message.startswith("rank ")
        return message if is_named else f"rank {rank} of {self._num_ranks}: {message}"

    def close(self) -> None:
        """Wait for the last output."""
        for each in (*self._writers, *([] if self._stdout is None else [self._stdout])):
            os.close(each)
        for reader in self._readers:
            reader.join(_CLOSE_S)

    def _open_pipe(self, on_line: Callable[[str], None]) -> int:
        """Return a descriptor to write to; `on_line` gets each line, in a thread."""
        read, write = os.pipe()

        def follow() -> None:
            with os.fdopen(read, encoding="utf-8", errors="replace") as file:
                for line in file:
                    on_line(line.rstrip("\n"))

        reader = threading.Thread(target=follow, name="rank output", daemon=True)
        reader.start()
        self._readers.append(reader)
        return write

    def _read_stderr(self, rank: int, line: str) -> None:
        if line.startswith(_ERROR_PREFIX):
            self._errors.append((rank, line.removeprefix(_ERROR_PREFIX)))  # which becomes an exception
        else:
            print(line, file=sys.stderr, flush=True)

    def _print(self, line: str) -> None:
        if self._view is not None:
            self._view.add_line(line)
        else:
            print(line, flush=True)


def _has_stdout() -> bool:
    """Return whether Python's stdout is that of the process."""
    try:
        return sys.stdout.fileno() == 1
    except (OSError, ValueError, AttributeError):  # of a notebook or of pytest
        return False


@contextlib.contextmanager
def _open_outputs(num_ranks: int, rundir: RunDir) -> Iterator[_Outputs]:
    view = open_view() if is_notebook() else None
    outputs = _Outputs(num_ranks, view)
    has_ended = threading.Event()
    follower = threading.Thread(target=_follow_steps, args=(rundir, view, has_ended), name="progress", daemon=True)
    if view is not None:
        view.add_line(f"starting {count(num_ranks, 'rank')}")
        follower.start()
    try:
        yield outputs
    finally:
        outputs.close()
        if view is not None:
            has_ended.set()
            follower.join()
            view.close()


def _follow_steps(rundir: RunDir, view: NotebookView, has_ended: threading.Event) -> None:
    """Draw each step that rank 0 logs."""
    num_seen, is_last = 0, False
    while not is_last:
        is_last = has_ended.wait(_FOLLOW_S)
        with contextlib.suppress(OSError, PacelineError, ValueError, KeyError, TypeError):  # it may be written just now
            total_steps = int(rundir.read_plan()["total_steps"])
            rows = list(read_lines(rundir.steps, lambda number: None))
            for row in rows[num_seen:]:
                view.step(from_step_row(row), total_steps)
            num_seen = len(rows)
