"""Shards behind a URL: the same bytes whether they are cached or not, and always verified."""

import os
import pickle
from pathlib import Path

import pytest

from paceline.core.errors import DataError
from paceline.data.file_lock import acquire_file_lock
from paceline.data.pack.format import INDEX_NAME
from paceline.data.pack.reader import build_pack_datasets, open_pack
from paceline.data.remote.cache import Fetcher, partial_path
from paceline.data.remote.http import HttpTransport
from paceline.data.remote.pack import RemoteShards
from paceline.data.remote.transport import PermanentError, RemoteUrl, RetryPolicy


@pytest.fixture
def expected(packed: Path) -> list:
    return everything(open_pack(packed))


def everything(datasets) -> list:
    return [split.read(index) for split in (datasets.train, datasets.val) for index in range(len(split))]


def test_samples_are_the_same_before_and_after_caching(remote, store, index, expected) -> None:
    shards = remote()
    assert everything(build_pack_datasets(index, shards)) == expected
    remote.fetch(shards)
    assert remote.cached() == {file.name for file in index.files}
    num_requests = len(store.requests)
    assert everything(build_pack_datasets(index, shards)) == expected
    assert len(store.requests) == num_requests
    shards.close()


def test_another_process_uses_the_cached_shards(remote, store, index, expected) -> None:
    first = remote()
    remote.fetch(first, *range(4))
    store.requests.clear()
    plain = RemoteShards(first.addresses, first.files, first.cache, first.digest, HttpTransport, RetryPolicy())
    assert everything(pickle.loads(pickle.dumps(build_pack_datasets(index, plain)))) == expected
    assert store.requests == []


