"""Bad images are skipped or end the run in one line, as do dead or hung workers, and no worker outlives its rank."""

import ctypes
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from paceline.cli import main
from paceline.core.dataset import DatasetInfo, Sample
from paceline.data import workers as crew
from paceline.data.decode import MAX_PIXELS
from paceline.data.loaders.build import LoaderOptions, build_train_loader
from paceline.data.order import TrainOrder
from paceline.recipe.schema.data import Data

PER_CLASS = 12
SMALL = (
    "train.epochs=2",
    "model.width=0.1",
    "data.batch_size=8",
    "data.image_size=16",
    "data.augment=[random_resized_crop,flip]",
    "parallel.threads=1",
    "log.tensorboard=off",
)
BAD = {"train": ("cat/03.jpg", "cat/04.jpg", "dog/11.jpg"), "val": ("cat/00.jpg", "dog/05.jpg")}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Return a folder of two classes, with 24 training and 24 validation images."""
    for split in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for number in range(PER_CLASS):
                image = Image.effect_noise((40, 30), 40 + number)
                Image.merge("RGB", (image, image, Image.new("L", image.size, 200 * label))).save(
                    folder / f"{number:02}.jpg"
                )
    return tmp_path / "photos"


@pytest.fixture
def damaged_images(images: Path) -> Path:
    """Return the same folder with some damaged images: truncated files, and HTML pages."""
    for split, names in BAD.items():
        for number, name in enumerate(names):
            path = images / split / name
            path.write_bytes(b"<html>404</html>" if number else path.read_bytes()[:500])
    return images


def folder_args(root: Path, *more: str) -> tuple[str, ...]:
    return ("train", "data.source.name=folder", f"data.source.root={root}", *SMALL, *more)


def skip_args(root: Path, run: str, *more: str) -> tuple[str, ...]:
    return folder_args(root, "data.on_bad_image=skip", "--run-dir", run, "--json", *more)


# matrix: 35
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_bad_image_ends_the_run_in_one_line(ranks, damaged_images: Path, num_ranks: int) -> None:
    completed = ranks(*folder_args(damaged_images, "data.workers=0"), ranks=num_ranks)
    errors = [line for output in completed.errors for line in output.splitlines() if line.startswith("error: ")]
    assert 2 in completed.codes and 0 not in completed.codes and len(errors) == 1, completed
    assert any(f"{damaged_images}/train/{name}: cannot be decoded: " in errors[0] for name in BAD["train"])
    assert "Traceback" not in "".join(completed.errors)


# matrix: 35
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_skipped_images_are_counted_and_workers_do_not_change_the_run(
    ranks, damaged_images: Path, tmp_path: Path, lines_of, num_ranks: int
) -> None:
    inline = ranks(*skip_args(damaged_images, "inline", "data.workers=0"), ranks=num_ranks).result
    ahead = ranks(
        *skip_args(damaged_images, "ahead", "data.loader=processes", "data.workers=1"), ranks=num_ranks
    ).result
    assert inline["weights_sha256"] == ahead["weights_sha256"]
    for name, result in (("inline", inline), ("ahead", ahead)):
        assert result["status"] == "completed"
        assert result["bad_images"] == 5
        assert result["eval"]["images"] == 2 * PER_CLASS - len(BAD["val"])
        listed = sorted((row["split"], row["path"]) for row in lines_of(tmp_path / name / "bad_images.jsonl"))
        assert listed == sorted(
            (split, f"{damaged_images}/{split}/{each}") for split, names in BAD.items() for each in names
        )


# matrix: 35
def test_a_resumed_run_with_skipped_images_has_the_same_weights(
    ranks, damaged_images: Path, tmp_path: Path, cut_after
) -> None:
    more = ("data.workers=0", "checkpoint.every=1st", "checkpoint.keep=99")
    uninterrupted = ranks(*skip_args(damaged_images, "run", *more)).result
    cut_after(tmp_path / "run", 2)
    resumed = ranks("train", "run", "--resume", "--json").result
    assert resumed["weights_sha256"] == uninterrupted["weights_sha256"]
    assert resumed["bad_images"] == uninterrupted["bad_images"] == 5


# matrix: 35
def test_too_many_bad_images_end_the_run(ranks, damaged_images: Path) -> None:
    completed = ranks(*skip_args(damaged_images, "run", "data.workers=0", "data.max_bad_images=2"))
    assert completed.codes == [2]
    (error,) = (line for line in completed.errors[0].splitlines() if line.startswith("error: "))
    assert "data.max_bad_images" in error and "paceline data verify" in error


# matrix: 35
def test_a_folder_is_verified_before_a_run(paceline, damaged_images: Path) -> None:
    source = ("data.source.name=folder", f"data.source.root={damaged_images}")
    completed = paceline("data", "verify", *source)
    completed.assert_error(
        f"{damaged_images}/train/cat/03.jpg: cannot be decoded", "5 bad images of 48", "data.on_bad_image=skip"
    )
    rows = [line for line in completed.out.splitlines() if line.startswith(("train ", "val "))]
    assert len(rows) == 5


# matrix: 37
def test_unreadable_files_are_reported_before_the_first_step(ranks, images: Path) -> None:
    os.mkfifo(images / "train/cat/pipe.jpg")
    (images / "train/dog/link.jpg").symlink_to("gone.jpg")
    (images / "train/dog/folder.jpg").mkdir()
    started = time.monotonic()
    completed = ranks(*folder_args(images))
    assert time.monotonic() - started < 10
    assert completed.codes == [2]
    (error,) = completed.errors[0].splitlines()
    assert "3 images cannot be read: cat/pipe.jpg (a pipe or a device), dog/folder.jpg (a folder)" in error


# matrix: 40
def test_too_small_or_inconsistent_data_sets_are_refused_in_one_line(ranks, tmp_path: Path, images) -> None:
    def output(*more: str, num_ranks: int = 1) -> str:
        started = time.monotonic()
        completed = ranks("train", *SMALL, *more, ranks=num_ranks)
        assert time.monotonic() - started < 10
        errors = [line for each in completed.errors for line in each.splitlines()]
        assert 2 in completed.codes and 0 not in completed.codes and len(errors) == 1, completed
        return errors[0]

    listed = tmp_path / "listed.csv"
    listed.write_text(f"path,label\n{images}/train/cat/01.jpg,0\n{images}/train/dog/01.jpg,1\n")
    beyond = tmp_path / "beyond.csv"
    beyond.write_text(f"path,label\n{images}/val/cat/01.jpg,2\n")
    lists = ("data.source.name=manifest", f"data.source.train={listed}")
    folder = ("data.source.name=folder", f"data.source.root={images}")
    assert "label '2' is not in the training list" in output(*lists, f"data.source.val={beyond}")
    assert "data.batch_size: 8" in output(*lists, f"data.source.val={listed}")
    assert "data.batch_size: 3" in output(*lists, f"data.source.val={listed}", "data.batch_size=3", num_ranks=3)
    (images / "train/emu").mkdir()
    assert f"{images}/train/emu: is a class folder without images" in output(*folder)
    shutil.rmtree(images / "train")
    (images / "train/emu").mkdir(parents=True)
    assert f"{images}/train has no images" in output(*folder)


@dataclass(frozen=True)
class Forked:
    """A forked process that runs the program, and does not need to import torch."""

    process: BaseProcess
    err: Path

    def errors(self, timeout_s: float) -> list[str]:
        """Wait until the process ends, and return its error lines."""
        # `join` cannot be limited: it waits for an open file that the program has closed.
        deadline = time.monotonic() + timeout_s
        while self.process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.05)
        text = self.err.read_text()
        assert self.process.exitcode is not None and "Traceback" not in text, text
        return [line for line in text.splitlines() if line.startswith("error: ")]


@pytest.fixture
def fork(tmp_path: Path) -> Iterator[Callable[..., Forked]]:
    """Return a function that starts the program in the test's folder; `prepare` is called first."""
    started: list[BaseProcess] = []

    def start(*arguments: str, prepare: Callable[[], object] = int) -> Forked:
        err = tmp_path / "err"
        process = get_context("fork").Process(target=program, args=(arguments, tmp_path, err, prepare))
        process.start()
        started.append(process)
        return Forked(process, err)

    yield start
    for process in started:
        process.kill()
        process.join()


