"""The command line: one file a verb. Nothing here imports torch before a verb needs it."""

import os
import sys
import traceback
from typing import Any

import typer

from paceline.cli import started  # noqa: F401  first, for it takes the time
from paceline.cli.verbs import app
from paceline.core.errors import PacelineError, PeerLostError
from paceline.parallel.environ import world_from_environ

# The same class under typer's own click and under the separate package, depending on typer's version.
_UsageError: Any = typer.BadParameter.__mro__[1]


def main() -> None:
    """Run the program, and end the process with a documented exit code."""
    code = _run()
    sys.stdout.flush()
    sys.stderr.flush()
    if code and "torch.distributed" in sys.modules:
        os._exit(code)  # an orderly end could wait for ranks that are gone
    sys.exit(code)


def _run() -> int:
    try:
        code = app(standalone_mode=False)
    except PeerLostError as error:
        if not error.is_explained:
            _complain(str(error))
        return error.exit_code
    except PacelineError as error:
        _complain(str(error))
        return error.exit_code
    except _UsageError as error:
        if error.format_message():  # without words the help was shown
            _complain(f"{error.format_message()} (see --help)")
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except typer.Exit as error:
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        traceback.print_exc()
        world = world_from_environ(os.environ)
        _complain(f"rank {world.rank} of {world.world_size}: {type(error).__name__}: {error}")
        return 1
    return code if isinstance(code, int) else 0


def _complain(message: str) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
