"""The errors a user can meet. Each is one line that names the place, the value and the fix."""

from collections.abc import Iterable
from difflib import get_close_matches


class PacelineError(ValueError):
    """Say in one line what was wrong and how to mend it; `exit_code` is the process's.

    Anything else that escapes the program is a bug of ours and keeps its traceback.
    """

    exit_code = 2
    is_claimed = False
    """Whether this rank is the one of its run that speaks for the failure (see `parallel.group.meeting`)."""


class RecipeError(PacelineError):
    """A recipe, preset or override that cannot be used."""


class DataError(PacelineError):
    """A data set that cannot be read: a path, a class list, an image."""


class WorldError(PacelineError):
    """Ranks, devices, hosts or ports that do not fit together."""


class CheckpointError(PacelineError):
    """No usable checkpoint where one is needed."""

    exit_code = 4


class NonFiniteLossError(PacelineError):
    """The loss stopped being a number: the run ends, and what the weights have become is not saved.

    Its exit code is its own, so that nobody starts the ranks again: they would come to the same step.
    """

    exit_code = 3


class PeerLostError(PacelineError):
    """A rank failed because another one did. `is_explained` says that the other one speaks for itself."""

    exit_code = 1

    def __init__(self, message: str, *, is_explained: bool) -> None:
        super().__init__(message)
        self.is_explained = is_explained


class WatchError(PacelineError):
    """A rank that died, hangs or has other weights than its peers: the run ends."""

    exit_code = 1


def suggest_similar(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the known word closest to `word`, capitals as good as small letters, or ""."""
    folded: dict[str, str] = {}
    for each in known:
        folded.setdefault(each.casefold(), each)
    matches = get_close_matches(word.casefold(), list(folded), n=1, cutoff=0.6)
    return f" (did you mean '{folded[matches[0]]}'?)" if matches else ""
