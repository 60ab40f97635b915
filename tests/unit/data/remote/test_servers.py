"""Real servers on this machine: with a password, with forged packs, with redirects, too slow, or endless."""

import base64
import contextlib
import io
import shutil
import ssl
import struct
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from paceline.core.dataset import DatasetInfo, Datasets, Split
from paceline.core.errors import DataError
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.pack.format import ALIGNMENT, FileRole, IndexLayout, IndexSizes, PackHeader
from paceline.data.pack.index import open_index
from paceline.data.remote import open_remote
from paceline.data.remote.http import HttpTransport, UrlCredentials, find_credentials
from paceline.data.remote.transport import PermanentError, RemoteUrl, RetryPolicy, TransientError

NO_RETRY = RetryPolicy(attempts=1)
Answer = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture
def serve() -> Iterator[Callable[..., int]]:
    """Return a function that starts a server, which handles each GET by `answer`, and returns its port."""
    servers = []

    def start(answer: Answer, tls: ssl.SSLContext | None = None) -> int:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                try:
                    answer(self)
                except OSError:  # the client has left
                    self.close_connection = True

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return server.server_address[1]

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join(timeout=10)
        server.server_close()


def span(request: BaseHTTPRequestHandler) -> tuple[int, int]:
    start, stop = request.headers["Range"].removeprefix("bytes=").split("-")
    return int(start), int(stop) + 1


def send_range(request: BaseHTTPRequestHandler, body: bytes, total: int) -> None:
    start, _ = span(request)
    request.send_response(206)
    request.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{total}")
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)


def files(data: bytes) -> Answer:
    """Return the handler of a server of one file."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        start, stop = span(request)
        send_range(request, data[start:stop], len(data))

    return answer


def password_protected(data: bytes, query: str = "") -> Answer:
    """Return the handler of a server of one file, with the password `me:S3CRETpw` and the signature `query`."""
    expected = f"Basic {base64.b64encode(b'me:S3CRETpw').decode()}"

    def answer(request: BaseHTTPRequestHandler) -> None:
        if request.headers["Authorization"] == expected and urlsplit(request.path).query == query:
            files(data)(request)
            return
        request.send_response(401)
        request.send_header("Content-Length", "0")
        request.end_headers()

    return answer


@pytest.fixture(scope="module")
def pack_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A pack of one file."""
    out = tmp_path_factory.mktemp("pack_bytes") / "a.pack"
    write_pack(random_datasets(5), out, PackOptions(skip_bad=True), lambda done, total: None, 1)
    return out.read_bytes()


@dataclass(frozen=True)
class Noise:
    """Images of noise, 16x16."""

    info: DatasetInfo

    def __len__(self) -> int:
        return self.info.num_images

    def read(self, index: int) -> tuple[bytes, int]:
        pixels = np.random.default_rng([index, self.info.split == "val"]).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        return file.getvalue(), index % 2

    def name_of(self, index: int) -> str:
        return f"{self.info.split}/{index}.png"


def random_datasets(num_images: int) -> Datasets:
    def of(split: Split) -> Noise:
        return Noise(DatasetInfo("noise", split, num_images, ("a", "b"), 3, None, (0.5,) * 3, (0.2,) * 3))

    return Datasets(of("train"), of("val"))


def read(url: str, num_bytes: int, stall_timeout_s: float = 5) -> bytes:
    with contextlib.closing(HttpTransport(stall_timeout_s)) as transport:
        return transport.read(RemoteUrl(url), 0, num_bytes).data


def forged(data: bytes) -> bytes:
    """Return a pack with the header of `data` and other labels; four bytes of padding correct the checksum."""
    header = PackHeader.from_bytes(data[:128], "good")
    index = bytearray(data[header.index_offset :])
    sizes = IndexSizes.from_bytes(bytes(index[:ALIGNMENT]))
    labels, num_labels = IndexLayout.from_sizes(sizes).columns[0]["labels"], sizes.samples[0]
    free = labels.offset + num_labels * labels.dtype.itemsize
    assert free % ALIGNMENT <= ALIGNMENT - 4 and free % ALIGNMENT, "no room in the padding"
    for each in struct.iter_unpack("<i", index[labels.offset : free]):
        assert each[0] in (0, 1)
    flipped = [1 - label for (label,) in struct.iter_unpack("<i", index[labels.offset : free])]
    index[labels.offset : free] = struct.pack(f"<{num_labels}i", *flipped)
    index[free : free + 4] = crc32_patch(bytes(index), free, header.index_crc32)
    assert zlib.crc32(index) == header.index_crc32
    return data[: header.index_offset] + bytes(index)


