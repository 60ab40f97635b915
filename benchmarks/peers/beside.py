"""A loader with one worker beside a main thread that is busy in Python: what is left of its rate, and what it costs.

    python benchmarks/peers/beside.py native --data FILE.pack

The main thread takes a batch and then computes in pure Python for nine tenths of what a batch takes the idle loader, so
that a loader which is not disturbed is what the loop waits for. `kept` is the loop's rate over the idle loader's, and
`cost` how much longer the same Python takes than while the loader rests, the median over turns of half a second: what a
core of a shared machine does in a second varies by more than what is to be seen. The Python makes texts and counts them
in a dictionary: a loop of additions alone takes up to 15 % more or less by what other Python ran before it.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator

from contender_options import WARMUP_BATCHES, ContenderOptions, parse
from ours import data_of, loader_of, sizes_of, source_of
from stopwatch import measure

_SHARE = 0.9
_TRIES = 20
_WINDOW_S = 0.5
_REST_S = 0.3


def main() -> None:
    """Measure what the command line names, and print what was found as JSON on a line."""
    options = parse(("native", "threads", "processes"))
    data = data_of(options)
    loader = loader_of(options, data, source_of(options, data))
    idle = measure(sizes_of(loader), options.seconds / 2, WARMUP_BATCHES)
    loader.close()
    work = work_of(_SHARE * idle["wall_s"] / idle["batches"])
    sizes = sizes_of(loader)
    for _ in range(WARMUP_BATCHES):
        next(sizes)
    print(json.dumps(beside(options, sizes, work, idle["images_per_s"])), flush=True)


def beside(options: ContenderOptions, sizes: Iterator[int], work: Callable[[], None], idle_rate: float) -> dict:
    """Return what a loop of batches and Python came to, in turns with the same Python while the loader rests."""
    images, batches, wall_s, costs = 0, 0, 0.0, []
    while wall_s < options.seconds:
        time.sleep(_REST_S)  # in which the loader makes the batches that it makes ahead, and no more
        alone_s = median_s(work, _WINDOW_S / 2)
        busy: list[float] = []
        began_s = time.perf_counter()
        while time.perf_counter() - began_s < _WINDOW_S:
            images += next(sizes)
            busy.append(timed_s(work))
        wall_s += time.perf_counter() - began_s
        batches += len(busy)
        costs.append(statistics.median(busy) / alone_s - 1)
    rate = images / wall_s
    return {
        "images": images,
        "batches": batches,
        "wall_s": wall_s,
        "cpu_s": 0.0,
        "images_per_s": rate,
        "idle_images_per_s": idle_rate,
        "kept": rate / idle_rate,
        "cost": statistics.median(costs),
    }


def work_of(seconds: float) -> Callable[[], None]:
    """Return Python that takes about `seconds` on an idle core."""

    def spin(times: int) -> None:
        counts: dict[str, int] = {}
        for number in range(times):
            word = f"{number % 97}"
            counts[word] = counts.get(word, 0) + len(word)

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
    return statistics.median(taken)


if __name__ == "__main__":
    main()
