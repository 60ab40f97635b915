"""Create folders atomically: write into a folder beside the target under a lock, then rename it."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from paceline.core.errors import DataError
from paceline.core.files import RefusedFileError, make_folder, move_new
from paceline.data.lease import take
from paceline.data.sources.places import printable


@contextlib.contextmanager
def made_beside(out: Path, suffix: str, mark: str) -> Iterator[Path]:
    """Yield an empty folder `.NAME.SUFFIX` beside `out` and rename it to `out`; remove it on any error.

    `mark` is the name of the lock file in it. Raise `DataError` if another process holds the lock, or if the folder was
    not left by an earlier call. Raise `FileExistsError` if `out` exists at the end.
    """
    beside = out.with_name(f".{out.name}.{suffix}")
    try:
        make_folder(beside, parents=True)
    except RefusedFileError as error:
        raise DataError(f"{printable(beside)}: {error.strerror} (remove it, or write elsewhere)") from error
    # The lock file identifies what a killed call has left; any other folder of that name belongs to the user.
    names = sorted(path.name for path in beside.iterdir())
    if names and mark not in names:
        raise DataError(
            f"{printable(beside)}: holds {printable(names[0])}, which no earlier attempt has left (move it away, or "
            f"write elsewhere)"
        )
    lock = take(beside / mark, alone=True, wait=False)
    if lock is None:
        raise DataError(f"{printable(beside)}: another process is writing it (wait for it, or end it)")
    with contextlib.closing(lock):
        try:
            for each in beside.iterdir():
                if each.name != mark:
                    shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
            yield beside
            move_new(beside, out)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        (out / mark).unlink()  # last, so that the folder of a killed call stays recognizable
