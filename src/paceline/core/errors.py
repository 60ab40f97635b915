"""Errors for users. Each message is one line with the place, the value and the fix."""

from collections.abc import Iterable
from difflib import get_close_matches


class PacelineError(ValueError):
    """Base of errors that a user can fix. Any other exception that escapes the program is a bug and keeps its
    traceback."""

    exit_code = 2
    is_claimed = False
    """Whether this rank reports the failure of its run (see `parallel.process_group.rendezvous`)."""


class RecipeError(PacelineError):
    """A recipe, preset or override is invalid."""


class DataError(PacelineError):
    """A dataset cannot be read: a path, a class list, an image."""


class WorldError(PacelineError):
    """Ranks, devices, hosts or ports are inconsistent."""


class CheckpointError(PacelineError):
    """A checkpoint is needed, and none is usable."""

    exit_code = 4


class NonFiniteLossError(PacelineError):
    """The loss became NaN or infinite: the run ends, and its weights are not saved."""

    exit_code = 3  # its own, so that no launcher restarts the ranks: they would reach the same step


class PeerLostError(PacelineError):
    """A rank failed because another one did. If `is_explained`, the other rank reports the failure."""

    exit_code = 1

    def __init__(self, message: str, *, is_explained: bool) -> None:
        super().__init__(message)
        self.is_explained = is_explained


class WatchError(PacelineError):
    """A rank died, hangs, or has other weights than its peers: the run ends."""

    exit_code = 1


def suggest_similar(word: str, known: Iterable[str], section: str = "") -> str:
    """Return ` (did you mean 'x'?)` for the known word closest to `word`, ignoring case, or "".

    Fields of a `section` are written with it, as in `'optim.lr'`.
    """
    folded: dict[str, str] = {}
    for each in known:
        folded.setdefault(each.casefold(), each)
    matches = get_close_matches(word.casefold(), list(folded), n=1, cutoff=0.6)
    before = f"{section}." if section else ""
    return f" (did you mean '{before}{folded[matches[0]]}'?)" if matches else ""
