"""Candidates of a search: changes to a recipe that may make it faster, and the bottlenecks they address. Pure."""

import math
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, NoReturn

from paceline.core.errors import RecipeError
from paceline.core.results import RunResult
from paceline.core.setting_effects import changes_result, changes_result_only
from paceline.core.stages import COMPUTE, DATA_WAIT, EXPOSED, OTHER
from paceline.core.units import count
from paceline.lab.patches import drop_unchanged_settings, flatten_patch
from paceline.lab.trial import apply_patch, format_patch
from paceline.recipe.load import Patch, iter_settings
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.augment import RandomResizedCrop
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.optim import Adam, Lamb, NovoGrad, OptimSection, RmsProp, Sgd
from paceline.recipe.schema.source import Cifar10, Cifar100, Digits, FashionMnist, Pack, Synthetic
from paceline.recipe.schema.train import Parallel, Train
from paceline.recipe.yaml import read_yaml_value

Requirement = Literal["any", "cuda", "cpu", "ranks"]
Parity = Literal["same", "free"]

MIN_CEILING: Final = 1.03
"""Ceiling below which the possible gain is too small to measure in a few runs."""
_PIXEL_SOURCES: Final = (Digits, Synthetic, Cifar10, Cifar100, FashionMnist)
"""Sources that hold pixels of one size in memory."""
_ADAPTIVE_OPTIMIZERS: Final = (Adam, Lamb, NovoGrad, RmsProp)
"""Optimizers that divide by the size of the gradient; their LR scales with the square root of the batch."""
_NON_STEP_PREFIXES: Final = ("train.eval_every", "checkpoint.", "measure.")
"""Settings that the bottleneck advice may name but that do not change a step."""
_CEILING_PATTERN: Final = re.compile(r"at most (\d+(?:\.\d+)?)x")

_INPUT: Final = ("input-bound", "straggler-bound")
_LAUNCH: Final = ("launch-bound", "compute-bound")
_MODEL_STAGES: Final = ("forward", "backward")
_FIXED_PREFIXES = ("train.steps", "train.epochs", "train.eval", "measure.", "checkpoint.", "data.replay", "model.name")


class _Effect(NamedTuple):
    """The bottlenecks that a change `cures`, and the stages that it should shrink."""

    cures: tuple[str, ...]
    expects: tuple[str, ...]


_LOADING: Final = _Effect(_INPUT, (DATA_WAIT,))
_COPYING: Final = _Effect(("input-bound", "copy-bound", "straggler-bound"), (DATA_WAIT, "h2d"))
_COMPUTING: Final = _Effect(("compute-bound",), _MODEL_STAGES)
_ARITHMETIC: Final = _Effect(("compute-bound",), (*_MODEL_STAGES, "optimizer"))
_THREADING: Final = _Effect(("compute-bound",), COMPUTE)
_LAUNCHING: Final = _Effect(_LAUNCH, _MODEL_STAGES)
_UPDATING: Final = _Effect(_LAUNCH, ("optimizer",))
_STEPPING: Final = _Effect(_LAUNCH, (*_MODEL_STAGES, "optimizer"))
_SENDING: Final = _Effect(("communication-bound",), (EXPOSED,))
_REPLICATING: Final = _Effect(("communication-bound",), (EXPOSED, *_MODEL_STAGES))
_COPYING_GRADIENTS: Final = _Effect(("communication-bound", *_LAUNCH), ("backward",))
_BATCHING: Final = _Effect((*_LAUNCH, "communication-bound", "straggler-bound"), _MODEL_STAGES)
_RECORDING: Final = _Effect((*_INPUT, "unknown"), (DATA_WAIT, OTHER))
_LOGGING: Final = _Effect(("unknown",), (OTHER,))


