"""A folder of cached shards, shared by processes and runs, with a size limit and LRU eviction."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import DataError
from paceline.core.files import make_folder, open_lock_file
from paceline.data.lease import FileLock, acquire_file_lock
from paceline.data.sources.places import printable

_PARTIAL_SUFFIX = ".part"


# `DIGEST/` is a pack, named by the digest of its URL and header. It holds the index and `shards/`, in which an
# incomplete shard is called `NAME.BYTES.part`. Every user of the pack holds `DIGEST.lock` shared, and `room.lock` is
# held during eviction. Only packs that nobody uses are evicted, least recently opened shards first.
@dataclass(frozen=True)
class ShardCache:
    """The cache folder `top`, limited to `max_bytes`."""

    top: Path
    max_bytes: int

    def acquire(self, digest: str) -> FileLock:
        """Create the folder of a pack and lock it against eviction. Raise `DataError` if that fails."""
        try:
            self.top.mkdir(parents=True, exist_ok=True)
            lock = acquire_file_lock(_lock_path(self.top / digest), is_exclusive=False, should_wait=True)
            make_folder(self.top / digest)
            make_folder(self.get_shard_folder(digest))
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"data.source.cache: {printable(self.top)}: {reason} (name another folder)") from error
        assert lock is not None, "take() waits"
        return lock

    def get_shard_folder(self, digest: str) -> Path:
        """Return the folder of a pack's shards."""
        return self.top / digest / "shards"

    def reserve(self, partial: Path, num_bytes: int) -> bool:
        """Reserve `num_bytes` for the file `partial`, evicting shards if necessary; return whether they fit.

        Raise `OSError` if the folder is not writable.
        """
        if partial.exists():
            return True
        with contextlib.closing(self._lock_exclusively()):
            over = self._count_used_bytes() + num_bytes - self.max_bytes
            status = os.statvfs(self.top)
            over = max(over, num_bytes - status.f_bavail * status.f_frsize)
            if over > 0 and not self._evict(over):
                return False
            partial.parent.mkdir(parents=True, exist_ok=True)
            os.close(open_lock_file(partial))
        return True

    def _lock_exclusively(self) -> FileLock:
        lock = acquire_file_lock(self.top / "room.lock", is_exclusive=True, should_wait=True)
        assert lock is not None, "take() waits"
        return lock

    def _count_used_bytes(self) -> int:
        """Return the bytes of all files, counting incomplete ones with their final size."""
        # Keyed by final name, as a file may be renamed between listing and `stat`.
        sizes: dict[tuple[Path, str], int] = {}
        for path in (path for folder in self._iter_packs() for path in folder.glob("**/*")):
            if path.name.endswith(_PARTIAL_SUFFIX):
                sizes[path.parent, path.name.removesuffix(_PARTIAL_SUFFIX).rpartition(".")[0]] = _get_file_bytes(path)
            elif path.is_file():
                sizes.setdefault((path.parent, path.name), _get_file_bytes(path))
        return sum(sizes.values())

    def _iter_packs(self) -> Iterator[Path]:
        folders = (path for path in self.top.iterdir() if path.is_dir() and not path.is_symlink())
        # Folders without a lock are not the cache's.
        return (path for path in folders if _lock_path(path).is_file())

    def _evict(self, num_bytes: int) -> bool:
        """Evict shards of unused packs; return whether `num_bytes` were freed."""
        with contextlib.ExitStack() as locks:
            unused = {}
            for folder in self._iter_packs():
                lock = acquire_file_lock(_lock_path(folder), is_exclusive=True, should_wait=False)
                if lock is not None:
                    locks.callback(lock.close)
                    unused[folder] = lock
            shards = [path for folder in unused for path in (folder / "shards").glob("*")]
            freed, emptied = 0, set()
            if sum(_get_file_bytes(path) for path in shards) < num_bytes:
                return False  # evict nothing if it would not suffice
            for path in sorted(shards, key=_get_last_used_ns):
                if freed >= num_bytes:
                    break
                freed += _get_file_bytes(path)
                path.unlink()
                emptied.add(path.parent.parent)
            for folder in emptied:
                if not any((folder / "shards").glob("*")):
                    shutil.rmtree(folder, ignore_errors=True)
                    unused[folder].remove()
        return True


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _get_last_used_ns(shard: Path) -> int:
    return shard.stat().st_mtime_ns  # `RemoteShards` updates it on opening


def partial_path(whole: Path, num_bytes: int) -> Path:
    """Return the name of a shard of `num_bytes` while it is incomplete."""
    return whole.with_name(f"{whole.name}.{num_bytes}{_PARTIAL_SUFFIX}")


def _get_file_bytes(path: Path) -> int:
    with contextlib.suppress(ValueError):
        if path.name.endswith(_PARTIAL_SUFFIX):
            return int(path.name.removesuffix(_PARTIAL_SUFFIX).rpartition(".")[2])
    with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        return min(status.st_size, status.st_blocks * 512)  # the index of a one-file pack is mostly a hole
    return 0