def crc32_patch(data: bytes, at: int, expected: int) -> bytes:
    """Return the four bytes that, at `at`, give `data` the CRC-32 `expected`; CRC-32 is linear over single bits."""

    def crc32(bits: int) -> int:
        return zlib.crc32(data[:at] + bits.to_bytes(4, "little") + data[at + 4 :])

    base, basis = crc32(0), []
    for bit in range(32):
        change, bits = crc32(1 << bit) ^ base, 1 << bit
        for other, others in basis:
            if change ^ other < change:
                change, bits = change ^ other, bits ^ others
        basis.append((change, bits))
        basis.sort(reverse=True)
    rest, found = expected ^ base, 0
    for change, bits in basis:
        if rest ^ change < rest:
            rest, found = rest ^ change, found ^ bits
    assert not rest
    return found.to_bytes(4, "little")


def test_a_server_with_the_same_header_does_not_change_the_labels_of_another(
    serve: Callable[..., int], pack_bytes: bytes, tmp_path: Path
) -> None:
    evil = forged(pack_bytes)
    assert evil[:128] == pack_bytes[:128] and evil != pack_bytes
    clean = open_remote(f"http://127.0.0.1:{serve(files(pack_bytes))}/a.pack", tmp_path / "clean", 10**9, NO_RETRY)
    with pytest.raises(DataError, match=r"a.pack: its index is inconsistent: bytes between its columns are not zero"):
        open_remote(f"http://127.0.0.1:{serve(files(evil))}/a.pack", tmp_path / "cache", 10**9, NO_RETRY)
    good = open_remote(f"http://127.0.0.1:{serve(files(pack_bytes))}/a.pack", tmp_path / "cache", 10**9, NO_RETRY)
    assert [good.train.read(index)[1] for index in range(5)] == [clean.train.read(index)[1] for index in range(5)]


@pytest.mark.parametrize("paths", [("a.pack", "a.pack"), ("a.pack", "b/a.pack")])
def test_the_cache_of_a_url_is_used_for_no_other_url(
    serve: Callable[..., int], pack_bytes: bytes, tmp_path: Path, paths: tuple[str, str]
) -> None:
    ports = (
        [serve(files(pack_bytes))] * 2 if paths[0] != paths[1] else [serve(files(pack_bytes)), serve(files(pack_bytes))]
    )
    for port, path in zip(ports, paths, strict=True):
        open_remote(f"http://127.0.0.1:{port}/{path}", tmp_path, 10**9, NO_RETRY)
    assert len(list(tmp_path.glob("*/index.pack"))) == 2
    open_remote(f"http://127.0.0.1:{ports[0]}/{paths[0]}", tmp_path, 10**9, NO_RETRY)
    assert len(list(tmp_path.glob("*/index.pack"))) == 2


def test_padding_of_an_index_must_be_zero(pack_bytes: bytes, tmp_path: Path) -> None:
    header = PackHeader.from_bytes(pack_bytes[:128], "good")
    index = pack_bytes[header.index_offset :]
    gaps = [gap for gap in IndexLayout.from_sizes(IndexSizes.from_bytes(index[:ALIGNMENT])).gaps if gap[0] < gap[1]]
    assert len(gaps) > 15
    for start, stop in gaps:
        for at in (start, stop - 1):
            changed = index[:at] + b"\1" + index[at + 1 :]
            head = replace(header, index_crc32=zlib.crc32(changed)).to_bytes()
            (tmp_path / "a.pack").write_bytes(head + pack_bytes[128 : header.index_offset] + changed)
            with pytest.raises(DataError, match="bytes between its columns are not zero"):
                open_index(tmp_path / "a.pack")


