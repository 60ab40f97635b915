"""Is a wrong pixel ever read while indexes of JPEG files are written? SIGKILL, two processes at once, replaced files.

Claim: whatever happens to the cache of indexes, each batch has the pixels that it has without a cache, and no process
ends with an error that it would not have without one.

    python benchmarks/index_cache.py --photographs ~/photos --json benchmarks/results/index-cache.json

Two processes read the same copies of photographs, in random crops over three epochs, with one cache of indexes. Each is
killed at a random moment, again and again. Now and then a file is replaced by another one of the same name, a segment
of the cache is damaged or cut, or the cache is removed. Every batch that was read is compared with that of a process
without a cache. As root, the cache is also put into a file system that is too small for it. The exit status is 1 if a
batch differs or a process fails.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch

from paceline.core.pixels import PixelFormat
from paceline.data.loaders.build import LoaderOptions, build_train_loader
from paceline.data.order import TrainOrder
from paceline.data.sources.image_files import ImageFileSource, build_files_info
from paceline.recipe.schema.data import Data

BATCH, SIZE, EPOCHS = 10, 64, 3
FULL_DISK_BYTES = 64 << 10


@dataclass
class Outcome:
    """What the processes did: `batches` were compared, and `wrong` ones differed; `errors` ended processes."""

    kills: int = 0
    finished: int = 0
    batches: int = 0
    wrong: int = 0
    changes: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)


class Reader:
    """A forked process that reads all batches of `folder` and reports the checksum of each."""

    def __init__(self, folder: Path, cache: str) -> None:
        self._output, end = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                with os.fdopen(end, "w", buffering=1) as output:
                    for checksum in read_checksums(folder, cache):
                        print(checksum, file=output)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(end)

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> tuple[list[int], int]:
        """Return the checksums of the batches that were read, and the exit code, or minus the signal."""
        with os.fdopen(self._output) as output:
            text = output.read()
        _, status = os.waitpid(self.pid, 0)
        whole = text[: text.rfind("\n") + 1]  # a killed process may leave part of a line
        return [int(line) for line in whole.splitlines()], os.waitstatus_to_exitcode(status)


def read_checksums(folder: Path, cache: str) -> Any:
    """Yield the CRC-32 of the pixels of each batch."""
    paths = sorted(os.fsencode(path.name) for path in folder.iterdir())
    info = build_files_info("folder", "train", len(paths), ("all",), PixelFormat(3))
    source = ImageFileSource.from_paths(info, str(folder), paths, np.zeros(len(paths), dtype=np.int32))
    data, order = Data(augment=("random_resized_crop", "flip"), cache=cache), TrainOrder(0, len(paths), BATCH)
    loader = build_train_loader(data, source, order, lambda step: SIZE, LoaderOptions(2, False, loader="native"))
    for batch in loader.batches(0, EPOCHS * len(paths) // BATCH):
        yield zlib.crc32(batch.images.numpy())
    loader.close()


def change(chance: random.Random, folder: Path, spare: list[Path], cache: Path) -> str:
    """Do to the files or to the cache what may happen to them, and return what it was."""
    segments = sorted(cache.rglob("*.index"))
    kind = chance.choice(("replaced file", "removed cache", "damaged segment", "cut segment"))
    if kind == "replaced file":
        new = folder.with_name("new")
        shutil.copy(chance.choice(spare), new)
        new.replace(chance.choice(sorted(folder.iterdir())))
    elif kind == "removed cache":
        shutil.rmtree(cache, ignore_errors=True)
    elif segments and (size := (path := chance.choice(segments)).stat().st_size):
        if kind == "cut segment":
            os.truncate(path, chance.randrange(size))
        else:
            with path.open("r+b") as file:
                file.seek(chance.randrange(size))
                file.write(chance.randbytes(1))
    return kind


def compare(outcome: Outcome, reader: Reader, expected: list[int]) -> None:
    """Wait for a process and compare what it has read."""
    found, code = reader.wait()
    outcome.batches += len(found)
    outcome.wrong += sum(one != other for one, other in zip(found, expected, strict=False))
    outcome.kills += code == -signal.SIGKILL
    outcome.finished += code == 0
    if code not in (0, -signal.SIGKILL):
        outcome.errors.append(f"exit code {code}")
    if code == 0 and len(found) != len(expected):
        outcome.errors.append(f"{len(found)} batches of {len(expected)}")


def read_without_cache(folder: Path) -> tuple[list[int], float]:
    """Return the checksums without a cache, and the seconds that it took."""
    start_s = time.monotonic()
    found, code = Reader(folder, "off").wait()
    assert code == 0 and len(set(found)) > 1
    return found, time.monotonic() - start_s


def run_kills(top: Path, photographs: list[Path], num_images: int, num_kills: int, chance: random.Random) -> Outcome:
    """Kill two readers at a time until `num_kills` have been killed, then let two finish."""
    folder, cache, outcome = top / "images", top / "cache", Outcome()
    folder.mkdir()
    for number, path in enumerate(photographs[:num_images]):
        shutil.copy(path, folder / f"{number:04}.jpg")
    expected, took_s = read_without_cache(folder)
    while outcome.kills < num_kills:
        readers = [Reader(folder, str(cache)) for _ in range(2)]
        for reader in readers:
            time.sleep(chance.random() * took_s)
            reader.kill()
        for reader in readers:
            compare(outcome, reader, expected)
        if chance.random() < 0.3:
            kind = change(chance, folder, photographs[num_images:], cache)
            outcome.changes[kind] += 1
            if kind == "replaced file":
                expected, took_s = read_without_cache(folder)
    for reader in [Reader(folder, str(cache)) for _ in range(2)]:
        compare(outcome, reader, expected)
    if os.geteuid() == 0:
        outcome.changes["full disk"] += 1
        small = top / "small"
        small.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={FULL_DISK_BYTES}", "none", str(small)], check=True)
        try:
            compare(outcome, Reader(folder, str(small / "cache")), expected)
        finally:
            subprocess.run(["umount", str(small)], check=True)
    return outcome


def main() -> int:
    """Run, print and write the outcome; return 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--photographs", type=Path, required=True, help="folder of JPEG files, at any depth")
    parser.add_argument("--images", type=int, default=120, help="files that are read; others replace them")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    args = parser.parse_args()
    torch.set_num_threads(1)  # this process forks
    photographs = sorted(path for path in args.photographs.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    provenance, chance = record.provenance(), random.Random(args.seed)
    chance.shuffle(photographs)
    with tempfile.TemporaryDirectory(prefix="index-cache-") as top:
        outcome = run_kills(Path(top), photographs, args.images, args.kills, chance)
    print(outcome)
    facts = {"images": args.images, "epochs": EPOCHS, "batch": BATCH, "seed": args.seed}
    if args.json:
        record.write(args.json, {"benchmark": "index_cache", **provenance, **facts, **vars(outcome)})
    return int(bool(outcome.wrong or outcome.errors))


if __name__ == "__main__":
    sys.exit(main())
