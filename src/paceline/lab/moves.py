"""Candidate changes that may make a recipe faster, each with the bottlenecks it addresses. Pure.

Whether a candidate helps is measured by `tune` and by the ladder `auto`. No candidate changes the model, the samples or
the number of epochs; other batch sizes are proposed only if allowed.
"""

import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from paceline.core.errors import RecipeError
from paceline.core.results import RunResult
from paceline.core.stages import COMPUTE, DATA_WAIT, EXPOSED, OTHER
from paceline.core.units import count
from paceline.lab.measuring import without_what_is_so
from paceline.lab.trial import vary, words_of
from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.augment import RandomResizedCrop
from paceline.recipe.schema.optim import Adam, Lamb, NovoGrad, RmsProp, Sgd
from paceline.recipe.schema.source import Cifar10, Cifar100, Digits, FashionMnist, Pack, Synthetic

Need = Literal["any", "cuda", "cpu", "ranks"]
Parity = Literal["same", "free"]

WORTH: Final = 1.03
"""Ceiling below which the possible gain is too small to measure in a few runs."""
_PIXELS: Final = (Digits, Synthetic, Cifar10, Cifar100, FashionMnist)
"""Sources that hold pixels of one size in memory."""
_ADAPTIVE: Final = (Adam, Lamb, NovoGrad, RmsProp)
"""Optimizers that divide by the size of the gradient; their LR scales with the square root of the batch."""
_NO_STEPS: Final = ("train.eval_every", "checkpoint.", "measure.")
"""Settings that the bottleneck advice may name but that do not change a step."""
_CEILING: Final = re.compile(r"at most (\d+(?:\.\d+)?)x")

_INPUT: Final = ("input-bound", "straggler-bound")
_COPY: Final = ("input-bound", "copy-bound", "straggler-bound")
_COMPUTE: Final = ("compute-bound",)
_LAUNCH: Final = ("launch-bound", "compute-bound")
_WIRE: Final = ("communication-bound",)
_STEP: Final = ("forward", "backward")


