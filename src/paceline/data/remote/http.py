"""Read byte ranges over HTTP(S), with persistent connections and credentials from the environment."""

import base64
import io
import netrc
import os
import re
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from pathlib import Path
from socket import socket
from typing import Any, Final
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from paceline.core.urls import CREDENTIALS, url_origin
from paceline.data.remote.transport import HTTP_SCHEMES, ByteRange, PermanentError, RemoteUrl, TransientError

_FORMAT_HINT: Final = f"separate by blanks URLs such as https://NAME:PASSWORD@HOST/PATH in {CREDENTIALS}"

_STALL_TIMEOUT_S = 30.0
# Minimum rate over `_STALL_TIMEOUT_S`; a chunk of 8 MiB takes 14 minutes at this rate.
_MIN_BYTES_PER_S: Final = 10_000
_MAX_REDIRECTS = 5
_REDIRECT_STATUSES = {301, 302, 303, 307, 308}
_TRANSIENT_STATUSES = {408, 425, 429, 500, 502, 503, 504}
_UNQUOTED: Final = "%/:=&?~#+!$,;'@()*[]"  # delimiters of URLs, and what is percent-encoded already
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_UNSATISFIED_RANGE = re.compile(r"bytes \*/(\d+)")
_STATUS_FIXES = {
    401: f"set {CREDENTIALS}=https://NAME:PASSWORD@HOST/PATH, or write the host into ~/.netrc",
    403: f"allow reading it, or set {CREDENTIALS} to its signed URL",
    404: "correct data.source.root",
    410: "correct data.source.root",
}


@dataclass(frozen=True)
class UrlCredentials:
    """The `Authorization` header and the query for a URL, each "" if there is none. Its `repr` shows neither."""

    authorization: str = ""
    query: str = ""

    def __repr__(self) -> str:
        return "UrlCredentials()"


# `PACELINE_URL_CREDENTIALS` holds URLs separated by blanks, with a user name and a password, a query, or both, such as
# `https://me:secret@host/packs` or `https://bucket.example/a.pack?X-Amz-Signature=...`. Each applies to its scheme,
# host and port, and to its path and everything below; the longest match wins. HTTPS passwords may also be in
# `~/.netrc`, or in the file that `NETRC` names.
def find_credentials(url: str, environ: Mapping[str, str] = os.environ) -> UrlCredentials:
    """Return the credentials for `url`. Raise `PermanentError` if the variable or the netrc file is invalid."""
    target = urlsplit(url)
    origin, best, longest = _parse_origin(url), None, -1
    for number, entry in enumerate(environ.get(CREDENTIALS, "").split(), start=1):
        try:
            parts, its_origin = urlsplit(entry), url_origin(entry)
        except ValueError:  # the message may contain a password
            parts, its_origin = urlsplit(""), ""
        if not parts.scheme or not parts.hostname or (parts.username is None and not parts.query):
            raise PermanentError(f"{CREDENTIALS}: entry {number} is not a URL with a password or a query", _FORMAT_HINT)
        if its_origin == origin and _is_below(target.path, parts.path) and len(parts.path) > longest:
            best, longest = parts, len(parts.path)
    if best is not None and best.username is not None:
        return UrlCredentials(build_basic_auth(best), best.query)
    return UrlCredentials(_find_netrc_auth(target, environ), best.query if best else "")


def build_basic_auth(parts: SplitResult) -> str:
    """Return the value of the header for a URL's user name and password, "" without a name."""
    if parts.username is None:
        return ""
    return _encode_basic_auth(unquote(parts.username), unquote(parts.password or ""))