@dataclass(frozen=True)
class Hardware:
    """Hardware of a recipe: `device`, number of `ranks`, and logical `cores` per rank."""

    device: Literal["cpu", "cuda"]
    ranks: int
    cores: int

    @classmethod
    def from_result(cls, result: RunResult) -> "Hardware":
        """Return the hardware of a run; its ranks share the cores of one node."""
        cores = int(result.provenance.get("logical_cores") or 1)
        device: Literal["cpu", "cuda"] = "cuda" if result.provenance.get("device") == "cuda" else "cpu"
        return cls(device, result.world_size, max(1, cores // result.world_size))

    def satisfies(self, need: Requirement) -> bool:
        """Return whether the hardware fulfills a requirement."""
        return need == "any" or need == self.device or (need == "ranks" and self.ranks > 1)


@dataclass(frozen=True)
class Candidate:
    """A change to a recipe, what it `explains`, the bottlenecks it `cures` and what it `needs`.

    `expects` are the stages that it should shrink. `parity` is `same` if it must train as before, and `free` if it
    trains on other batches, whose losses cannot be compared.
    """

    name: str
    explains: str
    patch: Patch
    cures: tuple[str, ...]
    expects: tuple[str, ...] = ()
    needs: Requirement = "any"
    parity: Parity = "same"

    @property
    def paths(self) -> frozenset[str]:
        """Dotted paths that it sets; candidates that share one exclude each other."""
        return frozenset(path for path, _ in flatten_patch(self.patch).assignments)


def list_candidates(
    recipe: Recipe, hardware: Hardware, verdict: Mapping[str, str], *, allow_batch: bool = False
) -> tuple[Candidate, ...]:
    """Return the candidates that fit `recipe` and change it, the most promising first.

    These are the advice of `verdict`, candidates for its bottleneck, and all others, in list order.
    """
    listed = [candidate for candidate in _iter_candidates(recipe, hardware) if hardware.satisfies(candidate.needs)]
    if allow_batch:
        listed += [build_batch_candidate(recipe, factor * recipe.data.global_batch_size) for factor in (2, 4)]
    advised = _parse_advice(verdict)
    known: dict[tuple[str, ...], Candidate] = {}
    for candidate in (_reduce_candidate(recipe, each) for each in (*listed, *advised)):
        if candidate is not None:
            known.setdefault(tuple(format_patch(candidate.patch)), candidate)
    first = [tuple(format_patch(candidate.patch)) for candidate in advised]
    return tuple(sorted(known.values(), key=lambda candidate: _rank_candidate(candidate, verdict, first)))


def find_next_candidate(candidates: Iterable[Candidate], bottleneck: str, tried: Collection[str]) -> Candidate | None:
    """Return the first of `candidates` for a bottleneck that is not in `tried`, or None."""
    return next((each for each in candidates if each.name not in tried and bottleneck in each.cures), None)


def parse_ceiling(verdict: Mapping[str, str]) -> float | None:
    """Return the largest possible speedup without the bottleneck, or None if unknown."""
    found = _CEILING_PATTERN.search(verdict.get("ceiling", ""))
    return float(found[1]) if found else None


def _rank_candidate(candidate: Candidate, verdict: Mapping[str, str], advised: Collection[tuple[str, ...]]) -> int:
    if tuple(format_patch(candidate.patch)) in advised:
        return 0
    return 1 if verdict.get("bottleneck") in candidate.cures else 2


def _parse_advice(verdict: Mapping[str, str]) -> list[Candidate]:
    try:
        patch = Patch.parse(shlex.split(verdict.get("try", "")))
    except ValueError:  # prose, such as "starting 2 ranks at most"; a `RecipeError` is a ValueError too
        return []
    if not patch.assignments or any(path.startswith(_NON_STEP_PREFIXES) for path, _ in patch.assignments):
        return []
    name = "-".join(f"{path.rpartition('.')[2]}-{value}" for path, value in patch.assignments)
    word = re.sub(r"[^A-Za-z0-9.-]+", "-", name)[:40]
    return [Candidate(word, "advice for the bottleneck", patch, (verdict.get("bottleneck", ""),))]


def _reduce_candidate(recipe: Recipe, candidate: Candidate) -> Candidate | None:
    try:
        changed = apply_patch(recipe, candidate.patch)
    except RecipeError:
        return None
    if changed == recipe:
        return None
    return replace(candidate, patch=drop_unchanged_settings(recipe, list(candidate.patch.assignments)))


def _iter_candidates(recipe: Recipe, hardware: Hardware) -> Iterator[Candidate]:
    # No candidate changes the model, the samples or the number of epochs. Only a measurement, by `tune` or the ladder
    # `auto`, shows whether it helps.
    # Without a verdict they are tried in this order: data first.
    data, train = recipe.data, recipe.train
    yield from _loader_candidates(data)
    yield from _worker_candidates(data, hardware)
    yield from _compute_candidates(recipe.optim, train, hardware)
    yield from _accumulation_candidates(data.global_batch_size, train.num_micro_batches, hardware)
    if recipe.parallel.strategy == "fsdp":
        settings = {"parallel.strategy": "ddp", "parallel.reshard": False}
        yield _build_candidate("ddp", "keep a replica on every rank", _REPLICATING, settings, "ranks")
    if recipe.parallel.strategy == "ddp":
        yield from _ddp_candidates(recipe.parallel, train)
    # Logging matters for steps of about a millisecond.
    if recipe.log.samples:
        yield _build_candidate("no-samples", "record no sample indices", _RECORDING, {"log.samples": False})
    if recipe.log.every.unit == "st" and recipe.log.every.value < 10:  # which is the default
        yield _build_candidate("log-rarely", "log every tenth step", _LOGGING, {"log.every": "10st"})


def _loader_candidates(data: Data) -> Iterator[Candidate]:
    # All loaders give the same samples; `native` gives the same pixels up to rounding.
    has_pixels = isinstance(data.source, _PIXEL_SOURCES)
    if has_pixels and not any(isinstance(section, RandomResizedCrop) for section in data.augment):
        settings: dict[str, Any] = {"data.loader": "device", "data.workers": "auto"}
        yield _build_candidate("loader-device", "keep the whole dataset on the model's device", _COPYING, settings)
    if isinstance(data.source, Pack):
        settings = {"data.loader": "native"} | ({"data.workers": "auto"} if data.workers == 0 else {})
        yield _build_candidate("loader-native", "decode packs without Python", _LOADING, settings)
    if not has_pixels:
        settings = {"data.loader": "threads"}
        yield _build_candidate("loader-threads", "load batches with Python threads", _LOADING, settings)
    if data.augment:
        settings = {"data.augment_on": "device"}
        yield _build_candidate("augment-on-device", "augment batches on the GPU", _LOADING, settings, "cuda")


def _worker_candidates(data: Data, hardware: Hardware) -> Iterator[Candidate]:
    cores = hardware.cores
    if data.loader == "device":
        return
    is_inline = data.loader == "auto" and isinstance(data.source, _PIXEL_SOURCES) and hardware.device == "cpu"
    least = 0 if data.loader == "auto" else 1
    auto = 0 if is_inline else max(least, min(16, cores - 1))  # as in `data.choice`
    now = auto if data.workers == "auto" else data.workers
    # The rank's main process needs a core too, so all but one come first.
    for workers in dict.fromkeys((cores - 1, cores // 2, cores, 0)):
        loader = count(workers, "worker") if workers else "the rank's main process"
        explains = f"load batches {'with' if workers else 'in'} {loader}"
        if workers != now:
            yield _build_candidate(f"workers-{workers}", explains, _LOADING, {"data.workers": workers})


def _compute_candidates(optim: OptimSection, train: Train, hardware: Hardware) -> Iterator[Candidate]:
    # Published gains: channels_last 1.21x, fused optimizer with cudnn.benchmark 1.16x (NERSC SC20 tutorial); compile
    # 1.0x to 1.3x on ResNets (airbench, pytorch/pytorch#111182).
    precisions: tuple[tuple[str, str, Requirement], ...] = (
        ("amp", "compute in 16 bits, by autocast", "cuda"),
        ("bf16", "compute in bfloat16, by autocast", "cpu"),
        ("bf16_master", "keep weights in bfloat16, with a copy in fp32", "cuda"),
        ("tf32", "multiply with 10 bits of mantissa", "cuda"),
    )
    if train.precision in ("fp32", "torch_default", "tf32"):  # fp64 is deliberate, and the others have 16 bits already
        for name, explains, needs in precisions:
            word = f"precision-{name.replace('_', '-')}"
            yield _build_candidate(word, explains, _ARITHMETIC, {"train.precision": name}, needs)
    layout = {"model.memory_format": "auto"}
    yield _build_candidate("channels-last", "use the channels_last memory format", _COMPUTING, layout)
    benchmark = {"train.cudnn_benchmark": "on"}
    yield _build_candidate("cudnn-benchmark", "let cuDNN benchmark its algorithms", _COMPUTING, benchmark, "cuda")
    if isinstance(optim, Sgd | Adam):
        kernels = {"optim.implementation": "auto"}
        yield _build_candidate("fused-optimizer", "update all weights in one kernel", _UPDATING, kernels)
    if train.compile == "off":
        yield _build_candidate("compile-default", "compile the model", _LAUNCHING, {"train.compile": "default"})
    if train.compile in ("off", "default"):
        mode, explains = "reduce-overhead", "compile, and launch each step as one CUDA graph"
        yield _build_candidate(f"compile-{mode}", explains, _LAUNCHING, {"train.compile": mode}, "cuda")
    captures = train.capture == "off" and train.compile not in ("reduce-overhead", "max-autotune")
    if captures and hardware.ranks == 1:
        whole = {"train.capture": "on"}
        yield _build_candidate("capture", "launch the whole step as one CUDA graph", _STEPPING, whole, "cuda")
    for threads in dict.fromkeys((hardware.cores // 2, hardware.cores - 1)):  # `auto` has all
        if threads:
            name, explains = f"threads-{threads}", f"compute with {count(threads, 'thread')}"
            yield _build_candidate(name, explains, _THREADING, {"parallel.threads": threads}, "cpu")


def _accumulation_candidates(batch_size: int, now: int, hardware: Hardware) -> Iterator[Candidate]:
    # BatchNorm then sees other images at once, so the loss has to show whether it trains alike.
    for pieces in dict.fromkeys((1, 2 * now, 4 * now)):
        if pieces == now or batch_size % (hardware.ranks * pieces):
            continue
        explains = f"compute a batch in {pieces} micro-batches" if pieces > 1 else "compute a batch at once"
        # More micro-batches help only a CPU, whose caches are small.
        needs: Requirement = "cpu" if pieces > now else "any"
        yield _build_candidate(f"accumulate-{pieces}", explains, _LAUNCHING, {"train.accumulate": pieces}, needs)


def _ddp_candidates(parallel: Parallel, train: Train) -> Iterator[Candidate]:
    if not train.precision.endswith(("_master", "_pure")) and parallel.compression == "off":
        in_16_bits = {"parallel.compression": "bf16"}
        yield _build_candidate("compression-bf16", "send gradients in 16 bits", _SENDING, in_16_bits, "ranks")
    for megabytes in (10.0, 50.0, 100.0):
        name, explains = f"buckets-{megabytes:.0f}", f"send {megabytes:.0f} MiB of gradients at once"
        yield _build_candidate(name, explains, _SENDING, {"parallel.bucket_mb": megabytes}, "ranks")
    explains = "make gradients views of the communication buckets"
    yield _build_candidate("bucket-view", explains, _COPYING_GRADIENTS, {"parallel.bucket_view": True}, "ranks")
    if train.accumulate == 1:
        static = {"parallel.static_graph": True}
        yield _build_candidate("static-graph", "promise DDP a static graph", _SENDING, static, "ranks")


def build_batch_candidate(recipe: Recipe, batch_size: int) -> Candidate:
    """Return the candidate of another batch size, with the learning rate scaled by the recipe's rule if it has one.

    Otherwise the rate scales linearly (Goyal et al. 2017, arXiv 1706.02677), or by the square root for adaptive
    optimizers (Malladi et al. 2022, arXiv 2205.10287).
    """
    now, optim = recipe.data.global_batch_size, recipe.optim
    rule = optim.lr_scaling
    settings: dict[str, Any] = {"data.batch_size": batch_size}
    if rule == "none":
        rule = "sqrt" if isinstance(optim, _ADAPTIVE_OPTIMIZERS) else "linear"
        settings |= {"optim.lr_scaling": rule, "optim.base_batch_size": now}
    explains = f"batch size {batch_size} instead of {now}, learning rate scaled by the {rule} rule"
    return replace(_build_candidate(f"batch-{batch_size}", explains, _BATCHING, settings), parity="free")


def build_named_candidate(recipe: Recipe, path: str, value: Any) -> Candidate | None:
    """Return the candidate that sets a field to the user's value; None if `recipe` has that value or rejects it."""
    if path == "data.batch_size":
        return _reduce_candidate(recipe, build_batch_candidate(recipe, value))
    patch = Patch(((path, value),))
    return _reduce_candidate(recipe, Candidate(format_patch(patch)[0], "requested by --vary", patch, ()))


def _build_candidate(
    name: str, explains: str, effect: _Effect, settings: Mapping[str, Any], needs: Requirement = "any"
) -> Candidate:
    return Candidate(name, explains, Patch(tuple(settings.items())), *effect, needs)


SearchSpace = Callable[[Recipe, RunResult], Sequence[Candidate]]
"""Returns the candidates on top of the best recipe, whose run gave the result, the most promising first."""


def build_search_space(arguments: Sequence[str], recipe: Recipe, *, allow_batch: bool) -> SearchSpace:
    """Return the space of `KEY=V1,V2,...` arguments, or without arguments of all candidates that can win.

    Each value is a candidate of its own; their product is the grid. Raise `RecipeError` for a path or value that the
    recipe rejects, and for fields that a search must not change.
    """
    values: list[tuple[str, Any]] = []
    for argument in arguments:
        path, chosen = parse_values(argument)
        _check_values(path, chosen, recipe, allow_batch=allow_batch)
        values += [(path, value) for value in chosen]

    def list_values(best: Recipe, result: RunResult) -> Sequence[Candidate]:
        found = (build_named_candidate(best, path, value) for path, value in values)
        return [candidate for candidate in found if candidate is not None]

    def list_by_bottleneck(best: Recipe, result: RunResult) -> Sequence[Candidate]:
        found = list_candidates(best, Hardware.from_result(result), result.verdict, allow_batch=allow_batch)
        return [candidate for candidate in found if _can_win(candidate, result)]

    return list_values if values else list_by_bottleneck


def compute_grid_size(candidates: Iterable[Candidate]) -> int:
    """Return the number of combinations, "unchanged" included."""
    groups: list[tuple[frozenset[str], int]] = []
    for candidate in candidates:
        keys, num_candidates, others = candidate.paths, 1, []
        for known, number in groups:
            if known & keys:
                keys, num_candidates = keys | known, num_candidates + number
            else:
                others.append((known, number))
        groups = [*others, (keys, num_candidates)]
    return math.prod(1 + number for _, number in groups)


def _can_win(candidate: Candidate, result: RunResult) -> bool:
    if result.verdict.get("bottleneck") in candidate.cures or not candidate.expects:
        return True
    # A stage with a share s of the step allows a speedup of at most 1 / (1 - s) (Amdahl 1967).
    stage_share = sum(result.stages[name].share for name in candidate.expects if name in result.stages)
    return stage_share >= 1 - 1 / MIN_CEILING


def parse_values(word: str) -> tuple[str, tuple[Any, ...]]:
    """Return the dotted path and the values of a `KEY=V1,V2,...` argument. Raise `RecipeError` if it has none."""
    path, equals, text = word.partition("=")
    values = read_yaml_value(f"[{text}]", "--vary") if equals and text else None
    if not path or not values:
        raise RecipeError(f"--vary: {word!r} lists no values (write KEY=V1,V2, such as data.workers=1,2,4)")
    return path, tuple(values)


def _check_values(path: str, values: tuple[Any, ...], recipe: Recipe, *, allow_batch: bool) -> None:
    fields = dict.fromkeys(field for value in values for field, _ in iter_settings({path: value}))
    for field in fields:
        if field.startswith(_FIXED_PREFIXES):
            raise RecipeError(f"--vary: {field} is not a setting to tune for speed (leave it out)")
        if field == "data.rank_batch_size":
            raise RecipeError(f"--vary: {field} is varied as data.batch_size, over all ranks (write that instead)")
        if field == "data.batch_size" and not allow_batch:
            raise RecipeError(f"--vary: {field} changes what is trained (add --allow-batch, and the rate follows)")
        # Checked before the loop below: the measured recipe has another schedule, which may lack the field.
        if field.startswith("schedule."):
            _refuse_learning_field(field)
    for value in values:
        changed = apply_patch(recipe, Patch(((path, value),)))
        is_other = changed.optim.name != recipe.optim.name  # which needs its own learning rate
        for field, _ in iter_settings({path: value}):
            if changes_result(field) and not (is_other and field.startswith("optim.")):
                _refuse_learning_field(field)


def _refuse_learning_field(field: str) -> NoReturn:
    if changes_result_only(field):
        why = "changes what is learned and not the speed, so the fastest value would be noise"
    else:
        why = "changes what is learned, too, so the fastest value may be the least accurate"
    fix = "train one run per value, and compare their accuracy with paceline compare"
    raise RecipeError(f"--vary: {field} {why} ({fix})")
