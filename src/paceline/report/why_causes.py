"""Which stages of a step a setting can affect, whether it can change how training ends, and how likely it explains a
gap. Pure.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import copysign, prod
from typing import Final, Literal

from paceline.core.stages import CAPTURED, COMPUTE, DATA_WAIT, EPOCH_BOUNDARY, EXPOSED, LOG, OTHER, PREPARE, SYNC, TRACE
from paceline.core.why_result import Cause, Difference

LOAD: Final = "load of other processes"
MIN_SCORE: Final = 0.1
"""Score from which a difference counts as a cause; chosen."""
_DATA: Final = (DATA_WAIT, PREPARE, EPOCH_BOUNDARY, "h2d", "device_augment")
_MODEL: Final = ("forward", "loss", "backward", CAPTURED)
_LOGGING: Final = (LOG, SYNC, TRACE, OTHER)
_SHARED_CORES: Final = 0.5
"""Weight of a slower model as an effect of slower loading, if both use the same cores; chosen."""
_UNEVEN_LOAD: Final = 2.0
"""How many times more than the average other processes may slow one stage; chosen."""
_EVERYTHING: Final = ()
"""Stages of a difference that may affect all of them."""
_NO_SPEED: Final = 0.0
_UNKNOWN_DIRECTION: Final = 0.8
_WRONG_DIRECTION: Final = 0.1
_NOT_YET: Final = 0.1
"""Plausibility of a difference that would have changed losses which are equal."""
_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?(e[-+]?\d+)?")
_SHAPE: Final = re.compile(r"\d+(x\d+)+")
_SEPARATORS: Final = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True)
class Effect:
    """What differences whose name has the words `pattern` can change.

    `stages` are those of the step and the pauses, all of them if empty. `speed` and `outcome`, 0 to 1, say how often
    such a difference is the cause: chosen so that a setting comes before a symptom, and one that acts on few stages
    before one that may act on all. `more_is_slower` and `more_is_better` are 1, -1 or 0 if unknown. `begins` says when
    losses begin to differ: with the first step, with the first update, or later. `loads_data` says that it changes the
    work per sample of the loader.
    """

    pattern: str
    stages: tuple[str, ...]
    speed: float
    outcome: float
    reason: str
    more_is_slower: int = 0
    more_is_better: int = 0
    begins: Literal["first step", "first update", "later"] = "first step"
    loads_data: bool = False


_EFFECTS: Final = (
    # A name is matched as lower-case words between spaces; the first row that matches counts.
    Effect(r"^ machine load ", _EVERYTHING, 0.05, 0, "The load at the start includes that of earlier runs."),
    Effect(r"^ load of other ", _EVERYTHING, 0.95, 0, "Other processes held the cores.", 1),
    Effect(r"^ straggler ", (EXPOSED, *COMPUTE, *_DATA, OTHER), 0.9, 0, "All ranks wait for the latest one.", 1),
    Effect(r"^ machine (cpu|gpu|gpus) |^ device ", _EVERYTHING, 0.85, 0.1, "Other hardware has another speed."),
    Effect(r"^ machine (logical )?cores ", _EVERYTHING, 0.9, 0, "Fewer cores compute and load data.", -1),
    Effect(r"^ machine memory ", _EVERYTHING, 0.2, 0, "Files stay in memory only if they fit.", -1),
    Effect(r"^ version (pillow|cv2|albumentations) ", _DATA, 0.5, 0.3, "The library decodes and transforms images."),
    Effect(
        r"^ version |^ (torch|torchvision|paceline|framework) $",
        _EVERYTHING,
        0.5,
        0.3,
        "Another version may choose other kernels and defaults.",
    ),
    Effect(
        r" (omp|mkl|kmp|openblas) |^ threads | num threads | threads $",
        (*COMPUTE, OTHER),
        1.0,
        0.05,
        "Compute threads share the work of each operator.",
        -1,
    ),
    Effect(r"^ env (nccl|gloo) ", (EXPOSED, "backward"), 0.9, 0, "It sets how ranks communicate."),
    Effect(r"^ env tokenizers |^ env malloc ", _DATA, 0.3, 0, "It affects worker processes."),
    Effect(r"^ env (cuda|cublas|torch|pytorch)", COMPUTE, 0.6, 0.1, "It sets how torch computes and allocates."),
    Effect(r"^ env ", _EVERYTHING, 0.3, 0.05, "An environment variable may change any part."),
    Effect(r"^ pauses evaluate ", ("evaluate",), 0.75, 0, "Evaluations were more frequent.", 1),
    Effect(r"^ pauses checkpoint ", ("checkpoint",), 0.75, 0, "Checkpoints were more frequent.", 1),
    Effect(r"^ code commit ", _EVERYTHING, 0.3, 0.3, "Another commit of the script was checked out."),
    Effect(
        r"^ code .* (getitem|iter|collate|dataset|data|load|transform|augment|decode)\w* ",
        _DATA,
        0.95,
        0.6,
        "This code loads or transforms samples.",
        loads_data=True,
    ),
    Effect(r"^ code .* (eval\w*|valid\w*|test) ", ("evaluate", OTHER), 0.9, 0.1, "This code evaluates."),
    Effect(r"^ code .* (save\w*|checkpoint\w*) ", ("checkpoint", OTHER), 0.9, 0, "This code saves."),
    Effect(r"^ code .* (log\w*|print\w*|report\w*) ", _LOGGING, 0.9, 0, "This code logs."),
    Effect(r"^ code .* (forward|model|net\w*|block\w*|layer\w*) ", _MODEL, 0.95, 0.7, "This code is the model's."),
    Effect(r"^ code ", _EVERYTHING, 0.7, 0.6, "The script's code differs."),
    Effect(r"^ argv ((run|exp|experiment|output|log) )?(port|out|output|dir|folder|id|tag|name) $|"
           r"^ argv (out|output|logs?|logging|save|ckpt|checkpoints?|results?) (dir|folder|path|file) $|"
           r"^ argv (o|logdir|outdir|savedir|model dir|default root dir) $", _EVERYTHING, 0.05, 0.02,
           "It names something."),
    Effect(r" optim(izer)? (class|name|implementation|fused|foreach|capturable|groups|newton)",
           ("optimizer",), 1.0, 0.9, "Optimizers differ in work per step and in how they update.",
           begins="first update"),
    Effect(r" optimizer $| opt $", ("optimizer",), 1.0, 0.9, "Optimizers differ in work per step.",
           begins="first update"),
    Effect(r" label smoothing | mixup | cutmix | loss | class weights | dropout | drop path | distill ",
           ("loss", "forward", "device_augment"), 0.4, 0.85, "It changes the loss that is minimized."),
    Effect(r" lr | learning rate | initial lr ", _EVERYTHING, _NO_SPEED, 1.0,
           "The learning rate scales every update.", begins="first update"),
    Effect(r" schedule | warmup | momentum | nesterov | weight decay | betas | eps | dampening | clip | optim ",
           ("optimizer",), 0.2, 0.75, "It changes the updates.", begins="first update"),
    Effect(r" split seed ", _EVERYTHING, _NO_SPEED, 0.4, "Other images are held out."),
    Effect(r" seed ", _EVERYTHING, _NO_SPEED, 0.35, "Another seed draws other weights, orders and augmentations."),
    Effect(r" persistent workers | prefetch | pin memory ", _DATA, 0.8, 0, "It sets how workers hand over batches."),
    Effect(r" (num )?workers | loader ranks ", _DATA, 1.0, 0, "Workers load batches while the model trains.", -1),
    Effect(r" eval \w+ | eval | evaluat\w+ | validat\w+ | val (?!fraction|root)", ("evaluate",), 0.9, 0.15,
           "It sets how often and how long training pauses for evaluation."),
    Effect(r" (checkpoint|ckpt|save)(?! activations) ", ("checkpoint",), 0.9, 0,
           "It sets how often training pauses for checkpoints."),
    Effect(r" activations ", _MODEL, 0.95, 0.05, "Activations are computed again in backward.", 1),
    Effect(r" log | logging | print | verbose | tensorboard | wandb | telemetry | trace | nvtx | report ", _LOGGING,
           0.9, 0, "It sets how often values are read and written."),
    Effect(r" deterministic | anomaly | profiler | cudnn benchmark | matmul precision | check replicas",
           COMPUTE, 1.0, 0.1, "It chooses slower or faster kernels, or checks them."),
    Effect(r" micro batches | accumulate ", _EVERYTHING, 0.75, 0.6, "It sets how many samples an update sees."),
    Effect(r" batch | batch size | rank batch size ", _EVERYTHING, 0.9, 0.8,
           "A smaller batch leaves fixed costs to fewer samples.", -1),
    Effect(r" ranks | world size | nodes ", _EVERYTHING, 0.9, 0.3, "Ranks share the work, and communicate.", -1),
    Effect(r"^ ddp | parallel | bucket | compression | backend | strategy ", (EXPOSED, "backward", "forward"), 0.9, 0.1,
           "It sets how gradients are averaged."),
    Effect(r" image size | input shape | input size | resolution | img size | size | progressive ", _EVERYTHING, 1.0,
           0.65, "Larger images take longer to load and to compute.", 1),
    Effect(r" epochs | steps | iterations | max time | max steps | stop | patience ", _EVERYTHING, 0.05, 0.9,
           "It sets how long training lasts.", 0, 1, "later"),
    Effect(r" images | fraction | subset | limit | train root | samples ", (EPOCH_BOUNDARY, DATA_WAIT), 0.2, 0.9,
           "It sets how many images training learns from.", 0, 1),
    Effect(r" data | dataset | transform | augment\w* | prefetch | pin memory | persistent | collate | sampler | "
           r"decode\w* | interpolation | crop | flip | cache | loader | drop last ", _DATA, 0.9, 0.6,
           "It sets how samples are loaded and transformed.", loads_data=True),
    Effect(r" memory format | channels last ", _MODEL, 0.95, 0.02, "Kernels differ in speed by memory format."),
    Effect(r" compile\w* | capture ", COMPUTE, 0.95, 0.05, "Compiled code fuses operators."),
    Effect(r" autocast | amp | precision | dtype | bf16 | fp16 ", COMPUTE, 0.95, 0.4, "It sets the arithmetic."),
    Effect(r" parameters | width | depth | layers | channels | hidden | blocks ", (*COMPUTE, EXPOSED), 1.0, 0.65,
           "A larger model computes more.", 1),
    Effect(r" model | arch | backbone ", (*COMPUTE, EXPOSED), 0.9, 0.65, "Another model computes something else."),
    Effect(r" ema ", ("optimizer",), 0.9, 0.4, "Averaging weights takes part of each step."),
    Effect(r" pretrained | weights ", _EVERYTHING, 0.05, 0.8, "Training started from other weights."),
)  # fmt: skip
_OTHER_EFFECT: Final = Effect("", _EVERYTHING, 0.5, 0.4, "It may change any part.")


def find_effect(name: str) -> Effect:
    """Return what a difference of this name can change."""
    text = f" {_SEPARATORS.sub(' ', name.lower()).strip()} "
    return next((each for each in _EFFECTS if re.search(each.pattern, text)), _OTHER_EFFECT)


def rank_speed_causes(
    differences: Sequence[Difference],
    a: Mapping[str, float],
    b: Mapping[str, float],
    *,
    load_factor: float | None,
    has_gpu: bool,
) -> Iterator[Cause]:
    """Yield the differences that may explain why steps of `b` are slower or faster than those of `a`, by falling score.

    `a` and `b` have the seconds of each part of a step. `load_factor` is the time of `b` over that of `a` as
    far as other processes explain it, None if that is unknown. Without a GPU, loading and the model share the cores.
    """
    gaps = {name: b.get(name, 0.0) - a.get(name, 0.0) for name in dict.fromkeys((*a, *b))}
    sign = copysign(1.0, sum(gaps.values()))
    growing = {name: sign * each for name, each in gaps.items() if sign * each > 0}
    whole = sum(growing.values())
    causes = []
    for each in differences:
        effect = find_effect(each.name)
        stages = effect.stages or tuple(growing)
        share = sum(growing.get(name, 0.0) for name in stages) / whole if whole else 0.0
        if effect.loads_data and not has_gpu:
            slower_model = sum(growing.get(name, 0.0) for name in COMPUTE) / whole if whole else 0.0
            share += _SHARED_CORES * slower_model
            stages = (*stages, *COMPUTE)
        if each.name == LOAD and load_factor is not None:
            share = _share_of_load(growing, a if sign > 0 else b, load_factor**sign - 1)
        score = effect.speed * share * _direction(each, effect.more_is_slower, sign)
        named = tuple(sorted((name for name in stages if growing.get(name)), key=lambda name: -growing[name]))
        causes.append(Cause(difference=each, score=round(score, 4), stages=named, reason=effect.reason))
    yield from _without_repeats(sorted(causes, key=lambda each: -each.score))


def _share_of_load(growing: Mapping[str, float], faster: Mapping[str, float], slowdown: float) -> float:
    """Return the share of the growth that load explains: it slows all parts of the `faster` run, none of them alone."""
    explained = sum(min(each, _UNEVEN_LOAD * slowdown * faster.get(name, 0.0)) for name, each in growing.items())
    explained = min(explained, slowdown * sum(faster.values()))
    return max(0.0, explained) / (sum(growing.values()) or 1.0)


def rank_outcome_causes(
    differences: Sequence[Difference], *, is_better: bool, first_step: int | None, knows_first: bool
) -> Iterator[Cause]:
    """Yield the differences that may explain why a run ended better or worse, by falling score.

    `first_step` is the first at which losses differ, if losses of every step are known (`knows_first`).
    """
    excluded: list[str] = []  # they would have changed losses that are equal
    if knows_first and first_step != 1:
        excluded = ["first step"] if first_step is not None else ["first step", "first update"]
    causes = []
    for each in differences:
        effect = find_effect(each.name)
        score = effect.outcome * _direction(each, effect.more_is_better, 1 if is_better else -1)
        score *= _NOT_YET if effect.begins in excluded else 1
        causes.append(Cause(difference=each, score=round(score, 4), stages=(), reason=effect.reason))
    yield from _without_repeats(sorted(causes, key=lambda each: -each.score))


def _direction(difference: Difference, expected: int, sign: float) -> float:
    """Return how well the change of a number fits: 1 if it does, less if that is unknown or if it does not."""
    before, after = _to_number(difference.a), _to_number(difference.b)
    if not expected or before is None or after is None or before == after:
        return _UNKNOWN_DIRECTION if expected else 1.0
    return 1.0 if (after - before) * expected * sign > 0 else _WRONG_DIRECTION


def _to_number(text: str | None) -> float | None:
    if text is None:
        return None
    if _SHAPE.fullmatch(text):
        return float(prod(map(int, text.split("x"))))
    match = _NUMBER.match(text.replace(",", ""))
    with suppress(ValueError):
        return float(match[0]) if match else {"True": 1.0, "False": 0.0, "on": 1.0}.get(text)
    return None


def is_same_change(one: Difference, other: Difference) -> bool:
    """Return whether one is an argument or variable, and the other the setting that it gave its value to."""
    is_given = [each.name.startswith(("argv.", "env.")) for each in (one, other)]
    effects = [find_effect(each.name) for each in (one, other)]
    shared = set.intersection(*(set(_SEPARATORS.split(each.name.lower())) for each in (one, other)))
    return (
        is_given[0] != is_given[1]
        and effects[0].reason == effects[1].reason
        and bool(shared - {""})
        and (one.a, one.b) == (other.a, other.b)
    )


def find_score(difference: Difference, causes: Sequence[Cause]) -> float:
    """Return the score of a difference, or of the cause that is the same change; 0 if there is none."""
    found = (each for each in causes if each.difference == difference or is_same_change(each.difference, difference))
    return max((each.score for each in found), default=0.0)


def _without_repeats(causes: Sequence[Cause]) -> list[Cause]:
    """Return causes from `MIN_SCORE`, one per change: an argument often is a setting, too."""
    kept: list[Cause] = []
    for each in causes:
        is_repeat = any(is_same_change(each.difference, other.difference) for other in kept)
        if each.score >= MIN_SCORE and not is_repeat:
            kept.append(each)
    return kept
