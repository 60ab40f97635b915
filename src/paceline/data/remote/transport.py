"""Read byte ranges of remote files: URLs, the `Transport` protocol, retries, and buckets through fsspec."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import SplitResult, urlsplit

from paceline.core.errors import DataError
from paceline.core.units import count
from paceline.core.urls import public_url, url_origin
from paceline.data.files import printable

HTTP_SCHEMES: Final = ("http", "https")
# Schemes that fsspec reads. All others are refused, as a recipe may be untrusted: fsspec also has schemes that run
# templates, open SSH connections or read local files.
BUCKET_SCHEMES: Final = ("s3", "gs", "gcs", "abfs", "az", "hf")
_MAX_SHOWN_CHARS: Final = 40
_FSSPEC_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RemoteUrl:
    """The URL of a file, without credentials, which `http.find_credentials` adds to requests.

    Raise `DataError` for an unsupported scheme, and for a chained URL (`a::b`), which fsspec would follow.
    """

    url: str

    def __post_init__(self) -> None:
        scheme = self.url.partition("://")[0]
        shown = printable(scheme[:_MAX_SHOWN_CHARS])
        if "::" in scheme or ("::" in self.url and scheme.lower() not in HTTP_SCHEMES):
            raise DataError(f"data.source.root: {shown}://...: is a chain of URLs (name one URL, without ::)")
        if scheme.lower() not in (*HTTP_SCHEMES, *BUCKET_SCHEMES):
            known = ", ".join(f"{each}://" for each in (*HTTP_SCHEMES, *BUCKET_SCHEMES))
            raise DataError(f"data.source.root: {shown}://...: packs are not read from there (use {known} or a path)")
        try:
            self.parts.port  # noqa: B018 - raises for an invalid port or host
        except ValueError as error:
            raise DataError(f"data.source.root: {shown}://...: is not a URL: {error} (correct it)") from None

    def __repr__(self) -> str:
        return f"RemoteUrl({self.display_url})"

    @property
    def parts(self) -> SplitResult:
        """The parsed URL."""
        return urlsplit(self.url)

    @property
    def file_name(self) -> str:
        """The last component of the path."""
        return self.parts.path.rstrip("/").rpartition("/")[2]

    @property
    def display_url(self) -> str:
        """The URL for messages, on one line and without credentials."""
        return printable(public_url(self.url))

    @property
    def url_path(self) -> str:
        """Scheme, host, port and path. Raise `ValueError` for an invalid port."""
        return f"{url_origin(self.url)}{self.parts.path}"

    def join(self, name: str) -> "RemoteUrl":
        """Return the URL of the file `name` in this folder."""
        path = f"{self.parts.path.rstrip('/')}/{name}"
        return RemoteUrl(self.parts._replace(path=path).geturl())

    def sibling(self, name: str) -> "RemoteUrl":
        """Return the URL of the file `name` in the folder of this file."""
        path = self.parts.path.rstrip("/").rpartition("/")[0]
        return RemoteUrl(self.parts._replace(path=f"{path}/{name}").geturl())


@dataclass(frozen=True)
class ByteRange:
    """Bytes of a file of `total` bytes."""

    data: bytes
    total: int


class TransientError(Exception):
    """A temporary error; `retry_after_s` is the pause that the server requests before a retry."""

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class PermanentError(Exception):
    """A permanent error, with its fix."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.fix = fix


class Transport(Protocol):
    """Read byte ranges of files. Threads can share it; forked processes cannot."""

    def read(self, address: RemoteUrl, start: int, stop: int) -> ByteRange:
        """Return bytes [start, stop) of a file, fewer only at its end. Raise `TransientError` or `PermanentError`."""
        ...

    def close(self) -> None:
        """Release connections."""
        ...


def sleep(seconds: float) -> None:
    """Sleep for `seconds`."""
    threading.Event().wait(seconds)


@dataclass(frozen=True)
class RetryPolicy:
    """Retry with pauses of `first_pause_s`, doubled each time; a server can request up to `longest_pause_s`."""

    attempts: int = 6  # 15.5 s of pauses in total, enough for a server restart
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0
    pause: Callable[[float], None] = sleep

    def read(self, transport: Transport, address: RemoteUrl, start: int, stop: int) -> ByteRange:
        """Return what `transport.read` does. Raise `DataError` naming the URL after a permanent or the last error."""
        pause_s = self.first_pause_s
        for attempt in range(1, self.attempts + 1):
            try:
                return transport.read(address, start, stop)
            except PermanentError as error:
                raise DataError(f"{address.display_url}: {error} ({error.fix})") from error
            except TransientError as error:
                if attempt == self.attempts:
                    raise DataError(
                        f"{address.display_url}: cannot be read: {error}, {count(attempt, 'time')} (check the server "
                        f"and the network, then resume the run with --resume)"
                    ) from error
                self.pause(min(max(pause_s, error.retry_after_s), self.longest_pause_s))
                pause_s *= 2
        raise AssertionError("no attempt is made")


# `fsspec` is imported on first use. Its event loop does not survive a fork, so each process opens its own file systems.
class FsspecTransport:
    """Read ranges through fsspec, with a timeout per call if the file system is asynchronous."""

    def __init__(self, timeout_s: float = _FSSPEC_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._filesystem: Any = None
        self._sizes: dict[str, int] = {}

    def read(self, address: RemoteUrl, start: int, stop: int) -> ByteRange:
        """Return bytes [start, stop) of a file, fewer only at its end. Raise as `Transport.read`."""
        system, path = self._open_filesystem(address)
        total = self._get_size(system, path)
        if start >= total:
            return ByteRange(b"", total)
        data = self._call(system, "cat_file", path, start=start, end=min(stop, total))
        if len(data) != min(stop, total) - start:
            raise TransientError(f"{len(data):,} of {min(stop, total) - start:,} bytes were received")
        return ByteRange(bytes(data), total)

    def close(self) -> None:
        """Drop the references; fsspec closes the connections."""
        with self._lock:
            self._filesystem = None
            self._sizes.clear()

    def _open_filesystem(self, address: RemoteUrl) -> tuple[Any, str]:
        fsspec = _import_fsspec()
        with self._lock:
            try:
                if self._filesystem is None:
                    # No instance of the parent process, whose event loop does not run here.
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

                # The synchronous methods have no timeout.
                return sync(system.loop, getattr(system, f"_{method}"), path, timeout=self._timeout_s, **options)
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