def huge(num_bytes: int, sizes: bytes) -> Answer:
    """Return the handler of a server whose header declares an index of `num_bytes`, which starts with `sizes`."""
    header = PackHeader(FileRole.WHOLE, b"x" * 16, 128 + num_bytes, 0, 0, num_bytes, 1).to_bytes()

    def answer(request: BaseHTTPRequestHandler) -> None:
        start, stop = span(request)
        body = (header + sizes)[start:stop]
        send_range(request, body.ljust(stop - start, b"\0"), 128 + num_bytes)

    return answer


def test_an_index_of_the_wrong_length_is_not_fetched(serve: Callable[..., int], tmp_path: Path) -> None:
    port = serve(huge(200 << 30, IndexSizes(100, 0, (10, 10), (100, 100)).to_bytes()))
    with pytest.raises(DataError, match=r"its index is inconsistent: 214,748,364,800 bytes for 20 samples"):
        open_remote(f"http://127.0.0.1:{port}/a.pack", tmp_path, 10**9, NO_RETRY)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) == 0


def test_an_index_larger_than_the_cache_is_not_fetched(serve: Callable[..., int], tmp_path: Path) -> None:
    sizes = IndexSizes(100, 0, (10**9, 10**9), (10**9, 10**9))
    num_bytes = IndexLayout.from_sizes(sizes).num_bytes
    url = f"http://127.0.0.1:{serve(huge(num_bytes, sizes.to_bytes()))}/a.pack"
    with pytest.raises(DataError, match=rf"its index has {num_bytes:,} bytes.*data\.source\.cache_gb above 68"):
        open_remote(url, tmp_path, 10**9, NO_RETRY)
    sizes = IndexSizes(100, 0, (10**14, 10**14), (10**14, 10**14))
    url = f"http://127.0.0.1:{serve(huge(IndexLayout.from_sizes(sizes).num_bytes, sizes.to_bytes()))}/a.pack"
    with pytest.raises(DataError, match=rf"data\.source\.cache: {tmp_path}.* bytes free.*name another folder"):
        open_remote(url, tmp_path, 10**18, NO_RETRY)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) == 0


def test_a_server_below_the_minimum_rate_is_an_error(serve: Callable[..., int]) -> None:
    rest = threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> None:
        in_body = "body" in request.path
        text = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-127/128\r\nContent-Length: 128\r\n\r\n"
        request.wfile.write(text if in_body else b"")
        for byte in b"x" * 128 if in_body else text:
            request.wfile.write(bytes([byte]))
            rest.wait(0.02)  # 2.5 s for all of it, and never 0.3 s without a byte

    port = serve(drip)
    for part in ("head", "body"):
        with pytest.raises(TransientError, match=r"^only \d+ bytes were received in 0\.3"):
            read(f"http://127.0.0.1:{port}/{part}.pack", 128, stall_timeout_s=0.3)
    rest.set()


def test_a_slow_server_above_the_minimum_rate_is_read(serve: Callable[..., int]) -> None:
    body = bytes(30_000)

    def steady(request: BaseHTTPRequestHandler) -> None:
        request.send_response(206)
        request.send_header("Content-Range", f"bytes 0-{len(body) - 1}/{len(body)}")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        for start in range(0, len(body), 3000):
            request.wfile.write(body[start : start + 3000])
            threading.Event().wait(0.05)

    assert read(f"http://127.0.0.1:{serve(steady)}/a.pack", len(body), stall_timeout_s=0.2) == body