def test_a_forked_process_has_its_own_connections(remote, index, expected) -> None:
    shards = remote(max_bytes=0)
    assert everything(build_pack_datasets(index, shards)) == expected
    child = os.fork()
    if not child:
        same = everything(build_pack_datasets(index, shards)) == expected
        os._exit(0 if same and len(shards._processes) == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    shards.close()


def test_memory_is_none_until_a_shard_is_cached(remote, index) -> None:
    shards = remote()
    assert shards.memory(2) is None
    remote.fetch(shards)
    memory = shards.memory(2)
    assert memory is not None and len(memory) == index.files[2].num_bytes and memory.readonly
    shards.close()
    assert bytes(memory[:6]) == b"plpack"


def test_an_array_is_mapped_from_its_shard_or_read_if_that_does_not_fit(remote, store, packed: Path) -> None:
    content = (packed / "data-00001.pack").read_bytes()
    cached = remote().array(1, 128, 700_000)
    assert cached.tobytes() == content[128:700_128] and cached.flags.writeable
    assert remote.cached() == {"data-00001.pack"}
    content = (packed / "data-00002.pack").read_bytes()
    read = remote(max_bytes=0).array(2, 128, 700_000)
    assert read.tobytes() == content[128:700_128] and read.flags.writeable


def test_an_interrupted_download_is_continued(remote, store, index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.remote.cache.CHUNK_BYTES", 100_000)
    shards = remote()

    def broken(name: str, start: int, stop: int) -> None:
        if start >= 500_000:
            raise PermanentError("403 Forbidden", "sign it")

    store.before = broken
    remote.fetch(shards, 0)
    assert remote.cached() == {partial_path(Path("data-00000.pack"), index.files[0].num_bytes).name}
    store.before = lambda name, start, stop: None
    store.requests.clear()
    shards = remote()
    remote.fetch(shards, 0)
    assert remote.cached() == {"data-00000.pack"}
    assert store.bytes_of("data-00000.pack") == index.files[0].num_bytes - 500_000


def test_a_damaged_partial_shard_is_downloaded_from_the_start(remote, store, index, packed: Path) -> None:
    folder = remote.cache_folder / "digest" / "shards"
    folder.mkdir(parents=True)
    partial_path(folder / "data-00003.pack", index.files[3].num_bytes).write_bytes(b"x" * 300_000)
    shards = remote()
    remote.fetch(shards, 3)
    assert (folder / "data-00003.pack").read_bytes() == (packed / "data-00003.pack").read_bytes()
    assert store.bytes_of("data-00003.pack") == 2 * index.files[3].num_bytes - 300_000


def test_a_damaged_shard_is_an_error_and_never_cached(remote, store) -> None:
    data = bytearray(store.files["data-00001.pack"])
    data[-1] ^= 1
    store.files["data-00001.pack"] = bytes(data)
    shards = remote()
    remote.fetch(shards, 1)
    with pytest.raises(DataError, match=r"http://host/packs/set/data-00001.pack: is damaged: its checksum"):
        shards.read(1, 128, 10)
    assert "data-00001.pack" not in remote.cached()


def test_a_damaged_sample_read_by_range_is_an_error(remote, store, index) -> None:
    shards = remote(max_bytes=0)
    source = build_pack_datasets(index, shards).train
    _, offsets, _ = source.locate([0])
    data = bytearray(store.files["data-00000.pack"])
    data[int(offsets[0])] ^= 1
    store.files["data-00000.pack"] = bytes(data)
    with pytest.raises(DataError, match=r"set/index.pack: train/0.bin: is damaged"):
        source.read(0)


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: data[: len(data) // 2]]
)
def test_a_shard_of_another_size_is_an_error(remote, store, change) -> None:
    store.files["data-00002.pack"] = change(store.files["data-00002.pack"])
    with pytest.raises(DataError, match=r"data-00002.pack: has [\d,]+ bytes, not the [\d,]+ of its index"):
        remote().read(2, 128, 10)


def test_transient_errors_are_retried_with_doubled_pauses(remote, store, packed: Path, fail_times) -> None:
    store.before = fail_times(times=2)
    shards = remote(max_bytes=0)
    assert shards.read(0, 0, 6) == b"plpack"
    assert remote.pauses == [0.5, 1.0]
    store.before = fail_times(times=3)
    with pytest.raises(DataError, match=r"data-00000.pack: cannot be read: 503 Service Unavailable, 3 times \(check"):
        shards.read(0, 0, 6)


def test_a_failed_background_download_is_retried_on_the_next_request(remote, store, fail_times) -> None:
    shards = remote()
    store.before = fail_times(times=3)
    remote.fetch(shards, 0)
    remote.fetch(shards, 0)
    assert remote.cached() == {"data-00000.pack"}


def test_a_shard_that_another_process_downloads_is_not_downloaded_twice(remote, store, index) -> None:
    folder = remote.cache_folder / "digest" / "shards"
    folder.mkdir(parents=True)
    lock = acquire_file_lock(
        partial_path(folder / "data-00000.pack", index.files[0].num_bytes), is_exclusive=True, should_wait=True
    )
    assert lock
    shards = remote()
    remote.fetch(shards, 0)
    assert store.requests == []
    lock.close()
    remote.fetch(shards, 0)
    assert remote.cached() == {"data-00000.pack"}


def test_shards_that_fit_are_cached_and_others_are_read_by_range(remote, store, index, expected) -> None:
    shards = remote(max_bytes=2 * index.files[0].num_bytes + 100)
    remote.fetch(shards, *range(4))
    assert len(remote.cached()) == 2
    store.requests.clear()
    assert everything(build_pack_datasets(index, shards)) == expected
    assert {name for name, *_ in store.requests} == {file.name for file in index.files} - remote.cached()
    remote.fetch(shards)
    assert len(remote.cached()) == 2


def test_least_recently_opened_shards_are_evicted_unless_in_use(remote, index) -> None:
    max_bytes = 2 * index.files[0].num_bytes + 100
    old = remote(max_bytes, "old")
    remote.fetch(old, 0, 1)
    for age, name in enumerate(("data-00001.pack", "data-00000.pack")):
        os.utime(remote.cache_folder / "old" / "shards" / name, (1000 + age, 1000 + age))
    new = remote(max_bytes, "new")
    remote.fetch(new, 2)
    assert (remote.cached("old"), remote.cached("new")) == ({"data-00000.pack", "data-00001.pack"}, set())
    old.close()
    new = remote(max_bytes, "new")
    remote.fetch(new, 2)
    assert (remote.cached("old"), remote.cached("new")) == ({"data-00000.pack"}, {"data-00002.pack"})
    remote.fetch(new, 3)
    assert remote.cached("new") == {"data-00002.pack", "data-00003.pack"}
    assert not (remote.cache_folder / "old").exists() and not (remote.cache_folder / "old.lock").exists()


def test_nothing_is_evicted_for_a_shard_that_does_not_fit_even_then(remote, index) -> None:
    old = remote(10**9, "old")
    remote.fetch(old, 0)
    old.close()
    new = remote(index.files[0].num_bytes - 1, "new")
    remote.fetch(new, 1)
    assert remote.cached("old") == {"data-00000.pack"} and remote.cached("new") == set()


def test_other_files_in_the_cache_folder_are_neither_counted_nor_evicted_nor_locked(remote, index) -> None:
    foreign = remote.cache_folder / "imagenet" / "shards" / "train-000.tar"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(bytes(3 * index.files[0].num_bytes))
    shards = remote(2 * index.files[0].num_bytes + 100)
    remote.fetch(shards, 0, 1, 2)
    assert len(remote.cached()) == 2
    assert foreign.exists() and not (remote.cache_folder / "imagenet.lock").exists()


def test_a_link_in_the_cache_folder_is_not_followed(remote, index, tmp_path: Path) -> None:
    mine = tmp_path / "mine" / "shards" / "train-000.tar"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(bytes(3 * index.files[0].num_bytes))
    remote.cache_folder.mkdir(parents=True)
    (remote.cache_folder / "linked").symlink_to(mine.parent.parent)
    (remote.cache_folder / "linked.lock").touch()
    shards = remote(index.files[0].num_bytes + 100)
    remote.fetch(shards, 0, 1)
    assert mine.exists()
    with pytest.raises(DataError, match=r"data.source.cache: .*linked is a link"):
        shards.cache.acquire("linked")


def test_a_partial_shard_counts_with_its_final_size(remote, index) -> None:
    shards = remote(2 * index.files[0].num_bytes - 1)
    cache = shards.cache
    lock = cache.acquire("digest")
    first, second = (
        partial_path(cache.get_shard_folder("digest") / file.name, file.num_bytes) for file in index.files[:2]
    )
    assert cache.reserve(first, index.files[0].num_bytes)
    assert first.stat().st_size == 0
    assert not cache.reserve(second, index.files[1].num_bytes)
    lock.close()


def test_a_cache_that_is_not_writable_is_an_error(remote, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(DataError, match=r"data.source.cache: .*name another folder"):
        remote().read(0, 0, 6)


def test_a_range_beyond_the_end_is_an_error(remote, index) -> None:
    fetcher = Fetcher(remote.store, RetryPolicy())
    num_bytes = index.files[0].num_bytes
    with pytest.raises(DataError, match="were requested"):
        fetcher.read(RemoteUrl("http://host/data-00000.pack"), num_bytes - 1, num_bytes + 1, num_bytes)


def test_display_url_has_no_credentials() -> None:
    address = RemoteUrl("https://me:secret@host:8443/a/b.pack?sig=secret")
    assert address.display_url == "https://host:8443/a/b.pack" and "secret" not in repr(address)


def test_join_and_sibling() -> None:
    assert RemoteUrl("https://host:8443/a/b.pack").sibling("c.pack").url == "https://host:8443/a/c.pack"
    assert RemoteUrl("https://host/a/").join(INDEX_NAME).url == "https://host/a/index.pack"
    assert RemoteUrl("s3://bucket/pack").join("index.pack").url == "s3://bucket/pack/index.pack"
