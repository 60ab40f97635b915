"""The override that a bottleneck calls for, computed from the run's settings. Pure; "" where none is known to help.

No advice changes what is trained, neither batch size nor epochs. What no override does, such as packing a data set, is
advised in a sentence.
"""

from dataclasses import dataclass
from math import ceil
from typing import Final, Literal

from paceline.core.units import Duration

ADVICE_PACK: Final = (
    "packing the images, which load several times as fast (paceline data pack SRC OUT.pack, then "
    "data.source={name: pack, root: OUT.pack})"
)


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run that an override could change. A setting that is None gets no advice.

    `workers` decode for this rank (0: the rank itself), `cores` are the logical cores it may use. `eval_every` and
    `save_every` are the intervals of evaluations and checkpoints (None: never, or fixed). `augments_on` is `host` or
    `device` (None: no augmentation of batches); `has_files`: samples are image files, read one by one in Python.
    `threads` are those requested per rank. `compression` is None if gradients are not averaged.
    """

    workers: int | None = None
    cores: int | None = None
    eval_every: Duration | None = None
    save_every: Duration | None = None
    saves_in_background: bool | None = None
    augments_on: str | None = None
    has_files: bool = False
    device_type: str = "cpu"
    world_size: int = 1
    strategy: str = "ddp"
    precision: str | None = None
    compile: str | None = None
    compression: str | None = None
    accumulate: int = 1
    threads: int | Literal["auto"] = "auto"

    @property
    def is_gpu(self) -> bool:
        """Whether ranks compute on GPUs."""
        return self.device_type == "cuda"


def advise_fewer_threads(used: RunSettings) -> str:
    """Advise `auto` threads if another number was requested."""
    return "" if used.threads == "auto" else "parallel.threads=auto"


def advise_faster_data(waiting_s: float, wall_s: float, used: RunSettings) -> str:
    """Advise enough workers to decode a batch in the time that a step does not wait, or less work for them."""
    return _advise_more_workers(waiting_s, wall_s, used) or (
        ADVICE_PACK if used.has_files else _advise_device_augment(used)
    )


def advise_compression(used: RunSettings) -> str:
    """Advise gradients of half the bytes, if they are sent in 32 bits."""
    in_16_bits = (used.precision or "").endswith(("_master", "_pure"))
    is_sent_whole = used.world_size > 1 and used.strategy == "ddp" and used.compression == "off"
    return "parallel.compression=bf16" if is_sent_whole and not in_16_bits else ""


def advise_less_compute(used: RunSettings) -> str:
    """Advise 16 bits on GPUs, then compiling: each about halves the memory traffic of most of these models."""
    if not used.is_gpu or used.strategy == "dataparallel":  # its threads neither autocast to bf16 nor compile
        return ""
    # fp64 was chosen for its precision, so it is kept.
    if used.precision in ("fp32", "torch_default", "tf32"):
        return "train.precision=amp"
    return "train.compile=default" if used.precision is not None and used.compile == "off" else ""


def advise_fewer_launches(used: RunSettings) -> str:
    """Advise compiling, or on a single rank one CUDA graph for all kernels."""
    if used.strategy == "dataparallel":  # its replicas are not compiled
        return ""
    # With several ranks or micro-batches, DDP or accumulation reads gradients that a CUDA graph overwrites.
    takes_graphs = used.world_size == 1 and used.accumulate == 1
    match used.compile:
        case "off" | "default" if takes_graphs:
            return "train.compile=reduce-overhead"
        case "off":
            return "train.compile=default"
        case _:
            return ""


def advise_eval_interval(evaluate_s: float, elapsed_s: float, used: RunSettings) -> str:
    """Advise an interval at which evaluation takes no longer than the rest."""
    return _advise_longer_interval("train.eval_every", used.eval_every, evaluate_s, elapsed_s)


def advise_checkpoint_interval(checkpoint_s: float, elapsed_s: float, used: RunSettings) -> str:
    """Advise background saving, or an interval at which it takes no longer than the rest."""
    if used.saves_in_background is False:
        return "checkpoint.background=on"
    return _advise_longer_interval("checkpoint.every", used.save_every, checkpoint_s, elapsed_s)


def _advise_more_workers(waiting_s: float, wall_s: float, used: RunSettings) -> str:
    workers, cores = used.workers, used.cores
    if workers is None or cores is None or waiting_s >= wall_s:
        return ""
    # Without workers decoding took the wait; with some, each of them was decoding all the time.
    decoding_s = waiting_s if workers == 0 else workers * wall_s
    needed = min(ceil(decoding_s / (wall_s - waiting_s)), cores if used.is_gpu else cores - 1)  # the rank computes too
    return f"data.workers={needed}" if needed > workers else ""


def _advise_device_augment(used: RunSettings) -> str:
    return "data.augment_on=device" if used.is_gpu and used.augments_on == "host" else ""


def _advise_longer_interval(field: str, every: Duration | None, taken_s: float, elapsed_s: float) -> str:
    if every is None or every.value == 0 or taken_s >= elapsed_s:
        return ""
    factor = ceil(taken_s / (elapsed_s - taken_s))
    return f"{field}={Duration(every.value * factor, every.unit)}"
