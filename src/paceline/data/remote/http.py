"""Ranges of files over HTTP(S), on connections that stay open. Nothing but the standard library.

What a server answers is believed only where it says which bytes of how many it sends (RFC 9110, section 14), and only
where it keeps sending. Proxies are those that `urllib` finds. Redirections are followed, but not from https to http,
and without the user name and the password of the first server.
"""

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
_LEAST_BYTES_PER_S: Final = 10_000
"""A server that sends less, over `_STALLED_S` on end, is given up: a piece of 8 MiB takes 14 minutes at this rate."""
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


class Http:
    """Reads ranges over HTTP(S); a server that sends nothing, or next to nothing, for `stalled_s` is given up."""

    def __init__(self, stalled_s: float = _STALLED_S) -> None:
        self._stalled_s = stalled_s
        self._idle: dict[tuple[str, str], list[HTTPConnection]] = {}
        self._is_closed = False
        self._tls: ssl.SSLContext | None = None
        self._credentials: dict[str, Credentials] = {}
        self._lock = threading.Lock()
        self._proxies = getproxies()

    def read(self, address: Address, start: int, stop: int) -> Piece:
        """Return bytes [start, stop) of a file, fewer only where it ends before `stop`."""
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
                raise LastingError("leads to somewhere that is not http", "correct data.source.root")
            if parts.scheme == "https" and scheme == "http":
                raise LastingError("leads from https to http, where anyone may change it", "correct data.source.root")
        raise LastingError(f"leads on more than {_MOST_REDIRECTIONS} times", "correct data.source.root")

    def close(self) -> None:
        """Close all connections, those in use when they are given back."""
        with self._lock:
            self._is_closed = True
            connections = [each for idle in self._idle.values() for each in idle]
            self._idle.clear()
        for connection in connections:
            connection.close()

    def _credentials_for(self, address: Address) -> Credentials:
        if address.url not in self._credentials:  # of which there are no more than shards
            self._credentials[address.url] = credentials_for(address.url)
        return self._credentials[address.url]

    def _ask(self, parts: SplitResult, headers: dict[str, str], start: int, stop: int) -> Piece | str:
        """Return what is asked for, or where the server says it is."""
        connection, is_used = self._connection(parts)
        try:
            try:
                response = self._send(connection, parts, headers)
            except (HTTPException, OSError):
                if not is_used:
                    raise
                connection.close()  # the server had closed it meanwhile; that is no failure
                connection = self._new(parts)
                response = self._send(connection, parts, headers)
            answer = _answer(response, start, stop)
        except ssl.SSLCertVerificationError as error:
            connection.close()
            fix = "have it signed, or name the file of its authority in SSL_CERT_FILE"
            raise LastingError(
                f"the certificate of its server is not to be trusted: {error.verify_message}", fix
            ) from error
        except (HTTPException, OSError, ValueError) as error:
            connection.close()
            raise PassingError(_reason(error, self._stalled_s)) from error
        except BaseException:
            connection.close()  # what it still sends belongs to nobody
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
        """Return a connection, and whether it has been used before."""
        with self._lock:
            idle = self._idle.get((parts.scheme, _host(parts)))
            if idle:
                return idle.pop(), True
        return self._new(parts), False

    def _new(self, parts: SplitResult) -> HTTPConnection:
        proxy = self._proxy(parts)
        at = proxy or parts
        try:
            host, port = at.hostname or "", at.port
        except ValueError as error:
            raise LastingError(f"has no port: {error}", "correct data.source.root") from error
        if parts.scheme == "http":
            connection = HTTPConnection(host, port, timeout=self._stalled_s)
            connection.response_class = self._response  # type: ignore[assignment]
            return connection
        connection = HTTPSConnection(host, port, timeout=self._stalled_s, context=self._trusted())
        connection.response_class = self._response  # type: ignore[assignment]
        if proxy:
            through = basic(proxy)
            connection.set_tunnel(
                parts.hostname or "", parts.port or 443, {"Proxy-Authorization": through} if through else {}
            )
        return connection

    def _response(self, sock: socket, *args: Any, **words: Any) -> HTTPResponse:
        """Return what reads a response from `sock`, which must keep coming."""
        return HTTPResponse(_Paced(sock, self._stalled_s), *args, **words)  # type: ignore[arg-type]

    def _trusted(self) -> ssl.SSLContext:
        """Return what says whom to trust; it is made once, and only where it is needed, as it takes 30 ms."""
        with self._lock:
            self._tls = self._tls or ssl.create_default_context()
            return self._tls

    def _proxy(self, parts: SplitResult) -> SplitResult | None:
        text = self._proxies.get(parts.scheme)
        if not text or proxy_bypass(parts.hostname or ""):
            return None
        return urlsplit(text if "://" in text else f"http://{text}")


