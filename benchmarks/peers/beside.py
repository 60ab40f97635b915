"""A loader with one worker beside a main thread that is busy in Python: what is left of its rate, and what it costs.

    python benchmarks/peers/beside.py native --data FILE.pack

The main thread takes a batch and then computes in pure Python for nine tenths of what a batch takes the idle loader, so
that a loader which is not disturbed is what the loop waits for. `kept` is the loop's rate over the idle loader's, and
`cost` how much longer the same Python takes than with no loader at all.
"""

import json
import time
from collections.abc import Callable, Iterator

from asked import WARMUP_BATCHES, Asked, parse
from ours import data_of, loader_of, sizes_of, source_of
from stopwatch import measure

_SHARE = 0.9
_TRIES = 20


def main() -> None:
    """Measure what the command line names, and print what was found as JSON on a line."""
    asked = parse(("native", "threads", "processes"))
    data = data_of(asked)
    loader = loader_of(asked, data, source_of(asked, data))
    idle = measure(sizes_of(loader), asked.seconds / 2, WARMUP_BATCHES)
    loader.close()
    work = work_of(_SHARE * idle["wall_s"] / idle["batches"])
    alone_s = median_s(work, asked.seconds / 4)
    sizes = sizes_of(loader)
    for _ in range(WARMUP_BATCHES):
        next(sizes)
    print(json.dumps(beside(asked, sizes, work, idle["images_per_s"], alone_s)), flush=True)


def beside(asked: Asked, sizes: Iterator[int], work: Callable[[], None], idle_rate: float, alone_s: float) -> dict:
    """Return what a loop of batches and Python came to."""
    images, busy = 0, []
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < asked.seconds:
        images += next(sizes)
        busy.append(timed_s(work))
    wall_s = time.perf_counter() - began_s
    rate = images / wall_s
    return {
        "images": images,
        "batches": len(busy),
        "wall_s": wall_s,
        "cpu_s": 0.0,
        "images_per_s": rate,
        "idle_images_per_s": idle_rate,
        "kept": rate / idle_rate,
        "cost": sorted(busy)[len(busy) // 2] / alone_s - 1,
    }


def work_of(seconds: float) -> Callable[[], None]:
    """Return Python that takes about `seconds` on an idle core."""

    def spin(times: int) -> None:
        total = 0
        for number in range(times):
            total += number * number

    times = 10_000
    fastest_s = min(timed_s(lambda: spin(times)) for _ in range(_TRIES))
    times = max(1, round(times * seconds / fastest_s))
    return lambda: spin(times)


def timed_s(work: Callable[[], None]) -> float:
    """Return the seconds that `work` takes."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def median_s(work: Callable[[], None], seconds: float) -> float:
    """Return the median of what `work` takes, again and again for `seconds`."""
    taken: list[float] = []
    while sum(taken) < seconds or len(taken) < 3:
        taken.append(timed_s(work))
    return sorted(taken)[len(taken) // 2]


if __name__ == "__main__":
    main()