def _encode_basic_auth(name: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"


def _is_below(path: str, folder: str) -> bool:
    # A path with `..`, encoded or not, could lead out of the folder on the server.
    components = re.split(r"[/\\]", unquote(path))
    return path == folder or (path.startswith(f"{folder.rstrip('/')}/") and not {".", ".."} & {*components})


def _parse_origin(url: str) -> str:
    try:
        return url_origin(url)
    except ValueError as error:
        raise PermanentError(f"has no port: {error}", "correct data.source.root") from error


def _find_netrc_auth(parts: SplitResult, environ: Mapping[str, str]) -> str:
    # For HTTPS only, as a recipe may name a known host with http. The `default` entry would send a password to any
    # host that a recipe names.
    if parts.scheme != "https":
        return ""
    file = Path(os.path.expanduser(environ.get("NETRC") or "~/.netrc"))  # noqa: PTH111 - raises without a home
    try:
        entry = netrc.netrc(str(file)).hosts.get(parts.hostname or "")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise PermanentError(f"{file} cannot be read: {reason}", f"correct the file, or set {CREDENTIALS}") from error
    except netrc.NetrcParseError as error:  # the message may contain a password
        fix = f"correct it near line {error.lineno}, or set {CREDENTIALS}"
        raise PermanentError(f"{file} cannot be parsed", fix) from None
    return _encode_basic_auth(entry[0], entry[2] or "") if entry else ""


# A response is used only if it says which bytes of how many it contains (RFC 9110, section 14). Proxies are those of
# `urllib`. Redirects are followed, but not from HTTPS to HTTP, and credentials go only to the first server. urllib3
# takes more CPU time for a small range, and has neither this check of redirects nor a minimum rate.
class HttpTransport:
    """Read ranges over HTTP(S). A server that sends (nearly) nothing for `stall_timeout_s` is a `TransientError`."""

    def __init__(self, stall_timeout_s: float = _STALL_TIMEOUT_S) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._idle: dict[tuple[str, str], list[HTTPConnection]] = {}
        self._is_closed = False
        self._tls: ssl.SSLContext | None = None
        self._credentials: dict[str, UrlCredentials] = {}
        self._lock = threading.Lock()
        self._proxies = getproxies()

    def read(self, address: RemoteUrl, start: int, stop: int) -> ByteRange:
        """Return bytes [start, stop) of a file, fewer only at its end. Raise as `Transport.read`."""
        credentials = self._get_credentials(address)
        url = address.parts._replace(query=credentials.query).geturl() if credentials.query else address.url
        for _ in range(_MAX_REDIRECTS):
            # Compressed content would have other offsets.
            headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity", "User-Agent": "paceline"}
            # Not after a redirect to another server.
            if credentials.authorization and url_origin(url) == url_origin(address.url):
                headers["Authorization"] = credentials.authorization
            answer = self._request(urlsplit(url), headers, start, stop)
            if isinstance(answer, ByteRange):
                return answer
            url = _resolve_redirect(url, answer)
        raise PermanentError(f"redirects more than {_MAX_REDIRECTS} times", "correct data.source.root")

    def close(self) -> None:
        """Close idle connections now, and busy ones when they are released."""
        with self._lock:
            self._is_closed = True
            connections = [each for idle in self._idle.values() for each in idle]
            self._idle.clear()
        for connection in connections:
            connection.close()

    def _get_credentials(self, address: RemoteUrl) -> UrlCredentials:
        if address.url not in self._credentials:  # at most one entry per shard
            self._credentials[address.url] = find_credentials(address.url)
        return self._credentials[address.url]

    def _request(self, parts: SplitResult, headers: dict[str, str], start: int, stop: int) -> ByteRange | str:
        """Send a request; return the bytes, or the URL of a redirect."""
        connection, is_reused = self._acquire(parts)
        try:
            try:
                response = self._send(connection, parts, headers)
            except (HTTPException, OSError):
                if not is_reused:
                    raise
                connection.close()  # the server has closed the idle connection; retry with a new one
                connection = self._connect(parts)
                response = self._send(connection, parts, headers)
            answer = _read_response(response, start, stop)
        except ssl.SSLCertVerificationError as error:
            connection.close()
            fix = "have it signed, or name the file of its authority in SSL_CERT_FILE"
            raise PermanentError(
                f"the certificate of its server is not trusted: {error.verify_message}", fix
            ) from error
        except (HTTPException, OSError, ValueError) as error:
            connection.close()
            raise TransientError(_get_reason(error, self._stall_timeout_s)) from error
        except BaseException:
            connection.close()  # it may still send the rest of the response
            raise
        self._release(connection, parts, is_reusable=response.isclosed() and not response.will_close)
        return answer

    def _release(self, connection: HTTPConnection, parts: SplitResult, *, is_reusable: bool) -> None:
        with self._lock:
            if is_reusable and not self._is_closed:
                self._idle.setdefault((parts.scheme, _get_host_and_port(parts)), []).append(connection)
                return
        connection.close()

    def _send(self, connection: HTTPConnection, parts: SplitResult, headers: dict[str, str]) -> HTTPResponse:
        target = quote(f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}", safe=_UNQUOTED)
        proxy = self._find_proxy(parts) if parts.scheme == "http" else None
        if proxy:  # takes the absolute URL (RFC 9112, 3.2.2); for https, `_connect` opens a tunnel
            target = f"http://{_get_host_and_port(parts)}{target}"
            headers = {**headers, **_build_proxy_headers(proxy)}
        connection.request("GET", target, headers={**headers, "Host": _get_host_and_port(parts)})
        return connection.getresponse()

    def _acquire(self, parts: SplitResult) -> tuple[HTTPConnection, bool]:
        """Return (connection, whether it was used before)."""
        with self._lock:
            idle = self._idle.get((parts.scheme, _get_host_and_port(parts)))
            if idle:
                return idle.pop(), True
        return self._connect(parts), False

    def _connect(self, parts: SplitResult) -> HTTPConnection:
        proxy = self._find_proxy(parts)
        target = proxy or parts
        host, port = target.hostname or "", target.port
        if parts.scheme == "http":
            connection = HTTPConnection(host, port, timeout=self._stall_timeout_s)
        else:
            connection = HTTPSConnection(host, port, timeout=self._stall_timeout_s, context=self._get_tls_context())
            if proxy:
                connection.set_tunnel(parts.hostname or "", parts.port or 443, _build_proxy_headers(proxy))
        connection.response_class = self._build_response  # type: ignore[assignment]
        return connection

    def _build_response(self, sock: socket, *args: Any, **options: Any) -> HTTPResponse:
        return HTTPResponse(_MinRateReader(sock, self._stall_timeout_s), *args, **options)  # type: ignore[arg-type]

    def _get_tls_context(self) -> ssl.SSLContext:
        with self._lock:  # created once and only if needed: it takes 30 ms
            self._tls = self._tls or ssl.create_default_context()
            return self._tls

    def _find_proxy(self, parts: SplitResult) -> SplitResult | None:
        text = self._proxies.get(parts.scheme)
        if not text or proxy_bypass(parts.hostname or ""):
            return None
        try:
            proxy = urlsplit(text if "://" in text else f"http://{text}")
            proxy.port  # noqa: B018 - raises for an invalid port
        except ValueError:  # the message may contain a password
            reason = f"the proxy that {parts.scheme}_proxy names is not a URL"
            raise PermanentError(reason, "set it to http://HOST:PORT") from None
        return proxy


def _build_proxy_headers(proxy: SplitResult) -> dict[str, str]:
    authorization = build_basic_auth(proxy)
    return {"Proxy-Authorization": authorization} if authorization else {}


def _resolve_redirect(url: str, location: str) -> str:
    fix = "correct data.source.root"
    try:
        target = urljoin(url, location)
        scheme = url_origin(target).partition(":")[0]
    except ValueError:
        raise PermanentError("redirects to a URL that is not valid", fix) from None
    if scheme not in HTTP_SCHEMES:
        raise PermanentError("redirects to a URL that is not http", fix)
    if urlsplit(url).scheme == "https" and scheme == "http":
        raise PermanentError("redirects from https to http, which is not secure", fix)
    return target


class _TooSlowError(OSError):
    pass


# A socket's timeout applies only to a single `recv`, so a server could send one byte at a time for ever. This replaces
# the socket of one response, of which `http.client` calls only `makefile`.
class _MinRateReader(io.RawIOBase):
    """Read from a connected socket and enforce a minimum rate."""

    def __init__(self, sock: socket, stall_timeout_s: float) -> None:
        self._file = sock.makefile("rb", buffering=0)  # keeps the socket open
        self._stall_timeout_s = stall_timeout_s
        self._since_s = 0.0
        self._num_bytes = 0

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with available bytes. Raise `_TooSlowError` below the minimum rate."""
        num_bytes = self._file.readinto(buffer) or 0
        now_s = time.monotonic()
        if not self._num_bytes:
            self._since_s = now_s
        self._num_bytes += num_bytes
        passed_s = now_s - self._since_s
        if passed_s >= self._stall_timeout_s:  # one window is over; the next starts with the next byte
            if self._num_bytes < _MIN_BYTES_PER_S * passed_s:
                raise _TooSlowError(f"only {self._num_bytes:,} bytes were received in {passed_s:.3g} s")
            self._num_bytes = 0
        return num_bytes

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _read_response(response: HTTPResponse, start: int, stop: int) -> ByteRange | str:
    """Read a response for bytes [start, stop) to its end; return the bytes, or the URL of a redirect."""
    status, headers = response.status, response.headers
    if status in _REDIRECT_STATUSES and headers["Location"]:
        response.read(1 << 16)  # to the end of the body, so that the connection can be reused
        return str(headers["Location"])
    if status in _TRANSIENT_STATUSES:
        pause = headers["Retry-After"] or ""
        raise TransientError(f"{status} {response.reason}", float(pause) if pause.isdecimal() else 0.0)
    if status == 416:  # the range starts at or after the end of the file
        total = _UNSATISFIED_RANGE.fullmatch(headers["Content-Range"] or "")
        return ByteRange(b"", int(total[1]) if total else start)
    if status not in (200, 206):
        raise PermanentError(f"{status} {response.reason}", _STATUS_FIXES.get(status, "correct data.source.root"))
    if (headers["Content-Encoding"] or "identity") != "identity":
        raise PermanentError(
            "is sent compressed, which was not requested", "configure the server to send it uncompressed"
        )
    first, last, total_bytes = _parse_content_range(response, start, stop)
    if first != start or last >= stop or (last < stop - 1 and last != total_bytes - 1):
        raise TransientError(f"sent bytes {first}-{last} of {total_bytes}, not {start}-{stop - 1}")
    data = response.read(last - first + 1)
    if len(data) != last - first + 1:
        raise TransientError(f"{len(data):,} of {last - first + 1:,} bytes were received")
    if response.read(1):  # reading to the end makes the connection reusable
        raise TransientError(f"sent more than bytes {first}-{last}")
    return ByteRange(data, total_bytes)


def _parse_content_range(response: HTTPResponse, start: int, stop: int) -> tuple[int, int, int]:
    """Return (first byte, last byte, size of the file), as the server declares them."""
    if response.status == 200:  # the whole file, which is correct if the range covers it
        length = response.headers["Content-Length"] or ""
        if start == 0 and length.isdecimal() and int(length) <= stop:
            return 0, int(length) - 1, int(length)
        raise PermanentError(
            "is sent whole instead of the requested range (200 instead of 206)", "use a server that serves ranges"
        )
    content_range = _CONTENT_RANGE.fullmatch((response.headers["Content-Range"] or "").strip())
    if not content_range:
        raise PermanentError("is sent without a valid Content-Range", "use a server that serves ranges")
    return int(content_range[1]), int(content_range[2]), int(content_range[3])


def _get_host_and_port(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]


def _get_reason(error: Exception, stall_timeout_s: float) -> str:
    match error:
        case _TooSlowError():
            return str(error)
        case TimeoutError():
            return f"nothing received for {stall_timeout_s:g} s"
        case IncompleteRead():
            return f"the connection ended after {len(error.partial):,} bytes"
        case OSError():
            return error.strerror or str(error)
    return f"{type(error).__name__}: {error}"