class _TooSlowError(OSError):
    """A server that sends, but so little that it would hold a run for ever."""


class _Paced(io.RawIOBase):
    """What comes from a connected socket, as long as enough of it comes. The timeout of the socket is for one `recv`.

    It stands for the socket of one response, of which `http.client` only calls `makefile`.
    """

    def __init__(self, sock: socket, stalled_s: float) -> None:
        self._file = sock.makefile("rb", buffering=0)  # which keeps the socket open, as a response must
        self._stalled_s = stalled_s
        self._since_s = 0.0
        self._num_bytes = 0

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return a file to read the response from."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with what is there. Raise `_TooSlowError` where too little came since the first byte."""
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
    """Return what a response to a question for bytes [start, stop) holds, read to its end, or where it leads."""
    status, told = response.status, response.headers
    if status in _REDIRECTIONS and told["Location"]:
        response.read(1 << 16)
        return str(told["Location"])
    if status in _PASSING:
        pause = told["Retry-After"] or ""
        raise PassingError(f"{status} {response.reason}", float(pause) if pause.isdecimal() else 0.0)
    if status == 416:
        total = _NONE_THERE.fullmatch(told["Content-Range"] or "")
        return Piece(b"", int(total[1]) if total else start)
    if status not in (200, 206):
        raise LastingError(f"{status} {response.reason}", _FIXES.get(status, "correct data.source.root"))
    if (told["Content-Encoding"] or "identity") != "identity":
        raise LastingError("is sent compressed, though it was not asked for so", "have the server leave it as it is")
    first, last, total_bytes = _range_of(response, start, stop)
    if first != start or last >= stop or (last < stop - 1 and last != total_bytes - 1):
        raise PassingError(f"sent bytes {first}-{last} of {total_bytes}, not {start}-{stop - 1}")
    data = response.read(last - first + 1)
    if len(data) != last - first + 1:
        raise PassingError(f"{len(data):,} of {last - first + 1:,} bytes came")
    if response.read(1):  # nothing, and then the connection is free
        raise PassingError(f"sent more than bytes {first}-{last}")
    return Piece(data, total_bytes)


def _range_of(response: HTTPResponse, start: int, stop: int) -> tuple[int, int, int]:
    """Return the first byte, the last byte and the size of the file, as the server tells them."""
    if response.status == 200:  # all of the file, which is right where all of it was asked for
        length = response.headers["Content-Length"] or ""
        if start == 0 and length.isdecimal() and int(length) <= stop:
            return 0, int(length) - 1, int(length)
        raise LastingError(
            "is sent whole where a range was asked for (200 instead of 206)", "use a server that serves ranges"
        )
    told = _RANGE.fullmatch((response.headers["Content-Range"] or "").strip())
    if not told:
        raise LastingError("is sent without saying which bytes it is", "use a server that serves ranges")
    return int(told[1]), int(told[2]), int(told[3])


def _host(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]


def _reason(error: Exception, stalled_s: float) -> str:
    match error:
        case _TooSlowError():
            return str(error)
        case TimeoutError():
            return f"nothing came for {stalled_s:g} s"
        case IncompleteRead():
            return f"the connection ended after {len(error.partial):,} bytes"
        case OSError():
            return error.strerror or str(error)
    return f"{type(error).__name__}: {error}"
