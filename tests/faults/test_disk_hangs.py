"""A disk that does not respond: the rank that waits for an image gets an error in time, and the program ends."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.data.native import NATIVE_MISSING_MESSAGE, load_native

LIMIT_S = 60.0
NOT_PERMITTED = 77
PROGRAM = f"""
import ctypes, fcntl, mmap, os, struct, sys
import numpy as np
from paceline.data.native import load_native

libc = ctypes.CDLL(None)
hanging = libc.syscall(323, os.O_CLOEXEC)  # userfaultfd: memory that nobody ever fills
if hanging < 0:
    sys.exit({NOT_PERMITTED})
fcntl.ioctl(hanging, 0xC018AA3F, bytearray(struct.pack("3Q", 0xAA, 0, 0)))  # UFFDIO_API
memory = mmap.mmap(-1, 4096)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
fcntl.ioctl(hanging, 0xC020AA00, bytearray(struct.pack("4Q", start, 4096, 1, 0)))  # UFFDIO_REGISTER, what is missing
pool = load_native().Pool(2)
task = pool.submit(
    [memory], np.zeros(1, np.int32), np.zeros(1, np.uint64), np.full(1, 100, np.uint64), np.ones((1, 4)),
    np.zeros(1, bool), True, 16, 3, np.zeros((1, 3, 16, 16), np.uint8), status := np.full(1, -1, np.int32),
)
assert not task.wait(0.01) and status[0] == -1
if sys.argv[1] == "close":
    pool.close()
    assert not task.done
else:
    del task
del pool
print("over")
"""


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_pool_with_a_read_that_never_returns_can_be_closed(how: str, tmp_path: Path) -> None:
    """Otherwise a rank could not exit after the error of `data.worker_timeout`."""
    if load_native() is None:
        pytest.skip(NATIVE_MISSING_MESSAGE)
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("the numbers of the calls that make memory hang are those of Linux on x86-64")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    completed = subprocess.run([sys.executable, program, how], capture_output=True, text=True, timeout=LIMIT_S)
    if completed.returncode == NOT_PERMITTED:
        pytest.skip("userfaultfd is not permitted here (run as root, or set vm.unprivileged_userfaultfd=1)")
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "over\n", "")
