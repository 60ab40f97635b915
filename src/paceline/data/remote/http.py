"""Read byte ranges of files over HTTP(S) with persistent connections; standard library only."""

import io
import re
import ssl
import threading
import time
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from socket import socket
from typing import Any, Final
from urllib.parse import SplitResult, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from paceline.core.urls import CREDENTIALS
from paceline.data.remote.address import Address
from paceline.data.remote.credentials import Credentials, basic, credentials_for
from paceline.data.remote.transport import LastingError, PassingError, Piece

_STALLED_S = 30.0
# Minimum rate over `_STALLED_S`; a piece of 8 MiB takes 14 minutes at this rate.
_LEAST_BYTES_PER_S: Final = 10_000
_MOST_REDIRECTIONS = 5
_REDIRECTIONS = {301, 302, 303, 307, 308}
_PASSING = {408, 425, 429, 500, 502, 503, 504}
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_NONE_THERE = re.compile(r"bytes \*/(\d+)")
_FIXES = {
    401: f"set {CREDENTIALS}=https://NAME:PASSWORD@HOST/PATH, or write the host into ~/.netrc",
    403: f"allow reading it, or set {CREDENTIALS} to its signed URL",
    404: "correct data.source.root",
    410: "correct data.source.root",
}


# A response is used only if it says which bytes of how many it contains (RFC 9110, section 14). Proxies are those of
# `urllib`. Redirects are followed, but not from HTTPS to HTTP, and credentials go only to the first server.
class Http:
    """Read ranges over HTTP(S); it is an error if a server sends (nearly) nothing for `stalled_s` seconds."""

    def __init__(self, stalled_s: float = _STALLED_S) -> None:
        self._stalled_s = stalled_s
        self._idle: dict[tuple[str, str], list[HTTPConnection]] = {}
        self._is_closed = False
        self._tls: ssl.SSLContext | None = None
        self._credentials: dict[str, Credentials] = {}
        self._lock = threading.Lock()
        self._proxies = getproxies()

    def read(self, address: Address, start: int, stop: int) -> Piece:
        """Return bytes [start, stop) of a file, fewer only at its end."""
        credentials = self._credentials_for(address)
        url = address.parts._replace(query=credentials.query).geturl() if credentials.query else address.url
        for _ in range(_MOST_REDIRECTIONS):
            parts = urlsplit(url)
            headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity", "User-Agent": "paceline"}
            is_same_server = (parts.scheme, _host(parts)) == (address.parts.scheme, _host(address.parts))
            if credentials.authorization and is_same_server:
                headers["Authorization"] = credentials.authorization
            answer = self._ask(parts, headers, start, stop)
            if isinstance(answer, Piece):
                return answer
            url = urljoin(url, answer)
            scheme = urlsplit(url).scheme
            if scheme not in ("http", "https"):
                raise LastingError("redirects to a URL that is not http", "correct data.source.root")
            if parts.scheme == "https" and scheme == "http":
                raise LastingError("redirects from https to http, which is not secure", "correct data.source.root")
        raise LastingError(f"redirects more than {_MOST_REDIRECTIONS} times", "correct data.source.root")

    def close(self) -> None:
        """Close idle connections now and busy ones when they are released."""
        with self._lock:
            self._is_closed = True
            connections = [each for idle in self._idle.values() for each in idle]
            self._idle.clear()
        for connection in connections:
            connection.close()

    def _credentials_for(self, address: Address) -> Credentials:
        if address.url not in self._credentials:  # at most one entry per shard
            self._credentials[address.url] = credentials_for(address.url)
        return self._credentials[address.url]

    def _ask(self, parts: SplitResult, headers: dict[str, str], start: int, stop: int) -> Piece | str:
        """Send a request; return the bytes, or the URL of a redirect."""
        connection, is_used = self._connection(parts)
        try:
            try:
                response = self._send(connection, parts, headers)
            except (HTTPException, OSError):
                if not is_used:
                    raise
                connection.close()  # the server has closed the idle connection; retry with a new one
                connection = self._new(parts)
                response = self._send(connection, parts, headers)
            answer = _answer(response, start, stop)
        except ssl.SSLCertVerificationError as error:
            connection.close()
            fix = "have it signed, or name the file of its authority in SSL_CERT_FILE"
            raise LastingError(f"the certificate of its server is not trusted: {error.verify_message}", fix) from error
        except (HTTPException, OSError, ValueError) as error:
            connection.close()
            raise PassingError(_reason(error, self._stalled_s)) from error
        except BaseException:
            connection.close()  # it may still send the rest of the response
            raise
        self._give_back(connection, parts, stays=response.isclosed() and not response.will_close)
        return answer

    def _give_back(self, connection: HTTPConnection, parts: SplitResult, *, stays: bool) -> None:
        with self._lock:
            if stays and not self._is_closed:
                self._idle.setdefault((parts.scheme, _host(parts)), []).append(connection)
                return
        connection.close()

    def _send(self, connection: HTTPConnection, parts: SplitResult, headers: dict[str, str]) -> HTTPResponse:
        target = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
        if parts.scheme == "http" and self._proxy(parts):
            target = f"http://{_host(parts)}{target}"
        connection.request("GET", target, headers={**headers, "Host": _host(parts)})
        return connection.getresponse()

    def _connection(self, parts: SplitResult) -> tuple[HTTPConnection, bool]:
        """Return a connection, and whether it was used before."""
        with self._lock:
            idle = self._idle.get((parts.scheme, _host(parts)))
            if idle:
                return idle.pop(), True
        return self._new(parts), False

    def _new(self, parts: SplitResult) -> HTTPConnection:
        proxy = self._proxy(parts)
        target = proxy or parts
        try:
            host, port = target.hostname or "", target.port
        except ValueError as error:
            raise LastingError(f"has no port: {error}", "correct data.source.root") from error
        if parts.scheme == "http":
            connection = HTTPConnection(host, port, timeout=self._stalled_s)
            connection.response_class = self._response  # type: ignore[assignment]
            return connection
        connection = HTTPSConnection(host, port, timeout=self._stalled_s, context=self._trusted())
        connection.response_class = self._response  # type: ignore[assignment]
        if proxy:
            authorization = basic(proxy)
            connection.set_tunnel(
                parts.hostname or "", parts.port or 443, {"Proxy-Authorization": authorization} if authorization else {}
            )
        return connection

    def _response(self, sock: socket, *args: Any, **options: Any) -> HTTPResponse:
        return HTTPResponse(_Paced(sock, self._stalled_s), *args, **options)  # type: ignore[arg-type]

    def _trusted(self) -> ssl.SSLContext:
        with self._lock:
            self._tls = self._tls or ssl.create_default_context()
            return self._tls  # created once and only if needed: it takes 30 ms

    def _proxy(self, parts: SplitResult) -> SplitResult | None:
        text = self._proxies.get(parts.scheme)
        if not text or proxy_bypass(parts.hostname or ""):
            return None
        return urlsplit(text if "://" in text else f"http://{text}")


