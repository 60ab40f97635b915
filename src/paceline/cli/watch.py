"""`paceline watch`: run a training script that paceline did not write, and report where its time goes."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Final

from paceline.cli.options import WatchOptions
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.files import make_folder
from paceline.core.results import CpuResult
from paceline.core.run_dir import RunDir, write_atomic
from paceline.core.watch_result import RECORDS, RESULT, WatchResult
from paceline.core.world import World
from paceline.data.files import expand_path, printable
from paceline.parallel.environ import world_from_environ
from paceline.watch.command_cpu import CommandCpu
from paceline.watch.launch import WATCH_LOSSES, find_program, observed_environ, run_command
from paceline.watch.live import LiveLine
from paceline.watch.records import RecordReader

_OTHERS_S: Final = 10.0
"""Seconds to wait for the records of ranks that other launchers watch; a network file system may show them late."""


def watch(options: WatchOptions) -> int:
    """Run `paceline watch`, and return the exit code of the command."""
    find_program(options.command, os.environ)
    world = world_from_environ(os.environ)
    folder = _create_folder(options, world)
    records = folder.path / RECORDS
    make_folder(records, parents=True)
    reader = RecordReader(records)
    is_live = world.is_main and not options.as_json and sys.stderr is not None and sys.stderr.isatty()
    live = LiveLine(reader, sys.stderr) if is_live else None
    meter = CommandCpu()

    def on_wait() -> None:
        meter.update()
        if live is not None:
            live()

    sys.stdout.flush()
    environ = {**observed_environ(os.environ, records), WATCH_LOSSES: "1"}
    # Standard output has one JSON document and nothing else.
    code = run_command(options.command, environ, stdout=2 if options.as_json else None, on_wait=on_wait)
    if world.is_main:
        try:
            _read_all(reader, waits=world.world_size > 1)
            # Ranks that other launchers watch are no other programs.
            cpu = meter.result if world.world_size == 1 else None
            _report(options, reader, folder, code, cpu)
        except Exception as error:  # the training has ended, and its exit code counts
            reason = f"{type(error).__name__}: {error}"
            print(f"warning: {printable(records)}: was not summed up: {printable(reason)}", file=sys.stderr)
    return code


def _create_folder(options: WatchOptions, world: World) -> RunDir:
    if options.run_dir is None:
        if world.world_size > 1:
            raise RecipeError(
                f"--run-dir: is needed, as {world.launcher} starts {world.world_size} of this command (name a folder "
                f"that all hosts see, or put paceline watch before the launcher)"
            )
        return RunDir.claim(f"watch-{name_script(options.command)}", datetime.now())
    path = expand_path(str(options.run_dir))
    try:
        # Ranks of a launcher share the folder, and one of them is first.
        is_used = (path / RESULT).exists() if world.world_size > 1 else path.is_dir() and any(path.iterdir())
        if not is_used:
            make_folder(path, parents=True)
    except OSError as error:
        raise RecipeError(f"--run-dir: {path} cannot be used: {error.strerror} (name another)") from None
    if is_used:
        raise RecipeError(f"--run-dir: {path} is not empty (name a new folder)")
    return RunDir(path)


def name_script(command: Sequence[str]) -> str:
    """Return the name of the script or module of a command, such as `train`, for the name of a folder."""
    scripts = [Path(each).stem for each in command if each.endswith(".py")]
    modules = [each for option, each in pairwise(command) if option == "-m"]
    name = [*scripts, *modules[-1:], Path(command[0]).stem][0]
    return "".join(each if each.isalnum() or each in "._-" else "-" for each in name)[:60] or "command"


def _read_all(reader: RecordReader, *, waits: bool) -> None:
    limit_s = time.monotonic() + (_OTHERS_S if waits else 0.0)
    while True:
        reader.update()
        processes = reader.processes()
        expected = max((each.process.world_size for each in processes), default=0)
        has_all = len({each.process.rank for each in processes if each.has_ended}) >= expected > 0
        if has_all or time.monotonic() >= limit_s:
            return
        time.sleep(0.2)


def _report(options: WatchOptions, reader: RecordReader, folder: RunDir, code: int, cpu: CpuResult | None) -> None:
    """Write the result, the page and the trace, and print the result; failures are warnings, for the command has
    ended."""
    from paceline.watch.summary import choose_ranks, summarize

    processes = reader.processes()
    result = summarize(processes, options.command, code, options.warmup, reader.stray_notes(), cpu)
    with _warning(folder.path / RESULT):
        write_atomic(folder.path / RESULT, result.model_dump_json(indent=2) + "\n")
    if options.trace and processes:
        from paceline.watch.trace import TRACE, write_watch_trace

        with _warning(folder.path / TRACE):
            write_watch_trace(choose_ranks(processes)[0], folder.path / TRACE)
    with _warning(folder.report):
        from paceline.report.write import write_report

        write_report(folder)
    if options.as_json:
        print(result.model_dump_json(indent=2))
    elif result.steps:
        _print(result, folder, has_trace=options.trace)
    else:
        why = " ".join([result.verdict["evidence"], *result.notes])
        print(f"paceline watch: {printable(why)} ({printable(folder.path)})", file=sys.stderr)


def _print(result: WatchResult, folder: RunDir, *, has_trace: bool) -> None:
    from paceline.report.render_terminal import print_page
    from paceline.report.watch_page import build_watch_page

    # On stderr: stdout has what the command prints, and nothing else.
    print_page(build_watch_page(result, folder.path), sys.stderr)
    if has_trace:
        print(f"trace: {printable(folder.path / 'trace.json.gz')}: open it on https://ui.perfetto.dev", file=sys.stderr)
    print(f"report: {printable(folder.report)}", file=sys.stderr)


@contextlib.contextmanager
def _warning(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, PacelineError) as error:
        reason = getattr(error, "strerror", None) or error
        print(f"warning: {printable(path)}: was not written: {printable(str(reason))}", file=sys.stderr)
