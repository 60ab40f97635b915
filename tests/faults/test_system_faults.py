"""Disk errors, clock jumps and memory limits during a run: it ends with an error, or is not affected."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ARGS = (
    "train",
    "model.width=0.1",
    "data.batch_size=12",
    "data.image_size=16",
    "train.epochs=auto",
    "train.steps=60",
    "schedule.warmup=0ep",
    "train.eval_every=off",
    "checkpoint.every=10st",
    "log.every=1st",
    "log.tensorboard=off",
    "log.report=off",
    "parallel.threads=1",
    "--json",
)
SYNTHETIC = ("synthetic", "data.source.num_images=240", "data.source.num_val_images=24")
LIMIT_S = 150
MIB = 1 << 20
GROUPS = Path("/sys/fs/cgroup")


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a library that makes system calls fail as a file describes; see `faults.c`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler, which makes what the faults are injected by")
    library = tmp_path_factory.mktemp("shim") / "faults.so"
    source = Path(__file__).with_name("faults.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=60)
    return library


class Faulty:
    """The program with faults that can be switched on and off."""

    def __init__(self, folder: Path, shim: Path, *args: str) -> None:
        self._control = folder / "faults"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "paceline", *args],
            cwd=folder,
            env={**os.environ, "LD_PRELOAD": str(shim), "FAULTS": str(self._control)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def fault(self, what: str) -> None:
        """Enable the faults that `file` describes; see `faults.c`."""
        self._control.write_text(what)

    def completed(self) -> tuple[int, str, str]:
        """Return exit code and output after the program ends."""
        try:
            out, err = self.process.communicate(timeout=LIMIT_S)
        finally:
            self.process.kill()
        return self.process.returncode, out, err


def wait_for_steps(run: Path, num: int, process: subprocess.Popen) -> None:
    rows, deadline = run / "steps.jsonl", time.monotonic() + LIMIT_S
    while not rows.exists() or rows.read_bytes().count(b"\n") < num:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def uninterrupted(paceline_in, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of the weights of an uninterrupted run on one rank."""
    folder = tmp_path_factory.mktemp("whole")
    return paceline_in(folder)(*ARGS[:1], *SYNTHETIC, *ARGS[1:], "--run-dir", "run").result["weights_sha256"]


def test_a_run_with_write_errors_ends_with_an_error_and_resumes_to_the_same_weights(
    paceline, tmp_path: Path, shim: Path, uninterrupted: str
) -> None:
    run = tmp_path / "run"
    faulty = Faulty(tmp_path, shim, *ARGS[:1], *SYNTHETIC, *ARGS[1:], "--run-dir", str(run))
    wait_for_steps(run, 12, faulty.process)
    faulty.fault(f"write {run}")
    code, _, err = faulty.completed()
    assert code == 4 and "Traceback" not in err, err
    error = err.splitlines()[-1]
    assert error.startswith("error: ") and "last step, 60, could not be saved" in error and "result.json" in error
    assert "was not saved: Input/output error" in err and "failed for the same reason" in err
    assert paceline("train", str(run), "--resume", "--json").result["weights_sha256"] == uninterrupted


