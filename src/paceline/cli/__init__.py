"""Run the command line: print errors in one line, and exit with a documented code."""

import contextlib
import errno
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import typer

# Nothing here may import torch: `paceline --help` and completion answer without it.
from paceline.cli import start_time  # noqa: F401  first, because it takes the start time
from paceline.cli.app import app, program_for
from paceline.core.console import ConsoleLostError, lost_output_reason, progress_console, secure_console
from paceline.core.errors import PacelineError, PeerLostError, WorldError
from paceline.core.process import ignore_stop_signals
from paceline.data.files import printable
from paceline.parallel.environ import end_with_launcher, world_from_environ

# The same class under typer's own click and under the separate package, depending on typer's version.
_UsageError: Any = typer.BadParameter.__mro__[1]
COMPLETE: Final = "--complete"
"""First argument of a shell that asks for completions; see `complete.py`."""
SHUTDOWN_TIMEOUT_S: Final = 10.0
"""Seconds that threads and packages get to shut down after a verb. Trackers used to get as many."""


def main() -> None:
    """Run the program, and exit with a documented code."""
    secure_console()
    with contextlib.suppress(PacelineError):  # the verb reports contradictory variables
        end_with_launcher(os.environ, world_from_environ(os.environ))  # before the imports, which take seconds
    code = _flush_stdout(_run())
    ignore_stop_signals()  # all is written; a late signal must not change the code
    if code and "torch.distributed" in sys.modules:
        os._exit(code)  # the interpreter's shutdown could wait for ranks that are gone
    exit_process(code)


def exit_process(code: int, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> NoReturn:
    """Exit with `code`, and skip the interpreter's shutdown if it takes longer than `timeout_s` seconds."""
    # Python waits for non-daemon threads, and packages wait for their servers: a tracker's may never stop.
    if threading.active_count() > 1:
        timer = threading.Timer(timeout_s, os._exit, (code,))
        timer.daemon = True
        timer.start()
    sys.exit(code)


def _flush_stdout(code: int) -> int:
    """Flush stdout and return `code`, or 1 if requested JSON could not be written."""
    lost = lost_output_reason()
    if not lost or code:
        return code
    if lost != os.strerror(errno.EPIPE):  # the reader has closed the pipe
        _print_error(f"stdout: cannot be written: {lost} (the result is in the run directory)")
    return 1


def _run() -> int:
    try:
        sys.argv = without_local_rank(sys.argv, os.environ)
        args = sys.argv[1:]
        code = print_completions(args[1:]) if args[:1] == [COMPLETE] else program_for(args)(standalone_mode=False)
        sys.stdout.flush()  # raises for a closed pipe while errors are still reported
    except BaseException as error:
        progress_console(as_json=False)  # the error decides the exit code, so a failing flush is ignored
        return _report_error(error)
    return code if isinstance(code, int) else 0


def without_local_rank(argv: list[str], environ: Mapping[str, str]) -> list[str]:
    """Return `argv` without the `--local-rank=N` that `python -m torch.distributed.launch` puts first.

    Raise `WorldError` if it differs from LOCAL_RANK, which that launcher sets as well.
    """
    option, _, rank = argv[1].partition("=") if len(argv) > 1 else ("", "", "")
    if option not in ("--local-rank", "--local_rank") or not rank:
        return argv
    if environ.get("LOCAL_RANK") != rank:
        known = environ.get("LOCAL_RANK", "not set")
        raise WorldError(f"{option}: {rank}, but LOCAL_RANK is {known} (leave it out, and start ranks with torchrun)")
    return [argv[0], *argv[2:]]


def print_completions(args: list[str]) -> int:
    """Print completions of the last of `args` for a shell, one per line, and return the exit code."""
    from paceline.cli.complete import complete

    for each in complete(args, typer.main.get_command(app)):
        print(each)
    return 0


def _report_error(error: BaseException) -> int:
    """Print `error` as one line, an unexpected one with its traceback; return the exit code."""
    match error:
        case PeerLostError() if error.is_explained:
            return error.exit_code
        case PacelineError():
            if error.is_claimed or _is_main():
                _print_error(str(error))
            return error.exit_code
        case typer.Exit():
            return int(error.exit_code)
        case KeyboardInterrupt() | typer.Abort():
            return 130
        case BrokenPipeError() | SystemExit():  # typer turns the former into the latter
            return 1
        case ConsoleLostError() | OSError(errno=errno.ENAMETOOLONG):
            return _report_os_error(error)
        case _ if isinstance(error, _UsageError):
            if error.format_message() and _is_main():  # an empty message means that the help was shown
                override = _suggest_override(error)
                _print_error(override or f"{error.format_message()} (see --help)")
            return 2
    traceback.print_exception(error)
    world = world_from_environ(os.environ)
    _print_error(f"rank {world.rank} of {world.world_size}: {type(error).__name__}: {error}")
    return 1


def _report_os_error(error: OSError) -> int:
    """Print lost output or a path that is too long; return the exit code."""
    if isinstance(error, ConsoleLostError):
        _print_error(f"{error.strerror} (free some space, or write elsewhere)")
        return 1
    _print_error(f"{str(error.filename)[:80]}...: {error.strerror} (name another)")
    return 2


def _suggest_override(error: Any) -> str:
    """Return a hint to write KEY=VALUE if a field was given as an option, such as `--epochs`; else ""."""
    option = getattr(error, "option_name", "") or ""
    takes_fields = any("KEY=VALUE" in str(each.metavar) for each in error.ctx.command.params) if error.ctx else False
    if not option.startswith("--") or not takes_fields:
        return ""
    from paceline.recipe.errors import paths_of

    after = sys.argv[sys.argv.index(option) + 1 :] if option in sys.argv else []
    values = [word.removeprefix(f"{option}=") for word in sys.argv if word.startswith(f"{option}=")] or after
    value = values[0] if values and not values[0].startswith("--") else "..."
    paths = paths_of(option[2:].replace("-", "_"))
    return f"{option}: is not an option (write {' or '.join(f'{path}={value}' for path in paths)})" if paths else ""


def _is_main() -> bool:
    """Return whether this process prints errors that all ranks raise alike."""
    try:
        return world_from_environ(os.environ).is_main
    except PacelineError:
        return True


def _print_error(message: str) -> None:
    print(f"error: {printable(' '.join(message.split()))}", file=sys.stderr)
