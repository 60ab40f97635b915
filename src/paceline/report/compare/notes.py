"""What to know before believing a comparison: runs that are unfinished, unjudged, of other data or code. Pure."""

from collections.abc import Iterator, Sequence

from paceline.core.units import accuracy, count, few
from paceline.report.compare.code import mixed, other
from paceline.report.compare.read import Trained
from paceline.report.compare.settings import differing, shown
from paceline.report.compare.target import LEAST_SHARE, Target, best_of, chance_of, near_chance, patience_of, stop_of

_COUNTS = ("train_images", "val_images", "num_classes")
_SOURCE = "data.source."
_MODEL = ("model.name", "model.width", "model.norm", "model.args")


def notes(
    groups: Sequence[Sequence[Trained]], names: Sequence[str], target: Target, metric: str = "top1"
) -> Iterator[str]:
    """Yield sentences, those that matter most first."""
    if target.unlearnt:
        yield _unlearnt(target, [run for each in groups for run in each], metric)
    yield from _patience(target, [run for each in groups for run in each])
    yield from _data(groups, names)
    yield from _models(groups, names)
    yield from _code(groups, names)
    yield from _starved([run for each in groups for run in each])
    for name, runs in zip(names, groups, strict=True):
        yield from _group(name, runs, target)
    runs = [run for each in groups for run in each]
    stopped = [run for run in runs if run.status == "target_reached"]
    if stopped:
        yield (
            f"{len(stopped)} of {count(len(runs), 'run')} stopped at a target: how far longer training would have come "
            "is not in the last accuracy."
        )
    for run in runs:
        yield from (f"{run.name}: {problem}" for problem in run.problems)


def _unlearnt(target: Target, runs: Sequence[Trained], metric: str) -> str:
    """Return which runs the target does not go by, and the rule for that."""
    chances = sorted({(near_chance(run, metric), chance_of(run, metric)) for run in runs} - {(0.0, 0.0)})
    near = "near chance" + "".join(f" ({_percent(level)}, where guessing gives {_percent(g)})" for level, g in chances)
    if target.level is None:
        return f"No run has learnt, as none has a best above what is {near}: no target is compared (set --target)."
    names = few([f"{run.name} (at best {accuracy(best_of(run) or 0.0)})" for run in target.unlearnt])
    half = f"half of the best run's ({accuracy(LEAST_SHARE * max(best_of(run) or 0.0 for run in runs))})"
    rule = f"its best is below {half}, or no higher than what is {near}" if chances else f"its best is below {half}"
    return f"The target does not go by {names}: a run counts as not having learnt where {rule}."


def _patience(target: Target, runs: Sequence[Trained]) -> Iterator[str]:
    """Yield which runs are held to another number of evaluations in a row than their recipes ask for."""
    if target.origin != "recipes":
        return
    others = [
        f"{run.name} ({'none' if stop_of(run) is None else patience_of(run)})"
        for run in runs
        if patience_of(run) != target.patience
    ]
    if others:
        yield (
            f"The target is met with {count(target.patience, 'evaluation')} in a row, the fewest that a recipe which "
            f"stops asks for (train.stop.patience), though recipes differ in it: {few(others)}."
        )


def _starved(runs: Sequence[Trained]) -> Iterator[str]:
    """Yield which runs shared their cores with other programs."""
    starved = [f"{run.name} ({100 * run.starved:.0f} %)" for run in runs if run.starved is not None]
    if starved:
        yield (
            f"CPU-starved: {few(starved)}. Other processes held the cores for that share of the time that training "
            "wanted to run: images/s and times of these runs say nothing about their settings."
        )


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _data(groups: Sequence[Sequence[Trained]], names: Sequence[str]) -> Iterator[str]:
    """Yield whether the groups are of other data: by how much there is of them, or by where they are from."""
    for name, (first, *_) in list(zip(names, groups, strict=True))[1:]:
        reference = groups[0][0]
        others = [
            f"{first.plan[key]:,} {key.replace('_', ' ').replace('num ', '')} against {reference.plan[key]:,}"
            for key in _COUNTS
            if isinstance(first.plan.get(key), int)
            and isinstance(reference.plan.get(key), int)
            and first.plan[key] != reference.plan[key]
        ]
        if others:
            yield (
                f"{name} is of other data than {names[0]} ({', '.join(others)}): their accuracies, epochs and times to "
                "a target are not of the same task."
            )
            continue
        sources = [each for each in differing([first.settings, reference.settings]) if each.startswith(_SOURCE)]
        if sources and first.settings and reference.settings:
            told = ", ".join(f"{each}={shown(first.settings.get(each))}" for each in sources)
            yield f"{name} has its data from elsewhere than {names[0]} ({told}): they are taken for the same images."


def _models(groups: Sequence[Sequence[Trained]], names: Sequence[str]) -> Iterator[str]:
    """Yield which groups train another model than the first, so that speed is not of the same work."""
    reference = groups[0][0]
    for name, (first, *_) in list(zip(names, groups, strict=True))[1:]:
        paths = [each for each in differing([first.settings, reference.settings]) if each.startswith(_MODEL)]
        if paths and first.settings and reference.settings:
            others = [
                f"{each} {shown(first.settings.get(each))} against {shown(reference.settings.get(each))}"
                for each in paths
            ]
            yield f"{name} trains another model than {names[0]} ({few(others)}): images/s are not of the same work."


def _code(groups: Sequence[Sequence[Trained]], names: Sequence[str]) -> Iterator[str]:
    """Yield where runs had other code of their own: the runs of a group, and a group against the first."""
    for name, runs in zip(names, groups, strict=True):
        if found := mixed([(run.name, run.code) for run in runs]):
            yield f"{name}: its runs are of different code, so the seed is not all they differ in: {found}."
    reference = [run.code for run in groups[0]]
    for name, runs in list(zip(names, groups, strict=True))[1:]:
        if found := other([run.code for run in runs], reference):
            yield f"{name} is of other code than {names[0]}, which may be why they differ: {found}."


def _group(name: str, runs: Sequence[Trained], target: Target) -> Iterator[str]:
    unfinished = [run.name for run in runs if run.status == "unfinished"]
    if unfinished:
        yield f"{name}: {_of(unfinished)} not finished: what its logs tell so far is compared, and no GPU-hours."
    cut = [run.name for run in runs if run.status in ("preempted", "failed")]
    if cut:
        yield f"{name}: {_of(cut)} preempted or failed: what it did until then is compared."
    silent = [run.name for run in runs if not run.evals]
    if silent:
        yield f"{name}: {_of(silent)} never evaluated (train.eval_every is off, or it ended before that)."
    met = sum(target.first_met(run) is not None for run in runs)
    if 0 < met < len(runs):
        yield f"{name}: {met} of {len(runs)} runs reach the target; its times are means over these, which flatters it."
    seeds = [run.seed for run in runs if run.seed is not None]
    if len(set(seeds)) < len(seeds):
        yield f"{name}: runs share a seed, which differ by less than seeds do: intervals are too narrow."


def _of(names: Sequence[str]) -> str:
    return f"{few(names)} {'was' if len(names) == 1 else 'were'}"