def program(arguments: tuple[str, ...], folder: Path, err: Path, prepare: Callable[[], object]) -> None:
    for stream in (1, 2):
        os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.closerange(3, 256)
    warnings.resetwarnings()  # only tests turn warnings into errors
    os.chdir(folder)
    sys.argv = ["paceline", *arguments]
    prepare()
    main()


def workers_of(process: Any, folder: Path) -> list[psutil.Process]:
    """Wait until a run of one rank trains, and return its workers."""
    deadline = time.monotonic() + 120
    steps = folder / "steps.jsonl"
    while not (steps.exists() and steps.stat().st_size) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) == 2
    return workers


# matrix: 17
# matrix: 18
@pytest.mark.parametrize(
    ("fault", "says"),
    [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "data.worker_timeout: no batch for 3s: worker ")],
    ids=["killed", "stopped"],
)
def test_a_worker_that_dies_or_hangs_ends_the_run_in_one_line(
    forking, images: Path, tmp_path: Path, clean, fault: signal.Signals, says: str
) -> None:
    endless = ("train.epochs=100000", "train.eval_every=off", "checkpoint.every=off", "log.every=1st")
    workers = ("data.loader=processes", "data.workers=2", "data.worker_timeout=3s")
    arguments = folder_args(images, *endless, *workers, "--run-dir", "run")
    process = forking.start(["-P", "-m", "paceline", *arguments], tmp_path, {})
    try:
        started = workers_of(process, tmp_path / "run")
        started[0].send_signal(fault)
        hurt = time.monotonic()
        _, text = process.communicate(timeout=60)
        assert time.monotonic() - hurt < 10
    finally:
        process.kill()
    (error,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert process.returncode == 1 and "Traceback" not in text
    assert says in error and " in the batch of step " in error
    _, alive = psutil.wait_procs(started, timeout=5)
    assert not alive
    clean(tmp_path / "run", within_s=5.0)


class Silent:
    """A source whose `read` never returns."""

    info = DatasetInfo("made", "train", 64, ("a", "b"), 3, None, (0.5,) * 3, (0.25,) * 3)

    def __len__(self) -> int:
        return 64

    def name_of(self, index: int) -> str:
        return str(index)

    def read(self, index: int) -> Sample:
        time.sleep(600)
        raise AssertionError


def start_late(pids: Connection, before_s: float, after_s: float) -> None:
    """Run as a rank whose workers are slow to start, before and after they are tied to it."""
    tie = crew.die_with_parent

    def late(parent: int) -> None:
        pids.send(os.getpid())
        time.sleep(before_s)
        tie(parent)
        time.sleep(after_s)

    crew.die_with_parent = late
    order = TrainOrder(seed=1, num_images=64, batch_size=8)
    loader = build_train_loader(Data(), Silent(), order, lambda step: 16, LoaderOptions(2, False))
    next(loader.batches(0, 8))


# matrix: 16
@pytest.mark.parametrize(("before_s", "after_s"), [(1.0, 0.0), (0.0, 600.0), (0.0, 0.0)])
def test_starting_workers_end_with_their_killed_rank(before_s: float, after_s: float) -> None:
    """The rank is killed before its workers are tied to it, after that, and while they read."""
    context = get_context("fork")
    pids, mouth = context.Pipe(duplex=False)
    rank = context.Process(target=start_late, args=(mouth, before_s, after_s))
    rank.start()
    workers = [psutil.Process(pids.recv()) for _ in range(2)]
    if not before_s:
        time.sleep(0.3)  # time for the workers to start
    rank.kill()
    rank.join()
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive


# matrix: 43
def test_too_little_shared_memory_is_refused_before_the_run(fork, images: Path, tmp_path: Path) -> None:
    def shrink() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(0x00020000):  # CLONE_NEWNS: a mount namespace of its own
            os._exit(77)
        if libc.mount(None, b"/", None, 0x44000, None) or libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=1m"):
            os._exit(77)

    run = fork(*folder_args(images, "data.loader=processes", "data.workers=2", "data.image_size=128"), prepare=shrink)
    errors = run.errors(60)
    if run.process.exitcode == 77:
        pytest.skip("mounts of one's own are not allowed here")
    assert run.process.exitcode == 2 and len(errors) == 1
    assert "of shared memory, and /dev/shm has 1.0 MB free (set data.workers=0, or start" in errors[0]
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())


