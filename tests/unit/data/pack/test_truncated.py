"""A pack that is truncated during a run ends it with one line that names the pack, not by a signal."""

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.core.errors import DataError
from paceline.data.native import load_native
from paceline.data.pack.shards import LocalShards, ShardFile, check_mapped_files, map_file

PAGE = 4096
needs_core = pytest.mark.skipif(load_native() is None, reason="the native core is not built")


@needs_core
@pytest.mark.parametrize("is_private", [False, True])
def test_bytes_beyond_the_end_are_zeros_and_the_file_is_named(tmp_path: Path, is_private: bool) -> None:
    path = tmp_path / "photos\n.pack"
    path.write_bytes(b"x" * 8 * PAGE)
    with path.open("rb") as file:
        memory = map_file(file.fileno(), 6 * PAGE + 5, path, start=PAGE, is_private=is_private)
    seen = np.frombuffer(memory, np.uint8)
    assert len(seen) == 6 * PAGE + 5 and seen.all() and seen.flags.writeable == is_private
    check_mapped_files()
    os.truncate(path, 3 * PAGE)
    check_mapped_files()  # nobody has touched what is gone
    assert seen[: 2 * PAGE].all() and not seen[2 * PAGE :].any()
    with pytest.raises(DataError, match=r"photos\\n\.pack: was truncated.*restore it") as caught:
        check_mapped_files()
    assert len(str(caught.value).splitlines()) == 1
    del seen, memory
    check_mapped_files()  # a later run in this process maps it anew


@needs_core
def test_a_shard_is_mapped_once_and_many_mappings_can_be_released(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}").write_bytes(bytes([number + 1]) * 2 * PAGE)
    files = tuple(ShardFile(f"{number}", 2 * PAGE, 0) for number in range(3))
    for _ in range(20):
        shards = LocalShards(tmp_path, files)
        memories = [shards.memory(number) for number in (2, 0, 1)]
        assert [memory[PAGE] for memory in memories] == [3, 1, 2]
        shards.close()
    check_mapped_files()


# Another program's fault must end it as before, also once the handler is installed.
FAULT = """
import mmap, os, sys
from pathlib import Path
from paceline.data.pack.shards import map_file
path = Path(sys.argv[1])
path.write_bytes(b"x" * 8192)
file = path.open("rb")
ours = map_file(file.fileno(), 4096, path)
theirs = mmap.mmap(file.fileno(), 8192, prot=mmap.PROT_READ)
os.truncate(path, 4096)
print(theirs[5000])
"""


@needs_core
def test_a_fault_in_other_memory_still_ends_the_process(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FAULT, str(tmp_path / "file")], capture_output=True, timeout=60, check=False
    )
    assert ended.returncode == -7 and not ended.stdout


# A listener cuts the pack from within the run, once steps have been made, so the loader is at work when it happens.
TRAIN = """
import os, sys
from pathlib import Path
from paceline.cli import main
from paceline.training.metrics_logger import MetricsLogger
pack, num_bytes, step = Path(sys.argv.pop(1)), int(sys.argv.pop(1)), MetricsLogger.log_step
def cutting(self, state, batch, loss):
    if state.step == 3:
        os.truncate(pack, num_bytes)
    return step(self, state, batch, loss)
MetricsLogger.log_step = cutting
main()
"""
TRAIN_ARGS = (
    *("data.image_size=32", "data.batch_size=16", "data.workers=2", "train.epochs=auto", "train.steps=2000"),
    *("model.name=speednet94", "model.width=0.1", "parallel.device=cpu", "parallel.threads=1", "log.tensorboard=off"),
    *("train.eval_every=off", "checkpoint.every=off", "measure.telemetry=off", "data.on_bad_image=skip"),
)


@pytest.fixture(scope="module")
def photos(paceline_in, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a pack of 400 noisy photographs, most of a megabyte."""
    folder = tmp_path_factory.mktemp("photos")
    draw = np.random.default_rng(0)
    for number in range(400):
        image = Image.fromarray(draw.integers(0, 255, (48, 48, 3), dtype=np.uint8))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=90)
        path = folder / "images" / ("train" if number < 320 else "val") / f"class{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.getvalue())
    packed = paceline_in(folder)("data", "pack", "folder", "photos.pack", f"data.source.root={folder / 'images'}")
    assert packed.code == 0, packed.err
    return folder / "photos.pack"


@needs_core
@pytest.mark.parametrize(("loader", "num_bytes"), [("native", 1000), ("native", 400_000), ("threads", 1000)])
def test_a_pack_truncated_during_a_run_ends_it_with_one_line(
    photos: Path, forking, tmp_path: Path, loader: str, num_bytes: int
) -> None:
    pack, script = tmp_path / "photos.pack", tmp_path / "cutting.py"
    pack.write_bytes(photos.read_bytes())
    script.write_text(TRAIN)
    assert pack.stat().st_size > 2 * num_bytes
    data = ("data.source.name=pack", f"data.source.root={pack}", f"data.loader={loader}")
    args = ("train", "folder", *data, *TRAIN_ARGS, "--run-dir", "run")
    ended = forking.start([str(script), str(pack), str(num_bytes), *args], tmp_path, {})
    _, err = ended.communicate(timeout=300)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert ended.returncode == 2, err[-2000:]
    assert len(lines) == 1 and str(pack) in lines[0] and "truncated" in lines[0] and "restore it" in lines[0]
    assert "Traceback" not in err
