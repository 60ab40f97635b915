"""A transport over files in memory, which can fail like a server, and a pack to read through it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from paceline.core.dataset import DatasetInfo, Datasets, Split
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.pack.format import INDEX_NAME
from paceline.data.pack.index import PackIndex, open_index
from paceline.data.remote.cache import ShardCache
from paceline.data.remote.pack import RemoteShards
from paceline.data.remote.transport import ByteRange, RemoteUrl, RetryPolicy, TransientError

URL = "http://host/packs/set"
TIMEOUT_S = 60


@dataclass
class Store:
    """A transport over files by name. `before` is called before each request, and may raise or change the files."""

    files: dict[str, bytes]
    before: Callable[[str, int, int], None] = lambda name, start, stop: None
    requests: list[tuple[str, int, int]] = field(default_factory=list)

    def read(self, address: RemoteUrl, start: int, stop: int) -> ByteRange:
        self.requests.append((address.file_name, start, stop))
        self.before(address.file_name, start, stop)
        data = self.files[address.file_name]
        return ByteRange(data[start:stop], len(data))

    def close(self) -> None:
        pass

    def bytes_of(self, name: str) -> int:
        return sum(stop - start for requested, start, stop in self.requests if requested == name)


@dataclass(frozen=True)
class Random:
    """Files of random bytes, which no format compresses."""

    info: DatasetInfo
    num_bytes: int

    def __len__(self) -> int:
        return self.info.num_images

    def read(self, index: int) -> tuple[bytes, int]:
        rng = np.random.default_rng([index, self.info.split == "val"])
        return rng.bytes(self.num_bytes), index % 2

    def name_of(self, index: int) -> str:
        return f"{self.info.split}/{index}.bin"


def random_datasets(num_images: int, num_bytes: int) -> Datasets:
    def of(split: Split) -> Random:
        info = DatasetInfo("random", split, num_images, ("a", "b"), 3, None, (0.5,) * 3, (0.2,) * 3)
        return Random(info, num_bytes)

    return Datasets(of("train"), of("val"))


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of four shards of about a megabyte."""
    out = tmp_path_factory.mktemp("packed") / "set"
    options = PackOptions(shard_bytes=1 << 20, skip_bad=True)
    write_pack(random_datasets(8, 240_000), out, options, lambda done, total: None, 1)
    assert len(list(out.glob("data-*.pack"))) == 4
    return out


@pytest.fixture
def store(packed: Path) -> Store:
    return Store({path.name: path.read_bytes() for path in packed.iterdir()})


@pytest.fixture
def index(packed: Path) -> PackIndex:
    return open_index(packed / INDEX_NAME)


@dataclass
class Remote:
    """Builds the shards of the store, all with the same cache."""

    store: Store
    index: PackIndex
    cache_folder: Path
    pauses: list[float] = field(default_factory=list)

    def __call__(self, max_bytes: int = 10**9, digest: str = "digest") -> RemoteShards:
        addresses = tuple(RemoteUrl(f"{URL}/{file.name}") for file in self.index.files)
        retry = RetryPolicy(attempts=3, pause=self.pauses.append)
        cache = ShardCache(self.cache_folder, max_bytes)
        return RemoteShards(addresses, self.index.files, cache, digest, lambda: self.store, retry)

    def fetch(self, shards: RemoteShards, *numbers: int) -> None:
        """Request shards as the native loader does, and wait until all requested ones are fetched or have failed."""
        for number in numbers:
            shards.memory(number)
        prefetcher = shards._get_process_state().prefetcher
        threads = [*prefetcher._threads]
        prefetcher.stop()
        for thread in threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), f"a shard is not fetched within {TIMEOUT_S} s"

    def cached(self, digest: str = "digest") -> set[str]:
        return {path.name for path in (self.cache_folder / digest / "shards").glob("*")}


@pytest.fixture
def remote(store: Store, index: PackIndex, tmp_path: Path) -> Remote:
    return Remote(store, index, tmp_path / "cache")


@pytest.fixture
def fail_times() -> Callable[..., Callable[[str, int, int], None]]:
    """Return a function that builds a `Store.before` that fails `times` times."""

    def failing(*, times: int) -> Callable[[str, int, int], None]:
        remaining = [times]

        def before(name: str, start: int, stop: int) -> None:
            remaining[0] -= 1
            if remaining[0] >= 0:
                raise TransientError("503 Service Unavailable")

        return before

    return failing
