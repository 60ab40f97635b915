"""Make a folder that is whole or not there: in a folder beside it, which one process has at a time and then renames.

The folder beside holds a mark, which is also its lock, so that what a killed process has left is told from what
somebody else keeps under that name: only the first is removed.
"""

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
    """Give an empty folder `.NAME.SUFFIX` beside `out`, which becomes `out`; when anything goes wrong it is removed.

    `mark` is the name of its lock. Raise `DataError` where another process has it, and where it was made by anything
    but an earlier call that was killed; raise `FileExistsError` where something is at `out` by the end.
    """
    beside = out.with_name(f".{out.name}.{suffix}")
    try:
        make_folder(beside, parents=True)
    except RefusedFileError as error:
        raise DataError(f"{printable(beside)}: {error.strerror} (remove it, or write elsewhere)") from error
    names = sorted(path.name for path in beside.iterdir())
    if names and mark not in names:
        raise DataError(
            f"{printable(beside)}: holds {printable(names[0])}, which no earlier attempt has left (move it away, or "
            f"write elsewhere)"
        )
    lease = take(beside / mark, alone=True, wait=False)
    if lease is None:
        raise DataError(f"{printable(beside)}: another process is writing it (wait for it, or end it)")
    with contextlib.closing(lease):
        try:
            for each in beside.iterdir():
                if each.name != mark:
                    shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
            yield beside
            move_new(beside, out)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        (out / mark).unlink()  # last, so that what a kill leaves before can be told
