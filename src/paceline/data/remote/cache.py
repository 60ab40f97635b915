"""A folder of kept shards that processes and runs share: how many bytes it may hold, and which go first.

`DIGEST/` is a pack, where the digest is of its header and so of its content: an index, and below `shards/` the shards
that are here, each under its name when it is whole and as `NAME.BYTES.part` before. `DIGEST.lock` is shared by all who
use the pack; `room.lock` is held while room is made. A pack that nobody uses gives up its shards, whichever were opened
longest ago, for one that needs the room.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import DataError
from paceline.core.files import make_folder, open_lock_file
from paceline.data.lease import Lease, take
from paceline.data.sources.places import printable

_PART = ".part"


@dataclass(frozen=True)
class Cache:
    """The folder `top`, which holds up to `max_bytes`; what is in use is never removed for another."""

    top: Path
    max_bytes: int

    def use(self, digest: str) -> Lease:
        """Return the lock of a pack, held with others, whose folder is made. Raise `DataError` where it cannot be."""
        try:
            self.top.mkdir(parents=True, exist_ok=True)
            lease = take(_lock_of(self.top / digest), alone=False, wait=True)
            make_folder(self.top / digest)
            make_folder(self.shards_of(digest))
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"data.source.cache: {printable(self.top)}: {reason} (name another folder)") from error
        assert lease is not None, "it was waited for"
        return lease

    def shards_of(self, digest: str) -> Path:
        """Return where the shards of a pack are kept."""
        return self.top / digest / "shards"

    def make_room(self, part: Path, num_bytes: int) -> bool:
        """Make the file `part`, which from then on counts as `num_bytes`; whether there is room for it.

        Packs that nobody uses give up shards for it. Raise `OSError` where the folder cannot be written to.
        """
        if part.exists():
            return True
        with contextlib.closing(self._alone()):
            over = self._taken() + num_bytes - self.max_bytes
            status = os.statvfs(self.top)
            over = max(over, num_bytes - status.f_bavail * status.f_frsize)
            if over > 0 and not self._give_up(over):
                return False
            part.parent.mkdir(parents=True, exist_ok=True)
            os.close(open_lock_file(part))
        return True

    def _alone(self) -> Lease:
        lease = take(self.top / "room.lock", alone=True, wait=True)
        assert lease is not None, "it was waited for"
        return lease

    def _taken(self) -> int:
        """Return the bytes of all files, of those under way the bytes that they will have.

        A file is counted by the name that it will have: it may be renamed to that between being listed and looked at.
        """
        sizes: dict[tuple[Path, str], int] = {}
        for path in (path for folder in self._packs() for path in folder.glob("**/*")):
            if path.name.endswith(_PART):
                sizes[path.parent, path.name.removesuffix(_PART).rpartition(".")[0]] = _size_of(path)
            elif path.is_file():
                sizes.setdefault((path.parent, path.name), _size_of(path))
        return sum(sizes.values())

    def _packs(self) -> Iterator[Path]:
        """Give the folders of packs: those with a lock. What else somebody keeps in `top` is nothing to this cache."""
        folders = (path for path in self.top.iterdir() if path.is_dir() and not path.is_symlink())
        return (path for path in folders if _lock_of(path).is_file())

    def _give_up(self, num_bytes: int) -> bool:
        """Remove shards of packs that nobody uses, those that were opened longest ago first; whether it was enough."""
        with contextlib.ExitStack() as held:
            unused = {}
            for folder in self._packs():
                lease = take(_lock_of(folder), alone=True, wait=False)
                if lease is not None:
                    held.callback(lease.close)
                    unused[folder] = lease
            shards = [path for folder in unused for path in (folder / "shards").glob("*")]
            freed, emptied = 0, set()
            if sum(_size_of(path) for path in shards) < num_bytes:
                return False  # nothing is given up in vain
            for path in sorted(shards, key=_opened_ns):
                if freed >= num_bytes:
                    break
                freed += _size_of(path)
                path.unlink()
                emptied.add(path.parent.parent)
            for folder in emptied:
                if not any((folder / "shards").glob("*")):
                    shutil.rmtree(folder, ignore_errors=True)
                    unused[folder].remove()
        return True


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _opened_ns(shard: Path) -> int:
    """Return when a shard was opened last, which `RemoteShards` stamps on it."""
    return shard.stat().st_mtime_ns


def part_of(whole: Path, num_bytes: int) -> Path:
    """Return what a shard of `num_bytes` is called before it is whole."""
    return whole.with_name(f"{whole.name}.{num_bytes}{_PART}")


def _size_of(path: Path) -> int:
    """Return the bytes that a file takes, or will; an index may be mostly a hole."""
    with contextlib.suppress(ValueError):
        if path.name.endswith(_PART):
            return int(path.name.removesuffix(_PART).rpartition(".")[2])
    with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        return min(status.st_size, status.st_blocks * 512)
    return 0
