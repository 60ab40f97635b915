"""How long does the first batch of each sampler take, and how much memory, for a billion images?

Claim: a shuffle of 10^9 images yields its first batch within 0.1 s and 50 MB, as it computes that batch alone. Samplers
that hold weights, or order a whole epoch, are measured with fewer images.

    python benchmarks/samplers.py --json benchmarks/results/samplers-cpu.json

It takes a minute and 2 GB of memory.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import record

from paceline.data.loaders.sampler import balanced_weights
from paceline.data.order import TrainOrder
from paceline.data.sampler import (
    CurriculumSampler,
    DistinctWeightedSampler,
    RepeatedSampler,
    Sampler,
    ShuffleSampler,
    SubsetSampler,
    WeightedSampler,
    choose_subset,
    rank_images,
)
from paceline.data.sources.build import build_datasets
from paceline.recipe.schema.source import Synthetic

BATCH: Final = 4096
MOST: Final = 10**9
STORED: Final = 10**7
"""Images of samplers that hold 8 bytes or more per image."""


def weights(num_images: int) -> Any:
    """Return weights from 1 to 100."""
    return 1.0 + np.arange(num_images) % 100


def balanced(num_images: int) -> Sampler:
    """Return the sampler of 1,000 classes, the largest with a hundred times the images of the smallest."""
    info = build_datasets(Synthetic(num_images=1, num_classes=1000, image_size=1), may_download=False).train.info
    shares = np.cumsum(1.0 / np.arange(10, 1010))
    labels = np.searchsorted(shares, np.linspace(0, shares[-1], num_images, endpoint=False), side="right")
    return WeightedSampler(balanced_weights(info, labels))


SAMPLERS: dict[str, tuple[int, Callable[[int], Sampler]]] = {
    "shuffle": (MOST, lambda num_images: ShuffleSampler()),
    "shuffle by a table": (2**24, lambda num_images: ShuffleSampler()),
    "stored order": (MOST, lambda num_images: ShuffleSampler(is_random=False)),
    "balanced": (STORED, balanced),
    "weighted": (STORED, lambda num_images: WeightedSampler(weights(num_images))),
    "weighted, without replacement": (
        STORED,
        lambda num_images: DistinctWeightedSampler(weights(num_images), num_images // 2),
    ),
    "subset": (STORED, lambda num_images: SubsetSampler(choose_subset(0, num_images, num_images // 10))),
    "curriculum": (
        STORED,
        lambda num_images: CurriculumSampler(rank_images(weights(num_images), is_descending=False), 0.3, 10.0),
    ),
    "repeated": (STORED, lambda num_images: RepeatedSampler(3, BATCH)),
}


def main() -> None:
    """Run, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    parser.add_argument("--only", metavar="SAMPLER", help="measure one, and print its row as JSON")
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(*SAMPLERS[args.only])))
        return
    rows = {}
    for name in SAMPLERS:  # each in a process of its own, for its peak of memory
        command = [sys.executable, __file__, "--only", name]
        rows[name] = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        print(f"{name}: {rows[name]}", flush=True)
    if args.json:
        record.write(args.json, {"benchmark": "samplers", **record.provenance(), "batch": BATCH, **rows})


def measure(num_images: int, build: Callable[[int], Sampler]) -> dict[str, Any]:
    """Return the seconds to build a sampler, to its first and tenth batch, and the bytes that this adds to the peak."""
    TrainOrder(0, 2 * BATCH, BATCH).indices(0)  # loads what numpy loads at its first use
    before = peak_bytes()
    started_s = time.perf_counter()
    order = TrainOrder(0, num_images, BATCH, sampler=build(num_images))
    built_s = time.perf_counter()
    order.indices(0)
    first_s = time.perf_counter()
    for step in range(1, 101):
        order.indices(step)
    return {
        "images": num_images,
        "build_s": round(built_s - started_s, 5),
        "first_batch_s": round(first_s - built_s, 5),
        "later_batch_s": round((time.perf_counter() - first_s) / 100, 6),
        "added_bytes": peak_bytes() - before,
    }


def peak_bytes() -> int:
    """Return the peak of the process's resident memory in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


if __name__ == "__main__":
    main()
