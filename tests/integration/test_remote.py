"""Packs behind a real nginx on this machine: interrupted, restarted, damaged, slow, and shared between processes."""

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from paceline.core.dataset import DatasetInfo, Datasets, Split
from paceline.core.errors import DataError
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.pack.reader import PackSource, open_pack
from paceline.data.remote import open_remote
from paceline.data.remote.http import HttpTransport
from paceline.data.remote.pack import RemoteShards
from paceline.data.remote.transport import RemoteUrl, RetryPolicy, sleep

POLL_S = 0.005
CONFIG = """
{user}
pid {folder}/pid;
error_log {folder}/error.log;
events {{}}
http {{
    log_format bytes "$request_method $uri $status $body_bytes_sent";
    access_log {folder}/access.log bytes;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    scgi_temp_path {folder}/scgi;
    uwsgi_temp_path {folder}/uwsgi;
    server {{
        listen 127.0.0.1:{port};
        root {folder}/www;
        location /slow/ {{ alias {folder}/www/; limit_rate 4m; }}
        location /unranged/ {{ alias {folder}/www/; max_ranges 0; }}
        location /closed/ {{ return 403; }}
        location /moved/ {{ rewrite ^/moved/(.*)$ /$1 redirect; }}
        location /locked/ {{ alias {folder}/www/; auth_basic "locked"; auth_basic_user_file {folder}/users; }}
        {more}
    }}
}}
"""


@dataclass
class Server:
    """An nginx that serves the folder `www`."""

    folder: Path
    port: int = 0
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def www(self) -> Path:
        return self.folder / "www"

    def url(self, path: str, user: str = "") -> str:
        return f"http://{user}127.0.0.1:{self.port}/{path}"

    def start(self, more: str = "") -> None:
        if not self.port:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
        user = "user root;" if os.geteuid() == 0 else ""
        values = {"user": user, "folder": self.folder, "port": self.port, "more": more}
        (self.folder / "nginx.conf").write_text(CONFIG.format(**values))
        command = ["nginx", "-p", str(self.folder), "-c", "nginx.conf", "-e", str(self.folder / "error.log")]
        self.process = subprocess.Popen([*command, "-g", "daemon off; master_process off;"])
        self._wait()

    def _wait(self) -> None:
        assert self.process
        while self.process.poll() is None:
            with socket.socket() as knock:
                if not knock.connect_ex(("127.0.0.1", self.port)):
                    return
            sleep(POLL_S)
        raise AssertionError((self.folder / "error.log").read_text())

    def stop(self) -> None:
        assert self.process
        self.process.kill()
        self.process.wait(timeout=10)

    def bytes_of(self, name: str) -> int:
        """Return how many bytes of a file the server has sent."""
        output = re.findall(rf"GET \S*{name} 206 (\d+)", (self.folder / "access.log").read_text())
        return sum(map(int, output))


@dataclass(frozen=True)
class RandomImages:
    """Files of random bytes."""

    info: DatasetInfo

    def __len__(self) -> int:
        return self.info.num_images

    def read(self, index: int) -> tuple[bytes, int]:
        return np.random.default_rng([index, self.info.split == "val"]).bytes(240_000), index % 2

    def name_of(self, index: int) -> str:
        return f"{self.info.split}/{index}.bin"


