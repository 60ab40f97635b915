"""A response is used only if it declares which bytes it contains, and contains them."""

import io
from http.client import HTTPResponse

import pytest

from paceline.data.remote.http import _read_response
from paceline.data.remote.transport import ByteRange, PermanentError, TransientError


class FakeSocket:
    """A socket that receives `data`."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def answer(status: str, headers: dict[str, str], body: bytes = b"", start: int = 10, stop: int = 20) -> ByteRange | str:
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    response = HTTPResponse(FakeSocket("\r\n".join(lines).encode() + body))  # type: ignore[arg-type]
    response.begin()
    return _read_response(response, start, stop)


def ranged(first: int, last: int, total: int, body: bytes | None = None, **headers: str) -> ByteRange | str:
    body = bytes(range(first, last + 1)) if body is None else body
    headers = {"Content-Range": f"bytes {first}-{last}/{total}", "Content-Length": str(last - first + 1), **headers}
    return answer("206 Partial Content", headers, body)


def test_the_requested_range_is_returned() -> None:
    assert ranged(10, 19, 100) == ByteRange(bytes(range(10, 20)), 100)


def test_a_range_may_be_shorter_only_at_the_end_of_the_file() -> None:
    assert ranged(10, 14, 15) == ByteRange(bytes(range(10, 15)), 15)
    with pytest.raises(TransientError, match="sent bytes 10-14 of 100, not 10-19"):
        ranged(10, 14, 100)


@pytest.mark.parametrize("first", [0, 9, 11])
def test_another_range_is_refused(first: int) -> None:
    with pytest.raises(TransientError, match=f"sent bytes {first}-19 of 100, not 10-19"):
        ranged(first, 19, 100)


def test_a_range_beyond_the_end_of_the_file_is_empty() -> None:
    assert answer("416 Range Not Satisfiable", {"Content-Range": "bytes */7", "Content-Length": "0"}) == ByteRange(
        b"", 7
    )


def test_a_server_that_ignores_ranges_is_an_error() -> None:
    whole = {"Content-Length": "100"}
    with pytest.raises(PermanentError, match=r"200 instead of 206") as raised:
        answer("200 OK", whole, bytes(100))
    assert raised.value.fix == "use a server that serves ranges"
    with pytest.raises(PermanentError, match=r"200 instead of 206"):
        answer("200 OK", whole, bytes(100), start=0, stop=50)
    assert answer("200 OK", {"Content-Length": "50"}, bytes(50), start=0, stop=50) == ByteRange(bytes(50), 50)


@pytest.mark.parametrize("content_range", ["", "bytes 10-19/*", "pages 1-2/3", "bytes 10-19"])
def test_a_response_without_content_range_is_refused(content_range: str) -> None:
    with pytest.raises(PermanentError, match="without a valid Content-Range"):
        answer("206 Partial Content", {"Content-Range": content_range, "Content-Length": "10"}, bytes(10))


def test_an_incomplete_response_is_transient() -> None:
    with pytest.raises(Exception, match=r"IncompleteRead|bytes were received"):
        ranged(10, 19, 100, body=b"only")


def test_a_compressed_response_is_refused() -> None:
    with pytest.raises(PermanentError, match="sent compressed"):
        ranged(10, 19, 100, **{"Content-Encoding": "gzip"})


@pytest.mark.parametrize(
    "status", ["500 Oops", "502 Bad Gateway", "503 Busy", "504 Late", "429 Slow Down", "408 Timeout"]
)
def test_temporary_statuses_are_transient_errors(status: str) -> None:
    with pytest.raises(TransientError, match=status) as raised:
        answer(status, {"Retry-After": "7", "Content-Length": "0"})
    assert raised.value.retry_after_s == 7.0


@pytest.mark.parametrize(
    ("status", "fix"),
    [
        ("404 Not Found", "correct data.source.root"),
        ("403 Forbidden", "PACELINE_URL_CREDENTIALS"),
        ("401 Unauthorized", "PACELINE_URL_CREDENTIALS=https://NAME:PASSWORD@HOST/PATH"),
    ],
)
def test_a_permanent_error_has_a_fix(status: str, fix: str) -> None:
    with pytest.raises(PermanentError, match=status) as raised:
        answer(status, {"Content-Length": "0"})
    assert fix in raised.value.fix


def test_a_redirect_returns_its_location() -> None:
    assert answer("302 Found", {"Location": "/other", "Content-Length": "0"}) == "/other"
