"""Run a command on a disk that is held to what a hard disk does: so many reads a second, so many bytes.

    python benchmarks/slow_disk.py --reads 80 --megabytes 150 --of DIR -- paceline ladder quant data.source.root=DIR/set

The disk is the one that DIR lies on, and the limits are a control group's (blkio of version 1, io of version 2), in
which the command and all that it starts are. What is in the kernel's cache is read as fast as ever. A disk of 7,200
turns a minute seeks and waits for about 12 ms: 80 random reads a second. Programs are to lie on another disk than the
data, such as those of an image that is mounted by `mount -o loop`; else they start as slowly. It needs root.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

MOUNT: Final = Path("/sys/fs/cgroup")
V1: Final = MOUNT / "blkio"


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reads", type=int, default=80, help="a second (80)")
    parser.add_argument("--megabytes", type=int, default=150, help="read a second (150)")
    parser.add_argument("--of", type=Path, required=True, metavar="FOLDER", help="on the disk that is held back")
    parser.add_argument("command", nargs="+", help="what is run, after --")
    args = parser.parse_args()
    limits = {"iops": args.reads, "bps": args.megabytes * 1_000_000}
    with throttle_disk(disk_of(args.of), limits) as group:
        return run_in(group, args.command)


def disk_of(folder: Path) -> str:
    """Return the whole disk that `folder` lies on, as MAJOR:MINOR. Raise `SystemExit` where it lies on none."""
    device = folder.stat().st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if not place.exists():
        raise SystemExit(f"error: --of: {folder} is on no disk (name another folder)")
    whole = place.resolve().parent if (place / "partition").exists() else place
    return (whole / "dev").read_text().strip()


@contextmanager
def throttle_disk(disk: str, limits: dict[str, int]) -> Iterator[Path]:
    """Make a control group whose reads from `disk` are held to `limits`, and remove it when nobody is left in it."""
    is_v1 = V1.is_dir()
    group = (V1 if is_v1 else MOUNT) / f"paceline-{os.getpid()}"
    try:
        group.mkdir()
        try:
            for kind, most in limits.items():
                if is_v1:
                    (group / f"blkio.throttle.read_{kind}_device").write_text(f"{disk} {most}")
                else:
                    (group / "io.max").write_text(f"{disk} r{kind}={most}")
            yield group
        finally:
            group.rmdir()
    except OSError as error:
        raise SystemExit(f"error: {group}: {error.strerror} (be root, and have a blkio or io controller)") from None


def run_in(group: Path, command: Sequence[str]) -> int:
    """Run a command in a group. The shell enters it and becomes the command."""
    enter = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group)]
    return subprocess.run([*enter, *command], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