class _TooSlowError(OSError):
    """The server sends less than the minimum rate."""


class _Paced(io.RawIOBase):
    """Read from a connected socket and enforce a minimum rate; a socket timeout applies only to a single `recv`.

    It replaces the socket of one response, of which `http.client` calls only `makefile`.
    """

    def __init__(self, sock: socket, stalled_s: float) -> None:
        self._file = sock.makefile("rb", buffering=0)  # keeps the socket open
        self._stalled_s = stalled_s
        self._since_s = 0.0
        self._num_bytes = 0

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return a file to read the response from."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with available bytes. Raise `_TooSlowError` below the minimum rate since the first byte."""
        num_bytes = self._file.readinto(buffer) or 0
        now_s = time.monotonic()
        if not self._num_bytes:
            self._since_s = now_s
        self._num_bytes += num_bytes
        passed_s = now_s - self._since_s
        if passed_s >= self._stalled_s:
            if self._num_bytes < _LEAST_BYTES_PER_S * passed_s:
                raise _TooSlowError(f"only {self._num_bytes:,} bytes came in {passed_s:.3g} s")
            self._num_bytes = 0
        return num_bytes

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _answer(response: HTTPResponse, start: int, stop: int) -> Piece | str:
    """Read a response for bytes [start, stop) to its end; return the bytes, or the URL of a redirect."""
    status, headers = response.status, response.headers
    if status in _REDIRECTIONS and headers["Location"]:
        response.read(1 << 16)
        return str(headers["Location"])
    if status in _PASSING:
        pause = headers["Retry-After"] or ""
        raise PassingError(f"{status} {response.reason}", float(pause) if pause.isdecimal() else 0.0)
    if status == 416:
        total = _NONE_THERE.fullmatch(headers["Content-Range"] or "")
        return Piece(b"", int(total[1]) if total else start)
    if status not in (200, 206):
        raise LastingError(f"{status} {response.reason}", _FIXES.get(status, "correct data.source.root"))
    if (headers["Content-Encoding"] or "identity") != "identity":
        raise LastingError(
            "is sent compressed, which was not requested", "configure the server to send it uncompressed"
        )
    first, last, total_bytes = _range_of(response, start, stop)
    if first != start or last >= stop or (last < stop - 1 and last != total_bytes - 1):
        raise PassingError(f"sent bytes {first}-{last} of {total_bytes}, not {start}-{stop - 1}")
    data = response.read(last - first + 1)
    if len(data) != last - first + 1:
        raise PassingError(f"{len(data):,} of {last - first + 1:,} bytes came")
    if response.read(1):  # reading to the end makes the connection reusable
        raise PassingError(f"sent more than bytes {first}-{last}")
    return Piece(data, total_bytes)


def _range_of(response: HTTPResponse, start: int, stop: int) -> tuple[int, int, int]:
    """Return the first byte, the last byte and the size of the file, as the server declares them."""
    if response.status == 200:  # the whole file, which is correct if the range covers it
        length = response.headers["Content-Length"] or ""
        if start == 0 and length.isdecimal() and int(length) <= stop:
            return 0, int(length) - 1, int(length)
        raise LastingError(
            "is sent whole instead of the requested range (200 instead of 206)", "use a server that serves ranges"
        )
    content_range = _RANGE.fullmatch((response.headers["Content-Range"] or "").strip())
    if not content_range:
        raise LastingError("is sent without a valid Content-Range", "use a server that serves ranges")
    return int(content_range[1]), int(content_range[2]), int(content_range[3])


def _host(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]


def _reason(error: Exception, stalled_s: float) -> str:
    match error:
        case _TooSlowError():
            return str(error)
        case TimeoutError():
            return f"nothing received for {stalled_s:g} s"
        case IncompleteRead():
            return f"the connection ended after {len(error.partial):,} bytes"
        case OSError():
            return error.strerror or str(error)
    return f"{type(error).__name__}: {error}"