@dataclass(frozen=True)
class Place:
    """Hardware that a recipe runs on: `device`, number of `ranks`, and logical `cores` per rank."""

    device: Literal["cpu", "cuda"]
    ranks: int
    cores: int

    @classmethod
    def of(cls, result: RunResult) -> "Place":
        """Return the hardware of a run; its ranks share the cores of one node."""
        cores = int(result.provenance.get("logical_cores") or 1)
        device: Literal["cpu", "cuda"] = "cuda" if result.provenance.get("device") == "cuda" else "cpu"
        return cls(device, result.world_size, max(1, cores // result.world_size))

    def has(self, need: Need) -> bool:
        """Return whether the hardware fulfills a requirement."""
        return need == "any" or need == self.device or (need == "ranks" and self.ranks > 1)


@dataclass(frozen=True)
class Move:
    """A change to a recipe, what it `explains`, the bottlenecks it `cures` and what it `needs`.

    `expects` are the stages that it should shrink. `parity` is `same` if it must train as before, and `free` if it
    trains on other batches, whose losses cannot be compared.
    """

    name: str
    explains: str
    patch: Patch
    cures: tuple[str, ...]
    expects: tuple[str, ...] = ()
    needs: Need = "any"
    parity: Parity = "same"

    @property
    def keys(self) -> frozenset[str]:
        """Dotted paths that it sets; candidates that share one exclude each other."""
        return frozenset(path for path, _ in self.patch.assignments)


def moves_for(
    recipe: Recipe, place: Place, verdict: Mapping[str, str], *, allow_batch: bool = False
) -> tuple[Move, ...]:
    """Return the candidates that fit `recipe` and change it, the most promising first.

    The advice of `verdict` comes first, then what addresses its bottleneck, then all others, in list order.
    """
    listed = [move for move in _all(recipe, place) if place.has(move.needs)]
    if allow_batch:
        listed += _batches(recipe)
    advised = _advised(verdict)
    known: dict[tuple[str, ...], Move] = {}
    for move in (_reduced(recipe, each) for each in (*listed, *advised)):
        if move is not None:
            known.setdefault(tuple(words_of(move.patch)), move)
    first = [tuple(words_of(move.patch)) for move in advised]
    return tuple(sorted(known.values(), key=lambda move: _rank(move, verdict, first)))


def next_move(recipe: Recipe, place: Place, verdict: Mapping[str, str], tried: Collection[str]) -> Move | None:
    """Return the first candidate for the bottleneck of `verdict` that is not in `tried`, or None."""
    bottleneck = verdict.get("bottleneck", "")
    left = (move for move in moves_for(recipe, place, verdict) if move.name not in tried)
    return next((move for move in left if bottleneck in move.cures), None)


def ceiling_of(verdict: Mapping[str, str]) -> float | None:
    """Return the largest possible speedup without the bottleneck, or None if unknown."""
    found = _CEILING.search(verdict.get("ceiling", ""))
    return float(found[1]) if found else None


def _rank(move: Move, verdict: Mapping[str, str], advised: Collection[tuple[str, ...]]) -> int:
    if tuple(words_of(move.patch)) in advised:
        return 0
    return 1 if verdict.get("bottleneck") in move.cures else 2


def _advised(verdict: Mapping[str, str]) -> list[Move]:
    """Return the advice of `verdict` as a candidate; none if it is prose or does not change a step."""
    try:
        patch = Patch.parse(shlex.split(verdict.get("try", "")))
    except ValueError:  # which a `RecipeError` is too
        return []
    if not patch.assignments or any(path.startswith(_NO_STEPS) for path, _ in patch.assignments):
        return []
    name = "-".join(f"{path.rpartition('.')[2]}-{value}" for path, value in patch.assignments)
    word = re.sub(r"[^A-Za-z0-9.-]+", "-", name)[:40]
    return [Move(word, "advice for the bottleneck", patch, (verdict.get("bottleneck", ""),))]


def _reduced(recipe: Recipe, move: Move) -> Move | None:
    """Return the candidate reduced to settings that change `recipe`; None if there are none, or they do not fit."""
    try:
        changed = vary(recipe, move.patch)
    except RecipeError:
        return None
    if changed == recipe:
        return None
    return replace(move, patch=without_what_is_so(recipe, list(move.patch.assignments)))


def _all(recipe: Recipe, place: Place) -> Iterator[Move]:
    """Yield all candidates, in the order in which they are tried without a verdict: data first."""
    yield from _loaders(recipe)
    yield from _workers(recipe, place)
    yield from _precision(recipe)
    yield from _compute(recipe, place)
    yield from _micro_batches(recipe, place)
    yield from _communication(recipe)
    yield from _books(recipe)


def _loaders(recipe: Recipe) -> Iterator[Move]:
    """Yield other loaders: all give the same samples; `native` gives the same pixels up to rounding."""
    data = recipe.data
    crops = any(isinstance(section, RandomResizedCrop) for section in data.augment)
    if isinstance(data.source, _PIXELS) and not crops:
        beside = (("data.loader", "device"), ("data.workers", "auto"))
        yield _move("loader-device", "keep the whole dataset on the model's device", beside, _COPY, (DATA_WAIT, "h2d"))
    if isinstance(data.source, Pack):
        workers = (("data.workers", "auto"),) if data.workers == 0 else ()
        to_native = (("data.loader", "native"), *workers)
        yield _move("loader-native", "decode packs without Python", to_native, _INPUT, (DATA_WAIT,))
    if not isinstance(data.source, _PIXELS):
        to_threads = (("data.loader", "threads"),)
        yield _move("loader-threads", "load batches with Python threads", to_threads, _INPUT, (DATA_WAIT,))
    if data.augment:
        on_device = (("data.augment_on", "device"),)
        yield _move("augment-on-device", "augment batches on the GPU", on_device, _INPUT, (DATA_WAIT,), needs="cuda")


def _workers(recipe: Recipe, place: Place) -> Iterator[Move]:
    """Yield numbers of workers other than the current one: all cores but one, half, all, and none."""
    data, cores = recipe.data, place.cores
    if data.loader == "device":
        return
    is_inline = data.loader == "auto" and isinstance(data.source, _PIXELS) and place.device == "cpu"
    least = 0 if data.loader == "auto" else 1
    auto = 0 if is_inline else max(least, min(16, cores - 1))  # as in `data.choice`
    now = auto if data.workers == "auto" else data.workers
    for workers in dict.fromkeys((cores - 1, cores // 2, cores, 0)):
        explains = (
            f"load batches with {count(workers, 'worker')}" if workers else "load batches in the rank's main process"
        )
        if workers != now:
            yield _move(f"workers-{workers}", explains, (("data.workers", workers),), _INPUT, (DATA_WAIT,))


def _precision(recipe: Recipe) -> Iterator[Move]:
    """Yield 16-bit precisions for recipes in 32 bits; fp64 is left alone as a deliberate choice."""
    if recipe.train.precision not in ("fp32", "torch_default", "tf32"):
        return
    yield _precise("amp", "compute in 16 bits, by autocast", "cuda")
    yield _precise("bf16", "compute in bfloat16, by autocast", "cpu")
    yield _precise("bf16_master", "keep weights in bfloat16, with a copy in fp32", "cuda")
    yield _precise("tf32", "multiply with 10 bits of mantissa", "cuda")


def _precise(name: str, explains: str, needs: Need) -> Move:
    word = f"precision-{name.replace('_', '-')}"
    return _move(word, explains, (("train.precision", name),), _COMPUTE, (*_STEP, "optimizer"), needs)


def _compute(recipe: Recipe, place: Place) -> Iterator[Move]:
    """Yield memory formats, compile modes and kernels."""
    # Published gains: channels_last 1.21x, fused optimizer with cudnn.benchmark 1.16x (NERSC SC20 tutorial); compile
    # 1.0x to 1.3x on ResNets (airbench, pytorch/pytorch#111182).
    yield _move(
        "channels-last", "use the channels_last memory format", (("model.memory_format", "auto"),), _COMPUTE, _STEP
    )
    benchmark = (("train.cudnn_benchmark", "on"),)
    yield _move("cudnn-benchmark", "let cuDNN benchmark its algorithms", benchmark, _COMPUTE, _STEP, "cuda")
    if isinstance(recipe.optim, Sgd | Adam):
        kernels = (("optim.implementation", "auto"),)
        yield _move("fused-optimizer", "update all weights in one kernel", kernels, _LAUNCH, ("optimizer",))
    if recipe.train.compile == "off":
        yield _compiled("default", "compile the model", "any")
    if recipe.train.compile in ("off", "default"):
        yield _compiled("reduce-overhead", "compile, and launch each step as one CUDA graph", "cuda")
    captures = recipe.train.capture == "off" and recipe.train.compile not in ("reduce-overhead", "max-autotune")
    if captures and place.ranks == 1:
        whole = (("train.capture", "on"),)
        yield _move("capture", "launch the whole step as one CUDA graph", whole, _LAUNCH, (*_STEP, "optimizer"), "cuda")
    for threads in dict.fromkeys((place.cores // 2, place.cores - 1)):  # `auto` has all
        if threads:
            sets = (("parallel.threads", threads),)
            yield _move(
                f"threads-{threads}", f"compute with {count(threads, 'thread')}", sets, _COMPUTE, COMPUTE, "cpu"
            )


def _compiled(mode: str, explains: str, needs: Need) -> Move:
    return _move(f"compile-{mode}", explains, (("train.compile", mode),), _LAUNCH, _STEP, needs)


def _micro_batches(recipe: Recipe, place: Place) -> Iterator[Move]:
    """Yield one micro-batch, and on a CPU, whose caches are small, more micro-batches."""
    # BatchNorm then sees other images at once, so the loss has to show whether it trains alike.
    now = recipe.train.accumulate
    for pieces in dict.fromkeys((1, 2 * now, 4 * now)):
        fits = recipe.data.global_batch_size % (place.ranks * pieces) == 0
        if pieces == now or not fits:
            continue
        explains = f"compute a batch in {pieces} micro-batches" if pieces > 1 else "compute a batch at once"
        sets = (("train.accumulate", pieces),)
        needs: Need = "cpu" if pieces > now else "any"
        yield _move(f"accumulate-{pieces}", explains, sets, _LAUNCH, _STEP, needs)


def _communication(recipe: Recipe) -> Iterator[Move]:
    """Yield fewer, smaller or larger messages between ranks of DDP, and DDP instead of FSDP."""
    if recipe.parallel.strategy == "fsdp":
        to_ddp = (("parallel.strategy", "ddp"), ("parallel.reshard", False))
        yield _move("ddp", "keep a replica on every rank", to_ddp, _WIRE, (EXPOSED, *_STEP), "ranks")
    if recipe.parallel.strategy != "ddp":
        return
    in_16_bits = recipe.train.precision.endswith(("_master", "_pure"))
    if not in_16_bits and recipe.parallel.compression == "off":
        to_bf16 = (("parallel.compression", "bf16"),)
        yield _move("compression-bf16", "send gradients in 16 bits", to_bf16, _WIRE, (EXPOSED,), "ranks")
    for megabytes in (10.0, 50.0, 100.0):
        sets = (("parallel.bucket_mb", megabytes),)
        name, explains = f"buckets-{megabytes:.0f}", f"send {megabytes:.0f} MiB of gradients at once"
        yield _move(name, explains, sets, _WIRE, (EXPOSED,), "ranks")
    as_view = (("parallel.bucket_view", True),)
    yield _move(
        "bucket-view",
        "make gradients views of the communication buckets",
        as_view,
        (*_WIRE, *_LAUNCH),
        ("backward",),
        "ranks",
    )
    if recipe.train.accumulate == 1:
        static = (("parallel.static_graph", True),)
        yield _move("static-graph", "promise DDP a static graph", static, _WIRE, (EXPOSED,), "ranks")


def _books(recipe: Recipe) -> Iterator[Move]:
    # Logging matters for steps of about a millisecond.
    if recipe.log.samples:
        none = (("log.samples", False),)
        yield _move("no-samples", "record no sample indices", none, (*_INPUT, "unknown"), (DATA_WAIT, OTHER))
    if recipe.log.every.unit == "st" and recipe.log.every.value < 10:  # which is the default
        yield _move("log-rarely", "log every tenth step", (("log.every", "10st"),), ("unknown",), (OTHER,))


def _batches(recipe: Recipe) -> Iterator[Move]:
    now = recipe.data.global_batch_size
    yield from (batch_move(recipe, factor * now) for factor in (2, 4))


def batch_move(recipe: Recipe, batch_size: int) -> Move:
    """Return the candidate of another batch size, with the learning rate scaled by the recipe's rule if it has one.

    Otherwise the rate scales linearly (Goyal et al. 2017, arXiv 1706.02677), or by the square root for adaptive
    optimizers (Malladi et al. 2022, arXiv 2205.10287).
    """
    now, optim = recipe.data.global_batch_size, recipe.optim
    rule = optim.lr_scaling
    sets: tuple[tuple[str, Any], ...] = (("data.batch_size", batch_size),)
    if rule == "none":
        rule = "sqrt" if isinstance(optim, _ADAPTIVE) else "linear"
        sets += (("optim.lr_scaling", rule), ("optim.base_batch_size", now))
    explains = f"batch size {batch_size} instead of {now}, learning rate scaled by the {rule} rule"
    cures = (*_LAUNCH, *_WIRE, "straggler-bound")
    return _move(f"batch-{batch_size}", explains, sets, cures, _STEP, parity="free")


def named(recipe: Recipe, path: str, value: Any) -> Move | None:
    """Return the candidate that sets a field to the user's value; None if `recipe` has that value or rejects it."""
    if path == "data.batch_size":
        return _reduced(recipe, batch_move(recipe, value))
    patch = Patch(((path, value),))
    return _reduced(recipe, Move(words_of(patch)[0], "requested by --vary", patch, ()))


def _move(
    name: str,
    explains: str,
    sets: tuple[tuple[str, Any], ...],
    cures: tuple[str, ...],
    expects: tuple[str, ...],
    needs: Need = "any",
    parity: Parity = "same",
) -> Move:
    return Move(name, explains, Patch(sets), cures, expects, needs, parity)