def test_more_bytes_than_requested_are_an_error(serve: Callable[..., int]) -> None:
    def endless(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(
            b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-9/10\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        while True:
            request.wfile.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")

    with pytest.raises(TransientError, match="sent more than bytes 0-9"):
        read(f"http://127.0.0.1:{serve(endless)}/a.pack", 10)


def test_a_redirect_from_https_to_http_is_refused(
    serve: Callable[..., int], pack_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shutil.which("openssl"):
        pytest.skip("needs openssl, which is not installed (apt-get install openssl)")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    plain = serve(files(pack_bytes))

    def redirect(request: BaseHTTPRequestHandler) -> None:
        if request.path == "/a.pack":
            files(pack_bytes)(request)
            return
        request.send_response(302)
        request.send_header("Location", "/a.pack" if "same" in request.path else f"http://127.0.0.1:{plain}/a.pack")
        request.send_header("Content-Length", "0")
        request.end_headers()

    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    url = f"https://127.0.0.1:{serve(redirect, tls)}"
    assert read(f"{url}/same.pack", 8) == pack_bytes[:8]
    with pytest.raises(PermanentError, match="redirects from https to http"):
        read(f"{url}/other.pack", 8)


def redirect_to(*locations: str) -> Answer:
    """Return the handler of a server that redirects `/0.pack` to the first of `locations`, and so on."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(302)
        request.send_header("Location", locations[int(Path(request.path).stem)])
        request.send_header("Content-Length", "0")
        request.end_headers()

    return answer


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("http://[x/a.pack", "redirects to a URL that is not valid"),
        ("http://host:no/a.pack", "redirects to a URL that is not valid"),
        ("file:///etc/passwd", "redirects to a URL that is not http"),
        ("/0.pack", "redirects more than 5 times"),
    ],
)
def test_a_redirect_to_no_http_url_is_refused(serve: Callable[..., int], location: str, message: str) -> None:
    with pytest.raises(PermanentError, match=message):
        read(f"http://127.0.0.1:{serve(redirect_to(location))}/0.pack", 8)


def recorder(answer: Answer) -> tuple[Answer, list[tuple[str, dict[str, str]]]]:
    """Return `answer`, and the list to which it adds the path and the headers of each request."""
    requests: list[tuple[str, dict[str, str]]] = []

    def record(request: BaseHTTPRequestHandler) -> None:
        requests.append((request.path, dict(request.headers)))
        answer(request)

    return record, requests


def test_a_redirect_forwards_a_password_and_a_signature_to_no_other_server(
    serve: Callable[..., int], pack_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, at_other = recorder(files(pack_bytes))
    first, at_first = recorder(redirect_to("/1.pack", f"http://127.0.0.1:{serve(other)}/a.pack"))
    port = serve(first)
    monkeypatch.setenv("PACELINE_URL_CREDENTIALS", f"http://me:S3CRETpw@127.0.0.1:{port}/?sig=S1GNATURE")
    assert read(f"http://127.0.0.1:{port}/0.pack", 8) == pack_bytes[:8]
    assert [(path, "Authorization" in headers) for path, headers in at_first] == [
        ("/0.pack?sig=S1GNATURE", True),
        ("/1.pack", True),
    ]
    assert [(path, "Authorization" in headers) for path, headers in at_other] == [("/a.pack", False)]


def test_a_path_is_percent_encoded_once(serve: Callable[..., int], pack_bytes: bytes) -> None:
    answer, requests = recorder(files(pack_bytes))
    assert read(f"http://127.0.0.1:{serve(answer)}/my f\u00f6tos/100%25.pack", 8) == pack_bytes[:8]
    assert [path for path, _ in requests] == ["/my%20f%C3%B6tos/100%25.pack"]


def test_a_proxy_gets_the_password_that_its_variable_holds(
    serve: Callable[..., int], pack_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, requests = recorder(files(pack_bytes))
    monkeypatch.setenv("http_proxy", f"me:S3CRETpw@127.0.0.1:{serve(proxy)}")
    assert read("http://host.invalid/a.pack", 8) == pack_bytes[:8]
    ((path, headers),) = requests
    assert path == "http://host.invalid/a.pack" and headers["Host"] == "host.invalid"
    assert headers["Proxy-Authorization"] == f"Basic {base64.b64encode(b'me:S3CRETpw').decode()}"
    monkeypatch.setenv("http_proxy", "http://me:S3CRETpw@127.0.0.1:no")
    with pytest.raises(PermanentError, match=r"^the proxy that http_proxy names is not a URL$") as raised:
        read("http://host.invalid/a.pack", 8)
    assert "set it to" in raised.value.fix


def test_no_file_or_output_of_a_run_contains_a_password_or_signature(
    serve: Callable[..., int], pack_bytes: bytes, paceline, tmp_path: Path
) -> None:
    port = serve(password_protected(pack_bytes, "X-Amz-Signature=S1GNATURE"))
    url, secret_url = (f"http://{user}127.0.0.1:{port}/a.pack" for user in ("", "me:S3CRETpw@"))
    args = ["data.source.name=pack", f"data.source.cache={tmp_path}/cache", "data.augment=[]", "model.name=empty"]
    args += ["model.width=1.0", "data.image_size=16", "data.batch_size=2", "train.epochs=1", "log.tensorboard=on"]
    environ = {"PACELINE_URL_CREDENTIALS": f"{secret_url}?X-Amz-Signature=S1GNATURE"}

    refused = paceline("train", "digits", f"data.source.root={secret_url}", *args, "--run-dir", "refused", **environ)
    refused.assert_error("data.source.root: the URL holds a user name or a password", "PACELINE_URL_CREDENTIALS")
    assert "S3CRETpw" not in refused.err + refused.out

    trained = paceline("train", "digits", f"data.source.root={url}", *args, "--run-dir", "run", **environ)
    assert trained.code == 0, trained.err
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"recipe.yaml", "result.json", "report.html"} <= {path.name for path in written}
    assert any(path.name.startswith("events.out") for path in written)
    assert url in (tmp_path / "run" / "recipe.yaml").read_text()
    assert f"data.source.root={url}" in (tmp_path / "run" / "result.json").read_text()
    leaks = [str(path) for path in written if {b"S3CRETpw", b"S1GNATURE"} & {*find(path.read_bytes())}]
    assert leaks == [] and not {*find((trained.out + trained.err).encode())}

    paceline("eval", "run").assert_error(f"{url}: 401", "set PACELINE_URL_CREDENTIALS=")
    assert paceline("eval", "run", **environ).code == 0


def find(data: bytes) -> list[bytes]:
    return [secret for secret in (b"S3CRETpw", b"S1GNATURE") if secret in data]


def test_credentials_are_sent_only_to_their_server_and_folder() -> None:
    environ = {
        "PACELINE_URL_CREDENTIALS": "https://me:a%20b@host/packs/  https://host/packs/x.pack?sig=1 http://me:c@host"
    }
    name_and_password = f"Basic {base64.b64encode(b'me:a b').decode()}"
    assert find_credentials("https://host/packs/a.pack", environ) == UrlCredentials(name_and_password)
    assert find_credentials("https://HOST:443/packs/set/index.pack", environ) == UrlCredentials(name_and_password)
    assert find_credentials("https://host/packs/x.pack", environ) == UrlCredentials("", "sig=1")
    for path in ("packs/../evil/a.pack", "packs/%2e%2E/evil/a.pack", "packs/..%2fevil/a.pack", "packs/./a.pack"):
        assert find_credentials(f"https://host/{path}", {**environ, "NETRC": "/dev/null"}) == UrlCredentials()
    for other in ("https://host/packs2/a.pack", "https://host:8443/packs/a.pack", "https://host.evil/packs/a.pack"):
        assert find_credentials(other, {**environ, "NETRC": "/dev/null"}) == UrlCredentials()
    assert find_credentials("http://host/packs/a.pack", environ).authorization != name_and_password


def test_netrc_is_used_only_for_https_and_its_host(tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine host login me password pw\ndefault login any password thing\n")
    environ = {"NETRC": str(tmp_path / "netrc")}
    header = f"Basic {base64.b64encode(b'me:pw').decode()}"
    assert find_credentials("https://host/a.pack", environ) == UrlCredentials(header)
    assert find_credentials("https://other/a.pack", environ) == UrlCredentials()
    assert find_credentials("http://host/a.pack", environ) == UrlCredentials()
    assert find_credentials("https://host/a.pack", {"NETRC": str(tmp_path / "missing")}) == UrlCredentials()


@pytest.mark.parametrize("entry", ["S3CRETpw", "https://host/S3CRETpw", "https://[S3CRETpw", "https://a:b@h:S3CRETpw/"])
def test_an_invalid_variable_is_named_without_its_value(entry: str) -> None:
    with pytest.raises(PermanentError, match=r"PACELINE_URL_CREDENTIALS: entry 2 is not a URL") as raised:
        find_credentials("https://host/a.pack", {"PACELINE_URL_CREDENTIALS": f"https://me:x@host {entry}"})
    assert "S3CRETpw" not in f"{raised.value} {raised.value.fix}"


def test_an_invalid_netrc_is_named_without_its_content(tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine host login me password pw\nS3CRETpw\n")
    with pytest.raises(PermanentError, match=r"netrc cannot be parsed") as raised:
        find_credentials("https://host/a.pack", {"NETRC": str(tmp_path / "netrc")})
    assert "S3CRETpw" not in f"{raised.value} {raised.value.fix}"