def random_datasets() -> Datasets:
    def of(split: Split) -> RandomImages:
        return RandomImages(DatasetInfo("random", split, 8, ("a", "b"), 3, None, (0.5,) * 3, (0.2,) * 3))

    return Datasets(of("train"), of("val"))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of four shards of about a megabyte, and beside it the same data in one file."""
    out = tmp_path_factory.mktemp("packed")
    for name, shard_bytes in (("set", 1 << 20), ("set.pack", None)):
        options = PackOptions(shard_bytes=shard_bytes, skip_bad=True)
        write_pack(random_datasets(), out / name, options, lambda done, total: None, 1)
    return out


@pytest.fixture
def server(packed: Path, tmp_path: Path) -> Iterator[Server]:
    if not shutil.which("nginx"):
        pytest.skip("needs nginx, which is not installed (apt-get install nginx-light)")
    server = Server(tmp_path / "nginx")
    shutil.copytree(packed, server.www)
    (server.folder / "users").write_text("me:{PLAIN}secret\n")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def expected(packed: Path) -> list:
    return read_all(open_pack(packed / "set"))


def read_all(datasets: Datasets) -> list:
    return [split.read(index) for split in (datasets.train, datasets.val) for index in range(len(split))]


def retries(*pauses: Callable[[], None]) -> RetryPolicy:
    """Return a retry policy whose pauses call `pauses` in turn instead of waiting."""
    left = [*pauses]
    return RetryPolicy(attempts=1 + len(pauses), pause=lambda seconds: left.pop(0)())


NO_PAUSE = retries()


def shards_of(datasets: Datasets) -> RemoteShards:
    assert isinstance(datasets.train, PackSource) and isinstance(datasets.train.files, RemoteShards)
    return datasets.train.files


def fetch_all(datasets: Datasets) -> None:
    """Fetch all shards that fit into the cache, and wait for them."""
    shards = shards_of(datasets)
    for number in range(len(shards)):
        shards.memory(number)  # requests it
    prefetcher = shards._get_process_state().prefetcher
    threads = [*prefetcher._threads]
    prefetcher.stop()
    for thread in threads:
        thread.join()


def cached_shards(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("*/shards/*"))


@pytest.mark.parametrize("root", ["set", "set/", "set/index.pack", "set.pack", "moved/set", "moved/set.pack"])
def test_samples_equal_the_local_pack_before_and_after_caching(
    root: str, server: Server, cache: Path, expected: list
) -> None:
    datasets = open_remote(server.url(root), cache, 10**9, NO_PAUSE)
    assert read_all(datasets) == expected
    fetch_all(datasets)
    shards_of(datasets).close()
    assert len(cached_shards(cache)) == (1 if root.endswith("set.pack") else 4)
    log_size = len((server.folder / "access.log").read_text())
    assert read_all(datasets) == expected
    assert len((server.folder / "access.log").read_text()) == log_size


def test_shards_beyond_the_cache_size_are_read_by_range(server: Server, cache: Path, expected: list) -> None:
    datasets = open_remote(server.url("set"), cache, 2_100_000, NO_PAUSE)
    fetch_all(datasets)
    assert len(cached_shards(cache)) == 2
    assert read_all(datasets) == expected
    assert sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) <= 2_100_000


def test_concurrent_processes_fetch_each_shard_once(server: Server, cache: Path, expected: list) -> None:
    children = []
    for _ in range(2):
        child = os.fork()
        if not child:
            datasets = open_remote(server.url("slow/set"), cache, 10**9, NO_PAUSE)
            fetch_all(datasets)
            same = read_all(datasets) == expected
            os._exit(0 if same else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    for number in range(4):
        # Each process reads its samples by range until the shards are cached, 4 of 240,000 bytes each.
        name = f"data-{number:05d}.pack"
        assert server.bytes_of(name) <= (server.www / "set" / name).stat().st_size + 2 * 4 * 240_000
    assert cached_shards(cache) == [f"data-{number:05d}.pack" for number in range(4)]


def test_an_interrupted_fetch_resumes_where_it_was_killed(
    server: Server, cache: Path, expected: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.data.remote.cache.CHUNK_BYTES", 1 << 16)
    child = os.fork()
    if not child:
        fetch_all(open_remote(server.url("slow/set"), cache, 10**9, NO_PAUSE))
        os._exit(0)
    while not any(path.stat().st_size > 1 << 18 for path in cache.glob("*/shards/*.part")):
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        sleep(POLL_S)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    partial_bytes = {path.name.split(".")[0]: path.stat().st_size for path in cache.glob("*/shards/*.part")}
    assert max(partial_bytes.values()) > 1 << 18
    (server.folder / "access.log").write_text("")
    server.stop()
    server.start()
    datasets = open_remote(server.url("slow/set"), cache, 10**9, NO_PAUSE)
    fetch_all(datasets)
    for name, num_bytes in partial_bytes.items():
        assert server.bytes_of(f"{name}.pack") == (server.www / "set" / f"{name}.pack").stat().st_size - num_bytes
    assert read_all(datasets) == expected


def test_a_read_retries_until_the_server_is_back(server: Server, cache: Path, expected: list) -> None:
    datasets = open_remote(server.url("set"), cache, 0, retries(lambda: None, server.start))
    assert datasets.train.read(0) == expected[0]
    server.stop()
    assert datasets.train.read(1) == expected[1]
    server.stop()
    datasets = open_remote(server.url("set"), cache, 0, retries(server.start))
    assert datasets.train.read(2) == expected[2]


def test_an_unreachable_server_is_reported_in_one_line(server: Server, cache: Path) -> None:
    server.stop()
    with pytest.raises(DataError) as raised:
        open_remote(server.url("set"), cache, 0, retries(lambda: None))
    where = re.escape(server.url("set/index.pack"))
    assert re.fullmatch(rf"{where}: cannot be read: Connection refused, 2 times \(.*--resume\)", str(raised.value))
    server.start()


def test_a_server_error_is_retried(server: Server, cache: Path, expected: list) -> None:
    server.stop()
    server.start("location = /set/index.pack { return 500; }")

    def fix() -> None:
        server.stop()
        server.start()

    assert read_all(open_remote(server.url("set"), cache, 0, retries(fix))) == expected


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ("nothing", r"/nothing/index.pack: 404 Not Found \(correct data.source.root\)"),
        (
            "closed/set.pack",
            r"/closed/set.pack: 403 Forbidden \(allow reading it, or set PACELINE_URL_CREDENTIALS to its signed URL\)",
        ),
        (
            "locked/set.pack",
            r"/locked/set.pack: 401 Unauthorized \(set PACELINE_URL_CREDENTIALS=https://NAME:PASSWORD@HOST/PATH",
        ),
        ("unranged/set.pack", r"/unranged/set.pack: is sent whole .* \(200 instead of 206\)"),
        ("set/data-00000.pack", r"is a shard of a pack \(name the folder that it lies in\)"),
        ("empty.pack", r"/empty.pack: is not a pack"),
        ("page.pack", r"/page.pack: is not a pack"),
    ],
)
def test_a_url_without_a_readable_pack_is_refused(root: str, message: str, server: Server, cache: Path) -> None:
    (server.www / "empty.pack").touch()
    (server.www / "page.pack").write_text("<html>" * 100)
    with pytest.raises(DataError, match=message):
        open_remote(server.url(root), cache, 0, NO_PAUSE)


def test_credentials_from_the_environment_are_used_and_never_printed(
    server: Server, cache: Path, expected: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_URL_CREDENTIALS", server.url("locked", "me:secret@"))
    assert read_all(open_remote(server.url("locked/set"), cache, 0, NO_PAUSE)) == expected
    monkeypatch.setenv("PACELINE_URL_CREDENTIALS", server.url("locked", "me:wrong-one@"))
    with pytest.raises(DataError, match="401 Unauthorized") as raised:
        open_remote(server.url("locked/set"), cache, 0, NO_PAUSE)
    assert "wrong-one" not in str(raised.value) and str(server.port) in str(raised.value)


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


@pytest.mark.parametrize(
    ("harm", "message"), [(flip_bit, "is damaged: its checksum"), (truncate, r"bytes, not the [\d,]+ of its index")]
)
def test_a_shard_that_differs_from_its_index_is_not_cached(
    harm: Callable[[Path], None], message: str, server: Server, cache: Path
) -> None:
    harm(server.www / "set" / "data-00002.pack")
    datasets = open_remote(server.url("set"), cache, 10**9, NO_PAUSE)
    fetch_all(datasets)
    assert cached_shards(cache)[:2] == [
        "data-00000.pack",
        "data-00001.pack",
    ] and "data-00002.pack" not in cached_shards(cache)
    with pytest.raises(DataError, match=rf"http://127.0.0.1:{server.port}/set/data-00002.pack: .*{message}"):
        read_all(datasets)


def test_a_changed_pack_is_cached_separately(server: Server, cache: Path, expected: list, packed: Path) -> None:
    fetch_all(open_remote(server.url("set.pack"), cache, 10**9, NO_PAUSE))
    datasets = random_datasets()
    (server.www / "set.pack").unlink()
    write_pack(
        datasets,
        server.www / "set.pack",
        PackOptions(every=4, skip_bad=True),
        lambda done, total: None,
        1,
    )
    assert read_all(open_remote(server.url("set.pack"), cache, 10**9, NO_PAUSE)) == expected
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 2


def test_a_silent_server_times_out() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.pack"
        with pytest.raises(DataError, match=r"a.pack: cannot be read: nothing received for 0.05 s, 2 times"):
            retries(lambda: None).read(HttpTransport(stall_timeout_s=0.05), RemoteUrl(url), 0, 10)


@pytest.fixture
def bucket(packed: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a bucket that contains the pack: fsspec's in-memory file system, registered as a cloud's."""
    registry = pytest.importorskip("fsspec.registry", reason="fsspec is not installed (pip install 'paceline[remote]')")
    from fsspec.implementations.memory import MemoryFileSystem

    class Bucket(MemoryFileSystem):
        protocol = "gs"
        store: dict = {}  # noqa: RUF012 - the parent's is shared in the same way

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return super()._strip_protocol(path.removeprefix("gs://"))

    monkeypatch.setitem(registry._registry, "gs", Bucket)
    for path in (packed / "set").iterdir():
        Bucket(skip_instance_cache=True).pipe_file(f"/packs/set/{path.name}", path.read_bytes())
    return "gs://packs/set"


def test_packs_in_buckets_are_read_through_fsspec(bucket: str, cache: Path, expected: list) -> None:
    datasets = open_remote(bucket, cache, 10**9, NO_PAUSE)
    assert read_all(datasets) == expected
    fetch_all(datasets)
    assert len(cached_shards(cache)) == 4
    with pytest.raises(DataError, match=r"gs://packs/none/index.pack: does not exist \(correct data.source.root\)"):
        open_remote("gs://packs/none", cache, 0, NO_PAUSE)
