"""What a contender is to do: one command line for all of them, and how what it found is printed."""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from stopwatch import measure

WARMUP_BATCHES = 12
"""More than any of the loaders makes ahead."""
REPEATS = 200
"""Passes over the files that count as one, so that no loader starts again within a window."""


@dataclass(frozen=True)
class ContenderOptions:
    """Images of `size` pixels squared, in batches: random boxes of `scale` of the area, or centers in `eval`.

    `data` has class folders; `cache` holds what a contender writes beforehand.
    """

    name: str
    data: Path
    cache: Path
    purpose: str
    scale: tuple[float, float]
    size: int
    batch: int
    workers: int
    seconds: float
    prepare: bool

    @property
    def is_train(self) -> bool:
        """Whether boxes are drawn."""
        return self.purpose == "train"

    @property
    def short_side(self) -> int:
        """To what the short side is scaled in evaluation, as torchvision's references do: 256 for 224."""
        return round(self.size / 0.875)


Contender = Callable[[ContenderOptions], Iterator[int]]
"""From what is asked for to the sizes of its batches, endlessly; `prepare` is done when it returns."""


def main(contenders: Mapping[str, Contender]) -> None:
    """Run the contender that the command line names, and print what it found as JSON on a line."""
    options = parse(contenders)
    sizes = contenders[options.name](options)
    if options.prepare:
        print(json.dumps({"prepared": options.name}))
        return
    print(json.dumps(measure(sizes, options.seconds, WARMUP_BATCHES)), flush=True)


def parse(names: Iterable[str]) -> ContenderOptions:
    """Return what the command line asks for, of one of `names`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=sorted(names))
    parser.add_argument("--data", type=Path, required=True, help="class folders, or a pack")
    parser.add_argument("--cache", type=Path, default=Path("/tmp"))
    parser.add_argument("--purpose", choices=("train", "eval"), default="train")
    parser.add_argument("--scale", type=float, nargs=2, default=(0.08, 1.0))
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--prepare", action="store_true", help="write what it needs, and stop")
    found = vars(parser.parse_args())
    return ContenderOptions(**{**found, "scale": tuple(found["scale"])})