# matrix: 43
def test_a_low_limit_of_open_files_is_refused_before_the_run(fork, images: Path) -> None:
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (64, 64))
    run = fork(*folder_args(images, "data.loader=processes", "data.workers=2"), prepare=limit)
    (error,) = run.errors(60)
    assert run.process.exitcode == 2
    assert "opens up to " in error and "the limit is 64 (set data.workers=0, or raise it: ulimit -n " in error


def bombs() -> dict[str, bytes]:
    """Return small files of every format whose header claims more pixels than are ever decoded."""
    side = 14_000  # 196 Mpx, for which libraries without a limit allocate 0.6 GB
    assert side * side > MAX_PIXELS
    tags = [(256, 4, side), (257, 4, side), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1)]
    tags += [(278, 4, side), (279, 4, side * side)]
    tiff = b"II*\0" + struct.pack("<IH", 8, len(tags))
    tiff += b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags) + bytes(4)
    gif = b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0x80, 0, 0) + bytes(6)
    gif += (
        b"\x21\xf9\x04\x08\0\0\0\0" + b"\x2c" + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0) + b"\x02\x02\x4c\x01\0\x3b"
    )
    webp = b"VP8L" + struct.pack("<I", 6) + b"\x2f" + struct.pack("<I", 16382 | 16382 << 14) + b"\0"
    jpeg = b"\xff\xd8\xff\xc0" + struct.pack(">HBHHB", 17, 8, 65500, 65500, 3) + b"\1\x11\0\2\x11\0\3\x11\0"
    bmp = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0)
    return {
        "tiff": tiff,
        "gif": gif,
        "webp": b"RIFF" + struct.pack("<I", 4 + len(webp)) + b"WEBP" + webp,
        "jpeg": jpeg + b"\xff\xda\0\x0c\3\1\0\2\x11\3\x11\0?\0" + bytes(64),
        "bmp": b"BM" + struct.pack("<IHHI", 54 + len(bmp), 0, 0, 54) + bmp,
        "ppm": f"P6 {side} {side} 255\n".encode(),
    }


GROWTH = """
import resource, sys
from paceline.core.errors import DataError
from paceline.data.decode import decode
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    decode(open(sys.argv[1], "rb").read(), channels=3, name="bomb")
except DataError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


# matrix: 36
@pytest.mark.parametrize("kind", ["png", *bombs()])
def test_a_decompression_bomb_is_refused_by_its_header_without_using_memory(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"bomb.{kind}"
    if kind == "png":
        Image.new("1", (14_000, 14_000)).save(path)  # 24 kB that decompress to 196 Mpx, and are valid
        assert path.stat().st_size < 50_000
    else:
        path.write_bytes(bombs()[kind])
    command = [sys.executable, "-c", GROWTH, str(path)]
    output, grown_kb = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
    ours, pillows = f"more than {MAX_PIXELS:,} pixels", "pixels) exceeds limit of "  # Pillow checks some itself
    assert output.startswith("bomb: cannot be decoded: ") and (ours in output or pillows in output)
    assert int(grown_kb) < 200_000
