"""Create folders atomically: write into a folder beside the target under a lock, then rename it."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from paceline.core.errors import DataError
from paceline.core.files import RefusedFileError, make_folder, move_without_overwriting
from paceline.data.lease import acquire_file_lock
from paceline.data.sources.places import printable


@contextlib.contextmanager
def create_folder_atomically(out: Path, suffix: str, lock_name: str) -> Iterator[Path]:
    """Yield an empty folder `.NAME.SUFFIX` beside `out` and rename it to `out`; remove it on any error.

    `lock_name` is the name of the lock file in it. Raise `DataError` if another process holds the lock, or if the folder was
    not left by an earlier call. Raise `FileExistsError` if `out` exists at the end.
    """
    beside = out.with_name(f".{out.name}.{suffix}")
    try:
        make_folder(beside, parents=True)
    except RefusedFileError as error:
        raise DataError(f"{printable(beside)}: {error.strerror} (remove it, or write elsewhere)") from error
    # The lock file identifies what a killed call has left; any other folder of that name belongs to the user.
    names = sorted(path.name for path in beside.iterdir())
    if names and lock_name not in names:
        raise DataError(
            f"{printable(beside)}: holds {printable(names[0])}, which no earlier attempt has left (move it away, or "
            f"write elsewhere)"
        )
    lock = acquire_file_lock(beside / lock_name, is_exclusive=True, should_wait=False)
    if lock is None:
        raise DataError(f"{printable(beside)}: another process is writing it (wait for it, or end it)")
    with contextlib.closing(lock):
        try:
            for each in beside.iterdir():
                if each.name != lock_name:
                    shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
            yield beside
            move_without_overwriting(beside, out)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        (out / lock_name).unlink()  # last, so that the folder of a killed call stays recognizable
