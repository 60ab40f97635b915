"""The command line: one file a verb. Nothing here imports torch before a verb needs it."""

import contextlib
import errno
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import typer

from paceline.cli import started  # noqa: F401  first, for it takes the time
from paceline.cli.verbs import app
from paceline.core.console import ConsoleLostError, progress_console, secure_console, undelivered
from paceline.core.errors import PacelineError, PeerLostError, WorldError
from paceline.core.process import ignore_stop_signals
from paceline.data.sources.places import printable
from paceline.parallel.environ import end_with_launcher, world_from_environ

# The same class under typer's own click and under the separate package, depending on typer's version.
_UsageError: Any = typer.BadParameter.__mro__[1]
COMPLETE: Final = "--complete"
"""The first word where a shell asks what the last one may become; see `complete.py`."""
ORDERLY_S: Final = 10.0
"""For threads and packages to end after a verb has, in seconds. Chosen: as long as trackers had before."""


def main() -> None:
    """Run the program, and end the process with a documented exit code."""
    secure_console()
    with contextlib.suppress(PacelineError):  # the verb refuses variables that contradict one another
        end_with_launcher(os.environ, world_from_environ(os.environ))  # before the imports, which take seconds
    code = _delivered(_run())
    ignore_stop_signals()  # all has been written, and ending may take seconds: a late signal is not to change the code
    if code and "torch.distributed" in sys.modules:
        os._exit(code)  # an orderly end could wait for ranks that are gone
    leave(code)


def leave(code: int, orderly_s: float = ORDERLY_S) -> NoReturn:
    """End the process with `code`, in order where that takes no longer than `orderly_s`; all has been written.

    Python waits for threads, and packages do for their servers: a tracker's may never have an end.
    """
    if threading.active_count() > 1:
        timer = threading.Timer(orderly_s, os._exit, (code,))
        timer.daemon = True
        timer.start()
    sys.exit(code)


def _delivered(code: int) -> int:
    """Write what is buffered, and return `code`, or 1 where the JSON that was asked for could not be written."""
    lost = undelivered()
    if not lost or code:
        return code
    if lost != os.strerror(errno.EPIPE):  # a reader who has left knows
        _complain(f"stdout: cannot be written: {lost} (the result is in the run directory)")
    return 1


def _run() -> int:
    try:
        sys.argv = without_local_rank(sys.argv, os.environ)
        code = completed(sys.argv[2:]) if sys.argv[1:2] == [COMPLETE] else app(standalone_mode=False)
        sys.stdout.flush()  # here a pipe that is closed is explained
    except BaseException as error:
        progress_console(as_json=False)  # the error decides the code: what is still buffered is dropped if it must be
        return _explained(error)
    return code if isinstance(code, int) else 0


def without_local_rank(argv: list[str], environ: Mapping[str, str]) -> list[str]:
    """Return `argv` without the `--local-rank=N` that `python -m torch.distributed.launch` writes before all else.

    That launcher sets LOCAL_RANK too, which is what is read. Raise `WorldError` where the two differ.
    """
    option, _, rank = argv[1].partition("=") if len(argv) > 1 else ("", "", "")
    if option not in ("--local-rank", "--local_rank") or not rank:
        return argv
    if environ.get("LOCAL_RANK") != rank:
        known = environ.get("LOCAL_RANK", "not set")
        raise WorldError(f"{option}: {rank}, but LOCAL_RANK is {known} (leave it out, and start ranks with torchrun)")
    return [argv[0], *argv[2:]]


def completed(words: list[str]) -> int:
    """Print, for a shell, what the last of `words` may become, a line each; return the exit code."""
    from paceline.cli.complete import complete

    for each in complete(words, typer.main.get_command(app)):
        print(each)
    return 0


def _explained(error: BaseException) -> int:
    """Say what a person should know of `error`, and return the exit code."""
    match error:
        case PeerLostError() if error.is_explained:
            return error.exit_code
        case PacelineError():
            if error.is_claimed or _is_main():
                _complain(str(error))
            return error.exit_code
        case typer.Exit():
            return int(error.exit_code)
        case KeyboardInterrupt() | typer.Abort():
            return 130
        case BrokenPipeError() | SystemExit():  # typer makes the latter of the former
            return 1
        case ConsoleLostError() | OSError(errno=errno.ENAMETOOLONG):
            return _refused_by_the_system(error)
        case _ if isinstance(error, _UsageError):
            if error.format_message() and _is_main():  # without words the help was shown
                override = _override_for(error)
                _complain(override or f"{error.format_message()} (see --help)")
            return 2
    traceback.print_exception(error)
    world = world_from_environ(os.environ)
    _complain(f"rank {world.rank} of {world.world_size}: {type(error).__name__}: {error}")
    return 1


def _refused_by_the_system(error: OSError) -> int:
    """Say that output was lost, or that a path which a user named is too long; return the exit code."""
    if isinstance(error, ConsoleLostError):
        _complain(f"{error.strerror} (free some space, or write elsewhere)")
        return 1
    _complain(f"{str(error.filename)[:80]}...: {error.strerror} (name another)")
    return 2


def _override_for(error: Any) -> str:
    """Return what to say of a field that was written as an option, such as `--epochs`; "" where it is none."""
    option = getattr(error, "option_name", "") or ""
    takes_fields = any("KEY=VALUE" in str(each.metavar) for each in error.ctx.command.params) if error.ctx else False
    if not option.startswith("--") or not takes_fields:
        return ""
    from paceline.recipe.fields import paths_of

    after = sys.argv[sys.argv.index(option) + 1 :] if option in sys.argv else []
    said = [word.removeprefix(f"{option}=") for word in sys.argv if word.startswith(f"{option}=")] or after
    value = said[0] if said and not said[0].startswith("--") else "..."
    paths = paths_of(option[2:].replace("-", "_"))
    return f"{option}: is no option (write {' or '.join(f'{path}={value}' for path in paths)})" if paths else ""


def _is_main() -> bool:
    """Whether this process speaks for what all ranks refuse alike, before they meet."""
    try:
        return world_from_environ(os.environ).is_main
    except PacelineError:
        return True


def _complain(message: str) -> None:
    print(f"error: {printable(' '.join(message.split()))}", file=sys.stderr)
