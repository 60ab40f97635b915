"""Shared memory and open files are checked before the first step, and a lack is reported in numbers."""

import resource
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from paceline.core.errors import WorldError
from paceline.core.pixels import PixelFormat
from paceline.data.workers import SHARED_MEMORY, check_worker_limits, estimate_batch_bytes

MB = 10**6


@pytest.fixture
def free(monkeypatch):
    """Return a function that sets the free bytes of shared memory."""

    def set_free(num_bytes):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=num_bytes))

    return set_free


def error_message(workers, num_bytes, local_ranks=1):
    with pytest.raises(WorldError) as caught:
        check_worker_limits(workers, 2, num_bytes, local_ranks)
    return str(caught.value)


def test_a_batch_takes_the_bytes_of_its_images_and_a_little_more():
    assert 256 * 3 * 224 * 224 < estimate_batch_bytes(256, PixelFormat(3), 224) < 1.01 * 256 * 3 * 224 * 224
    wide = estimate_batch_bytes(256, PixelFormat(5, "uint16"), 224)
    assert 4 * 256 * 5 * 224 * 224 < wide < 1.01 * 4 * 256 * 5 * 224 * 224


# matrix: 43
def test_too_little_shared_memory_raises_with_the_number_of_workers_that_fit(free):
    free(500 * MB)
    assert error_message(8, 100 * MB) == (
        "data.workers: the batches of 8 workers need 1.7 GB of shared memory, and /dev/shm has 500.0 MB free "
        "(set data.workers=2, or start the container with --shm-size=1623m)"
    )
    check_worker_limits(2, 2, 100 * MB, 1)
    assert "set data.workers=1," in error_message(2, 100 * MB + 1)


# matrix: 43
def test_the_ranks_of_a_node_share_its_memory(free):
    free(64 * MB)
    assert error_message(1, 10 * MB, 4) == (
        "data.workers: the batches of 1 worker of each of 4 ranks need 120.0 MB of shared memory, and /dev/shm has "
        "64.0 MB free (set data.workers=0, or start the container with --shm-size=116m)"
    )


def test_without_workers_no_shared_memory_is_needed(free):
    free(0)
    check_worker_limits(0, 2, 100 * MB, 8)


LIMITED = """
import resource, sys
from paceline.data.workers import check_worker_limits
soft, hard = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
check_worker_limits(2, 2, 1000, 1)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def limited(soft, hard):
    """Return the exit of a process with these limits of open files."""
    command = [sys.executable, "-c", LIMITED, str(soft), str(hard)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# matrix: 43
def test_too_few_open_files_raise_with_numbers():
    ended = limited(64, 64)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert "data.workers: a rank with 2 workers opens up to " in last and "and the limit is 64 (set" in last
    assert "raise it: ulimit -n 1" in last  # a hundred and some


# matrix: 43
def test_a_soft_limit_of_open_files_is_raised_up_to_the_hard_limit():
    assert limited(64, 1024).stdout == "1024\n"
    assert limited(512, 1024).stdout == "512\n"


# matrix: 43
@pytest.mark.skipif(not shutil.which("unshare"), reason="unshare is not installed")
def test_a_small_shared_memory_is_detected_in_a_mount_namespace():
    script = (
        f"mount -t tmpfs -o size=1m none {SHARED_MEMORY} && exec {sys.executable} -c "
        "'from paceline.data.workers import check_worker_limits; check_worker_limits(2, 2, 1000000, 1)'"
    )
    command = ["unshare", "-m", "sh", "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "unshare" in ended.stderr or "mount" in ended.stderr:
        pytest.skip(f"no mounts of one's own here: {ended.stderr.strip()}")
    assert "need 5.0 MB of shared memory, and /dev/shm has 1.0 MB free (set data.workers=0" in ended.stderr


def test_the_limits_of_this_process_are_unchanged(free):
    free(10**12)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    check_worker_limits(1, 2, 1000, 1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