def test_an_image_with_a_read_error_is_named(tmp_path: Path, shim: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for split, num in (("train", 24), ("val", 2)):
        for name in ("cat", "dog"):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for number in range(num):
                image.new("RGB", (20, 20), (number, 80, 120)).save(folder / f"{number}.jpg")
    args = ("folder", "data.source.root=photos", "model.name=resnet18_cifar", "data.loader=threads")
    run = tmp_path / "run"
    faulty = Faulty(tmp_path, shim, *ARGS[:1], *args, *ARGS[1:], "--run-dir", str(run))
    wait_for_steps(run, 3, faulty.process)
    faulty.fault(f"read {tmp_path}/photos/train/cat/3.jpg")
    code, _, err = faulty.completed()
    assert code == 2 and "Traceback" not in err, err
    assert "photos/train/cat/3.jpg" in err and "Input/output error" in err


def test_clock_jumps_change_nothing(tmp_path: Path, shim: Path, uninterrupted: str) -> None:
    run = tmp_path / "run"
    args = (*SYNTHETIC, *ARGS[1:], "parallel.timeout=20s", "data.workers=1")
    faulty = Faulty(tmp_path, shim, *ARGS[:1], *args, "--run-dir", str(run))
    for steps, fault in ((10, "clock -86400"), (30, "clock 86400")):
        wait_for_steps(run, steps, faulty.process)
        faulty.fault(fault)
    code, out, err = faulty.completed()
    assert code == 0, err
    result = json.loads(out)
    assert result["weights_sha256"] == uninterrupted
    assert 0 < result["time"]["wall_s"] < LIMIT_S and 0 < result["goodput"]["wall_s"] < LIMIT_S


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Return an ext4 disk that becomes read-only at an error, and the file that triggers one."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        pytest.skip("making and mounting an ext4 disk needs root and mkfs.ext4")
    image, disk = tmp_path / "disk.img", tmp_path / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True, timeout=60)
    mounted = subprocess.run(["mount", "-o", "loop,errors=remount-ro", image, disk], capture_output=True, timeout=30)
    if mounted.returncode != 0:
        pytest.skip(f"mounting a disk is not allowed: {mounted.stderr.decode().strip()}")
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    device = next(Path(source).name for source, place, *_ in mounts if place == str(disk))
    yield disk, Path("/sys/fs/ext4") / device / "trigger_fs_error"
    subprocess.run(["umount", "-l", disk], check=True, timeout=30)


def test_a_run_on_a_read_only_disk_ends_with_an_error_and_resumes_to_the_same_weights(
    paceline, failing_disk: tuple[Path, Path], uninterrupted: str
) -> None:
    disk, trigger = failing_disk
    run = disk / "run"
    process = paceline.start(*ARGS[:1], *SYNTHETIC, *ARGS[1:], "--run-dir", str(run))
    wait_for_steps(run, 12, process)
    trigger.write_text("1")
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 4 and "Traceback" not in err, err
    assert "Read-only file system" in err and "last step, 60, could not be saved" in err.splitlines()[-1]
    subprocess.run(["umount", disk], check=True, timeout=30)
    repaired = subprocess.run(["e2fsck", "-fy", disk.with_name("disk.img")], capture_output=True, timeout=60)
    assert repaired.returncode in (0, 1), repaired.stdout  # 1: errors were corrected
    subprocess.run(["mount", "-o", "loop", disk.with_name("disk.img"), disk], check=True, timeout=30)
    assert paceline("train", str(run), "--resume", "--json").result["weights_sha256"] == uninterrupted


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """Return a new control group with a memory limit."""
    version_2 = GROUPS if (GROUPS / "cgroup.controllers").exists() else GROUPS / "unified"
    top = GROUPS / "memory" if (GROUPS / "memory").is_dir() else version_2
    group = top / f"paceline-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"a control group cannot be made: {error}")
    if not any((group / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
        group.rmdir()
        pytest.skip(f"{top} does not limit memory")
    yield group
    for _ in range(100):
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)


def test_ranks_that_run_out_of_memory_are_reported(tmp_path: Path, memory_group: Path) -> None:
    run, version_2 = tmp_path / "run", (memory_group / "memory.max").exists()
    limit = memory_group / ("memory.max" if version_2 else "memory.limit_in_bytes")
    used = memory_group / ("memory.current" if version_2 else "memory.usage_in_bytes")
    args = [*ARGS[:1], *SYNTHETIC, *ARGS[1:], "train.steps=100000", "--ranks", "2", "--run-dir", str(run)]
    entering = ["sh", "-c", 'echo $$ > "$0"; exec "$@"', str(memory_group / "cgroup.procs")]
    process = subprocess.Popen(
        [*entering, sys.executable, "-P", "-m", "paceline", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_steps(run, 12, process)
    limit.write_text(str(int(used.read_text()) + 20 * MIB))
    grows = "held = []\nwhile True: held.append(bytearray(1 << 20))"
    enters = f"open({str(memory_group / 'cgroup.procs')!r}, 'w').write('0')"
    neighbour = subprocess.Popen([sys.executable, "-c", f"{enters}\n{grows}"])
    try:
        _, err = process.communicate(timeout=LIMIT_S)
    finally:
        neighbour.kill()
        neighbour.wait(30)
    assert process.returncode == 137, err
    error = err.splitlines()[-1]
    assert "was killed by SIGKILL" in error and "out of memory" in error
