"""A killed `data pack` leaves no incomplete pack that looks complete, and the next run finishes it."""

import io
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from paceline.core.dataset import Datasets
from paceline.core.errors import DataError
from paceline.data.convert import assemble, pack_writer
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.pack.reader import open_pack
from paceline.data.sources.folder import load_folder
from paceline.recipe.schema.source import Folder

IMAGES = 26
OPTIONS = [PackOptions(), PackOptions(shard_bytes=10_000)]


@pytest.fixture
def photos(tmp_path: Path, monkeypatch) -> Datasets:
    """Return small images, with small shards allowed."""
    monkeypatch.setattr(pack_writer, "_FILES_PER_TASK", 2)
    monkeypatch.setattr(pack_writer, "_MIN_SHARD_BYTES", 1000)
    for number in range(IMAGES):
        path = tmp_path / "photos" / ("val" if number % 4 == 3 else "train") / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (20, 20, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        path.write_bytes(file.getvalue())
    for split in ("train", "val"):
        for name in "ab":  # one image of each class in both splits
            path = tmp_path / "photos" / split / name
            path.mkdir(exist_ok=True)
            (path / "more.png").write_bytes(file.getvalue())
    return load_folder(Folder(root=str(tmp_path / "photos")))


def pack(photos: Datasets, out: Path, options: PackOptions, progress=lambda done, total: None) -> None:
    write_pack(photos, out, options, progress, workers=2)


def contents(path: Path) -> dict[str, bytes]:
    files = path.iterdir() if path.is_dir() else [path]
    return {file.name.replace("again", "whole"): file.read_bytes() for file in files}


def run_in_child(work: Callable[[], None]) -> int:
    """Do `work` in a child process; return its exit status."""
    pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def assert_complete_or_absent(photos: Datasets, out: Path) -> bool:
    """Return whether a pack exists; assert that it is complete if it does."""
    if not out.exists():
        with pytest.raises(DataError, match="does not exist"):
            open_pack(out)
        return False
    found = open_pack(out)
    for each, other in ((found.train, photos.train), (found.val, photos.val)):
        assert [each.read(index) for index in range(len(each))] == [other.read(index) for index in range(len(other))]
    return True


# matrix: 39
@pytest.mark.parametrize("options", OPTIONS, ids=["one file", "shards"])
def test_packing_killed_repeatedly_gives_the_same_bytes(photos, tmp_path, options) -> None:
    pack(photos, tmp_path / "whole", options)
    out, total = tmp_path / "again", len(photos.train) + len(photos.val)
    draw, kills = random.Random(0), 0
    while not out.exists():

        def die(done: int, total: int, at: int = 1 + draw.randrange(total + 9 * kills)) -> None:
            if done >= at:  # killed from another thread, so that any instruction may be the last
                wait_s = draw.random() * 0.002
                threading.Timer(wait_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

        code = run_in_child(lambda die=die: pack(photos, out, options, die))
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
        assert_complete_or_absent(photos, out)
        assert kills < 200, "it comes no further"
    assert kills >= 3
    assert_writes_nothing(photos, out, options)
    assert contents(out) == contents(tmp_path / "whole")


def assert_writes_nothing(photos: Datasets, out: Path, options: PackOptions) -> None:
    """Pack once more over whatever a kill after the last rename may have left."""
    if list(out.parent.glob(".again*")):
        pack(photos, out, PackOptions(shard_bytes=options.shard_bytes, overwrite=True))
    assert not list(out.parent.glob(".again*"))


CALLS = {"fsync": os, "rmdir": Path, "replace": Path, "unlink": Path, "move_without_overwriting": assemble}


# matrix: 39
@pytest.mark.parametrize("options", OPTIONS, ids=["one file", "shards"])
def test_a_kill_around_any_flush_leaves_nothing_or_a_complete_pack(photos, tmp_path, monkeypatch, options) -> None:
    out, state, killed = tmp_path / "again", SimpleNamespace(left=-1, seen=0), 0

    def dying(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **args: object) -> object:
            tick()
            result = real(*arguments, **args)
            tick()
            return result

        return call

    def tick() -> None:
        state.left, state.seen = state.left - 1, state.seen + 1
        if state.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a kill loses nothing that the kernel has received
    for name, owner in CALLS.items():
        monkeypatch.setattr(owner, name, dying(getattr(owner, name)))
    pack(photos, tmp_path / "whole", options)
    last = state.seen
    assert last >= 20
    for number in (1, 2, 3, 7, 12, *range(last - 10, last + 1)):
        state.left = number
        killed += run_in_child(lambda: pack(photos, out, options)) == -signal.SIGKILL
        state.left = -1
        if not assert_complete_or_absent(photos, out):
            pack(photos, out, options)
        found = contents(out)
        for name in [
            name for name in found if name.endswith(".rows") or name == "pack.key"
        ]:  # a kill after the last rename may leave it beside the shards
            found.pop(name, None)
        assert found == contents(tmp_path / "whole")
        for path in (out, tmp_path / ".again.part"):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    assert killed >= 14
