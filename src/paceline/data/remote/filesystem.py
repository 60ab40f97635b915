"""Read byte ranges of files in S3 and other buckets through `fsspec`."""

import threading
from typing import Any

from paceline.data.remote.address import RemoteUrl
from paceline.data.remote.transport import ByteRange, PermanentError, TransientError

_FSSPEC_TIMEOUT_S = 60.0


# `fsspec` is imported on first use. Its event loop does not survive a fork, so each process opens its own file systems.
class FsspecTransport:
    """Read ranges through fsspec, with a timeout of `stalled_s` seconds if the file system is asynchronous."""

    def __init__(self, stalled_s: float = _FSSPEC_TIMEOUT_S) -> None:
        self._stalled_s = stalled_s
        self._lock = threading.Lock()
        self._filesystem: Any = None
        self._sizes: dict[str, int] = {}

    def read(self, address: RemoteUrl, start: int, stop: int) -> ByteRange:
        """Return bytes [start, stop) of a file, fewer only at its end."""
        system, path = self._open_filesystem(address)
        total = self._get_size(system, path)
        if start >= total:
            return ByteRange(b"", total)
        data = self._call(system, "cat_file", path, start=start, end=min(stop, total))
        if len(data) != min(stop, total) - start:
            raise TransientError(f"{len(data):,} of {min(stop, total) - start:,} bytes came")
        return ByteRange(bytes(data), total)

    def close(self) -> None:
        """Drop references; fsspec closes the file systems."""
        with self._lock:
            self._filesystem = None
            self._sizes.clear()

    def _open_filesystem(self, address: RemoteUrl) -> tuple[Any, str]:
        fsspec = _import_fsspec()
        with self._lock:
            try:
                if self._filesystem is None:
                    self._filesystem, path = fsspec.core.url_to_fs(address.url, skip_instance_cache=True)
                else:
                    path = self._filesystem._strip_protocol(address.url)
            except ImportError as error:
                raise PermanentError(
                    f"needs a package that is missing: {error}", "install it with pip, for example s3fs for s3://"
                ) from error
            except Exception as error:  # every file system has its own
                raise PermanentError(_get_error_text(error), "correct data.source.root") from error
            return self._filesystem, path

    def _get_size(self, system: Any, path: str) -> int:
        if path not in self._sizes:
            self._sizes[path] = int(self._call(system, "info", path)["size"])
        return self._sizes[path]

    def _call(self, system: Any, method: str, path: str, **options: int) -> Any:
        try:
            if system.async_impl:
                from fsspec.asyn import sync

                return sync(system.loop, getattr(system, f"_{method}"), path, timeout=self._stalled_s, **options)
            return getattr(system, method)(path, **options)
        except FileNotFoundError as error:
            raise PermanentError("does not exist", "correct data.source.root") from error
        except PermissionError as error:
            raise PermanentError(
                f"may not be read: {_get_error_text(error)}", "allow reading it, or give credentials"
            ) from error
        except Exception as error:  # every file system has its own
            raise TransientError(_get_error_text(error)) from error


def _import_fsspec() -> Any:
    try:
        import fsspec.core
    except ImportError as error:
        raise PermanentError("needs fsspec", "pip install 'paceline[remote]'") from error
    return fsspec


def _get_error_text(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
