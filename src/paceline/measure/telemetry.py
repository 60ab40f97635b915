"""Look at the node every few seconds while a run goes on, from a thread of its own that holds no lock of the run.

The longer a run goes on, the less often: after each `SAMPLES_PER_DOUBLING` looks the time between two is doubled. So a run
of t seconds has about 1,000 log2(1 + t / (1,000 every_s)) looks: at first every 5 s, 4,100 on the first day, and 10,500
in three months, which are 19 MB of a node with eight GPUs.

A look takes 0.5 ms of CPU time on 2 cores, 0.02 ms more for each thread of the ranks and of their workers, and a
millisecond more on 256 cores, most of it in the kernel (measured: means of 100 and 200 looks without GPUs). Loader
workers may be forked meanwhile: whatever is imported or opened is so before the thread starts, and no lock that a
worker could need is taken by it.
"""

import contextlib
import importlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, Protocol, Self, final

from paceline.core.limits import find_limits
from paceline.core.units import Duration
from paceline.measure.node import NodeSampler
from paceline.measure.nvml import GpuSampler, build_gpu_sampler
from paceline.measure.rate import unix_s
from paceline.measure.timing import now_s

SAMPLES_PER_DOUBLING: Final = 1000
"""After so many looks the time between two of them is doubled."""
LAST_SAMPLE_S: Final = 2.0
"""How long the end of a run waits for a look that has begun: a driver whose GPU is lost may not return at all."""
_MIN_INTERVAL_S: Final = 0.5
"""Seconds that the last look is after the one before at least; rates of fewer are a matter of chance."""

WriteRow = Callable[[dict[str, Any]], None]
"""Take a row: `unix_s`, the values of `NodeSampler.sample`, and in `gpus` the rows of `NvmlSampler.sample`."""


class Telemetry(Protocol):
    """Look at the node between `start` and `close`; also a context."""

    missing: str
    """What is not looked at though it was asked for, and why; mostly nothing."""

    def start(self) -> None:
        """Begin to look."""
        ...

    def close(self) -> None:
        """Look a last time, and no more."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


@final
class NoTelemetry:
    """Look at nothing."""

    def __init__(self, missing: str = "") -> None:
        self.missing = missing

    def start(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@final
class NodeTelemetry:
    """Look at `node` and `gpus` every `every_s` seconds, and hand the row to `write`, which may raise `OSError`.

    After each `SAMPLES_PER_DOUBLING` looks, with the `looks_before` of earlier processes, that time is doubled.

    One `warn`, from the thread that looks, stands for all rows that `write` refuses. The last look is at the end, so
    that a run that is shorter than `every_s` has one; `close` waits `last_look_s` seconds for it.
    """

    def __init__(
        self,
        node: NodeSampler,
        gpus: GpuSampler,
        every_s: float,
        write: WriteRow,
        warn: Callable[[str], None],
        *,
        missing: str = "",
        looks_before: int = 0,
        now: Callable[[], float] = now_s,
        last_look_s: float = LAST_SAMPLE_S,
    ) -> None:
        self.missing = missing
        self._node, self._gpus, self._every_s, self._write, self._warn = node, gpus, every_s, write, warn
        self._now, self._last_look_s = now, last_look_s
        self._num_looks = looks_before
        self._has_failed = False
        self._closes = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-telemetry", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Look a last time, and wait for that, but not for ever."""
        self._closes.set()
        self._thread.join(self._last_look_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        with contextlib.closing(self._gpus):
            looked_s = self._now()
            while not self._closes.wait(sample_interval_s(self._every_s, self._num_looks)):
                looked_s = self._now()
                self._write_sample()
            if self._now() - looked_s >= _MIN_INTERVAL_S:
                self._write_sample()

    def _write_sample(self) -> None:
        self._num_looks += 1
        row = {"unix_s": round(unix_s(), 3), **self._node.sample(), "gpus": self._gpus.sample()}
        try:
            self._write(row)
        except OSError as error:
            if not self._has_failed:
                what = error.strerror or str(error)
                self._warn(f"measure.telemetry: a look cannot be written: {what} (training goes on)")
            self._has_failed = True


def sample_interval_s(every_s: float, num_looks: int) -> float:
    """Return how many seconds to wait for the next look, after `num_looks`."""
    return every_s * 2.0 ** min(num_looks // SAMPLES_PER_DOUBLING, 20)  # 60 days at 5 s; a thread cannot wait for ever


def build_telemetry(
    every: Duration | Literal["off"],
    write: WriteRow,
    warn: Callable[[str], None],
    *,
    ranks: Sequence[int] = (),
    gpus: Sequence[int] | Literal["all"] = "all",
    looks_before: int = 0,
    load: Callable[[str], Any] = importlib.import_module,
) -> Telemetry:
    """Return what looks at this node; nothing where `measure.telemetry` is off or psutil is not installed.

    `ranks` are the process ids of the run's ranks on this node (none: this process), `gpus` NVML's numbers of the
    GPUs to look at, none for a run on the CPU; `looks_before` are the rows that earlier processes of the run have
    written. `load` imports a module by its name.
    """
    if every == "off":
        return NoTelemetry()
    try:
        psutil = load("psutil")
    except ImportError:
        return NoTelemetry("psutil is not installed (pip install 'paceline[telemetry]')")
    looks_at, missing = build_gpu_sampler(gpus, load)
    node = NodeSampler(psutil, ranks or (os.getpid(),), find_limits(), now_s)
    return NodeTelemetry(node, looks_at, every.seconds, write, warn, missing=missing, looks_before=looks_before)
