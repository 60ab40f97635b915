"""Shards behind a URL: the same bytes whether they are kept or not, and nothing is believed that is not proved."""

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


def test_samples_are_those_of_the_pack_before_and_after_the_shards_are_here(remote, store, index, expected) -> None:
    shards = remote()
    assert everything(build_pack_datasets(index, shards)) == expected
    shards.wait()
    assert remote.kept() == {file.name for file in index.files}
    num_asked = len(store.asked)
    assert everything(build_pack_datasets(index, shards)) == expected
    assert len(store.asked) == num_asked
    shards.close()


def test_another_process_finds_what_is_kept(remote, store, index, expected) -> None:
    first = remote()
    first.prefetch(range(4))
    first.wait()
    store.asked.clear()
    plain = RemoteShards(first.addresses, first.files, first.cache, first.digest, HttpTransport, RetryPolicy())
    assert everything(pickle.loads(pickle.dumps(build_pack_datasets(index, plain)))) == expected
    assert store.asked == []


def test_a_forked_process_reads_with_connections_of_its_own(remote, index, expected) -> None:
    shards = remote(max_bytes=0)
    assert everything(build_pack_datasets(index, shards)) == expected
    child = os.fork()
    if not child:
        same = everything(build_pack_datasets(index, shards)) == expected
        os._exit(0 if same and len(shards._processes) == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    shards.close()


def test_memory_is_none_until_a_shard_is_here(remote, index) -> None:
    shards = remote()
    assert shards.memory(2) is None
    shards.wait()
    memory = shards.memory(2)
    assert memory is not None and len(memory) == index.files[2].num_bytes and memory.readonly
    shards.close()
    assert bytes(memory[:6]) == b"plpack"


def test_an_array_waits_for_its_shard_and_is_read_where_that_does_not_fit(remote, store, packed: Path) -> None:
    content = (packed / "data-00001.pack").read_bytes()
    kept = remote().array(1, 128, 700_000)
    assert kept.tobytes() == content[128:700_128] and kept.flags.writeable
    assert remote.kept() == {"data-00001.pack"}
    content = (packed / "data-00002.pack").read_bytes()
    read = remote(max_bytes=0).array(2, 128, 700_000)
    assert read.tobytes() == content[128:700_128] and read.flags.writeable


def test_an_interrupted_fetch_goes_on_where_it_was(remote, store, index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.remote.cache.CHUNK_BYTES", 100_000)
    shards = remote()

    def broken(name: str, start: int, stop: int) -> None:
        if start >= 500_000:
            raise PermanentError("403 Forbidden", "sign it")

    store.before = broken
    shards.prefetch([0])
    shards.wait()
    assert remote.kept() == {partial_path(Path("data-00000.pack"), index.files[0].num_bytes).name}
    store.before = lambda name, start, stop: None
    store.asked.clear()
    shards = remote()
    shards.prefetch([0])
    shards.wait()
    assert remote.kept() == {"data-00000.pack"}
    assert store.bytes_of("data-00000.pack") == index.files[0].num_bytes - 500_000


def test_a_part_that_is_damaged_is_fetched_again_from_its_start(remote, store, index, packed: Path) -> None:
    folder = remote.top / "digest" / "shards"
    folder.mkdir(parents=True)
    partial_path(folder / "data-00003.pack", index.files[3].num_bytes).write_bytes(b"x" * 300_000)
    shards = remote()
    shards.prefetch([3])
    shards.wait()
    assert (folder / "data-00003.pack").read_bytes() == (packed / "data-00003.pack").read_bytes()
    assert store.bytes_of("data-00003.pack") == 2 * index.files[3].num_bytes - 300_000


def test_a_damaged_shard_is_told_of_and_never_kept(remote, store) -> None:
    data = bytearray(store.files["data-00001.pack"])
    data[-1] ^= 1
    store.files["data-00001.pack"] = bytes(data)
    shards = remote()
    shards.prefetch([1])
    shards.wait()
    with pytest.raises(DataError, match=r"http://host/packs/set/data-00001.pack: is damaged: its checksum"):
        shards.read(1, 128, 10)
    assert "data-00001.pack" not in remote.kept()


def test_a_damaged_sample_that_comes_by_its_range_is_told_of_too(remote, store, index) -> None:
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
def test_a_shard_of_another_size_is_told_of(remote, store, change) -> None:
    store.files["data-00002.pack"] = change(store.files["data-00002.pack"])
    with pytest.raises(DataError, match=r"data-00002.pack: has [\d,]+ bytes, not the [\d,]+ of its index"):
        remote().read(2, 128, 10)


def test_what_fails_for_a_while_is_tried_again_with_doubled_pauses(remote, store, packed: Path, passing) -> None:
    store.before = passing(times=2)
    shards = remote(max_bytes=0)
    assert shards.read(0, 0, 6) == b"plpack"
    assert remote.pauses == [0.5, 1.0]
    store.before = passing(times=3)
    with pytest.raises(DataError, match=r"data-00000.pack: cannot be read: 503 Service Unavailable, 3 times \(check"):
        shards.read(0, 0, 6)


def test_a_fetch_that_fails_behind_the_back_is_tried_again_when_the_shard_is_wanted_again(
    remote, store, passing
) -> None:
    shards = remote()
    store.before = passing(times=3)
    shards.prefetch([0])
    shards.wait()
    shards.prefetch([0])
    shards.wait()
    assert remote.kept() == {"data-00000.pack"}


def test_a_shard_that_another_process_fetches_is_not_fetched_twice(remote, store, index) -> None:
    folder = remote.top / "digest" / "shards"
    folder.mkdir(parents=True)
    lease = acquire_file_lock(
        partial_path(folder / "data-00000.pack", index.files[0].num_bytes), is_exclusive=True, should_wait=True
    )
    assert lease
    shards = remote()
    shards.prefetch([0])
    shards.wait()
    assert store.asked == []
    lease.close()
    shards.prefetch([0])
    shards.wait()
    assert remote.kept() == {"data-00000.pack"}


def test_what_fits_is_kept_and_the_rest_is_read_by_ranges(remote, store, index, expected) -> None:
    shards = remote(max_bytes=2 * index.files[0].num_bytes + 100)
    shards.prefetch(range(4))
    shards.wait()
    assert len(remote.kept()) == 2
    store.asked.clear()
    assert everything(build_pack_datasets(index, shards)) == expected
    assert {name for name, *_ in store.asked} == {file.name for file in index.files} - remote.kept()
    shards.wait()
    assert len(remote.kept()) == 2


def test_what_was_opened_longest_ago_makes_room_unless_it_is_in_use(remote, index) -> None:
    room = 2 * index.files[0].num_bytes + 100
    old = remote(room, "old")
    old.prefetch([0, 1])
    old.wait()
    for age, name in enumerate(("data-00001.pack", "data-00000.pack")):
        os.utime(remote.top / "old" / "shards" / name, (1000 + age, 1000 + age))
    new = remote(room, "new")
    new.prefetch([2])
    new.wait()
    assert (remote.kept("old"), remote.kept("new")) == ({"data-00000.pack", "data-00001.pack"}, set())
    old.close()
    new = remote(room, "new")
    new.prefetch([2])
    new.wait()
    assert (remote.kept("old"), remote.kept("new")) == ({"data-00000.pack"}, {"data-00002.pack"})
    new.prefetch([3])
    new.wait()
    assert remote.kept("new") == {"data-00002.pack", "data-00003.pack"}
    assert not (remote.top / "old").exists() and not (remote.top / "old.lock").exists()


def test_nothing_is_given_up_for_what_would_not_fit_even_then(remote, index) -> None:
    old = remote(10**9, "old")
    old.prefetch([0])
    old.wait()
    old.close()
    new = remote(index.files[0].num_bytes - 1, "new")
    new.prefetch([1])
    new.wait()
    assert remote.kept("old") == {"data-00000.pack"} and remote.kept("new") == set()


def test_what_else_lies_in_the_folder_of_the_cache_is_neither_counted_nor_given_up_nor_locked(remote, index) -> None:
    foreign = remote.top / "imagenet" / "shards" / "train-000.tar"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(bytes(3 * index.files[0].num_bytes))
    shards = remote(2 * index.files[0].num_bytes + 100)
    shards.prefetch([0, 1, 2])
    shards.wait()
    assert len(remote.kept()) == 2
    assert foreign.exists() and not (remote.top / "imagenet.lock").exists()


def test_a_link_in_the_folder_of_the_cache_is_not_followed(remote, index, tmp_path: Path) -> None:
    mine = tmp_path / "mine" / "shards" / "train-000.tar"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(bytes(3 * index.files[0].num_bytes))
    remote.top.mkdir(parents=True)
    (remote.top / "linked").symlink_to(mine.parent.parent)
    (remote.top / "linked.lock").touch()
    shards = remote(index.files[0].num_bytes + 100)
    shards.prefetch([0, 1])
    shards.wait()
    assert mine.exists()
    with pytest.raises(DataError, match=r"data.source.cache: .*linked is a link"):
        shards.cache.acquire("linked")


def test_a_part_counts_as_the_whole_that_it_will_be(remote, index) -> None:
    shards = remote(2 * index.files[0].num_bytes - 1)
    cache = shards.cache
    lease = cache.acquire("digest")
    first, second = (
        partial_path(cache.get_shard_folder("digest") / file.name, file.num_bytes) for file in index.files[:2]
    )
    assert cache.reserve(first, index.files[0].num_bytes)
    assert first.stat().st_size == 0
    assert not cache.reserve(second, index.files[1].num_bytes)
    lease.close()


def test_a_cache_that_cannot_be_written_to_is_told_of(remote, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(DataError, match=r"data.source.cache: .*name another folder"):
        remote().read(0, 0, 6)


def test_what_is_asked_beyond_the_end_is_an_error(remote, index) -> None:
    fetcher = Fetcher(remote.store, RetryPolicy())
    num_bytes = index.files[0].num_bytes
    with pytest.raises(DataError, match="were asked for"):
        fetcher.read(RemoteUrl("http://host/data-00000.pack"), num_bytes - 1, num_bytes + 1, num_bytes)


def test_an_address_prints_neither_name_nor_password_nor_signature() -> None:
    address = RemoteUrl("https://me:secret@host:8443/a/b.pack?sig=secret")
    assert address.display_url == "https://host:8443/a/b.pack" and "secret" not in repr(address)


def test_an_address_knows_what_lies_beside_it() -> None:
    assert RemoteUrl("https://host:8443/a/b.pack").sibling("c.pack").url == "https://host:8443/a/c.pack"
    assert RemoteUrl("https://host/a/").join(INDEX_NAME).url == "https://host/a/index.pack"
    assert RemoteUrl("s3://bucket/pack").join("index.pack").url == "s3://bucket/pack/index.pack"
