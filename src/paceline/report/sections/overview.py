"""The top of the page: what was run, how it ended, the figures in large print, and the verdict."""

import shlex
from typing import Final

from paceline.core.results import EvalResult, RunResult
from paceline.core.units import accuracy, count, number, parameters, seconds, share
from paceline.report.blocks import Cell, Figure, Tone, Verdict
from paceline.report.compare.settings import read_settings
from paceline.report.run import Run
from paceline.report.sections import cells
from paceline.report.words import clean, finite, moment

_TONES: Final[dict[str, Tone]] = {
    "completed": "good",
    "target_reached": "good",
    "preempted": "warning",
    "failed": "bad",
}
_NOT_MEASURED: Final = Cell("–")  # noqa: RUF001  words do not fit in large print; the note below says why
_TAKES_A_VALUE: Final = ("--run-dir", "--ranks", "--max-restarts", "--port")


def status(run: Run) -> tuple[str, Tone]:
    """Return how the run ended, and whether that is good."""
    if run.result is None:
        return "not finished", "warning"
    steps = finite(run.plan.get("total_steps"))
    ended = clean(run.result.how_it_ended(None if steps is None else int(steps)), 200)
    if run.result.status in ("preempted", "failed"):
        of_code = " --own-code" if run.result.provenance.get("own_parts") else ""
        ended += f"; resume with paceline train {clean(shlex.quote(str(run.path)), 2000)} --resume{of_code}"
    return ended, _TONES[run.result.status]


def subtitle(run: Run) -> list[str]:
    """Return a few words each on what was trained, on which data, how, where and when."""
    result = run.result
    settings, _ = read_settings(run.recipe)
    words = [_recipe(run), _model(result, settings), _data(run, settings), _training(run, settings)]
    started_s = finite(run.attempts.rows[0].get("started_s")) if run.attempts.rows else None
    if started_s is not None:
        words.append(moment(started_s))
    if result is not None:
        words.append(count(result.world_size, "rank"))
    words += [clean(_where(run)), clean(f"torch {run.machine['torch']}") if "torch" in run.machine else ""]
    return [each for each in words if each]


def _recipe(run: Run) -> str:
    """Return the recipe's name; its hash where a run of an earlier version has none, or where it is not finished."""
    name = clean(run.plan.get("recipe_name") or "", 60) or (_recipe_name(run.result) if run.result is not None else "")
    if name:
        return f"recipe {name}"
    if run.result is not None:
        return f"recipe {clean(run.result.recipe_hash)}"
    return clean(run.recipe.splitlines()[0].removeprefix("# ")) if run.recipe.startswith("# recipe ") else ""


def _model(result: RunResult | None, settings: dict[str, str]) -> str:
    """Return `torchvision:resnet18, 11.2 M parameters`."""
    name = clean(settings.get("model.name", ""), 80)
    if not name or result is None or result.parameters is None:
        return name
    frozen = result.trained_parameters is not None and result.trained_parameters != result.parameters
    trained = f", {parameters(result.trained_parameters or 0)} trained" if frozen else ""
    return f"{name}, {parameters(result.parameters)} parameters{trained}"


def _data(run: Run, settings: dict[str, str]) -> str:
    """Return `cifar10, 50,000 training and 10,000 validation images, 10 classes`."""
    name = clean(settings.get("data.source.name", ""), 80)
    images = [
        f"{f'{number:,.0f}' if number else 'no'} {split}"
        for key, split in (("train_images", "training"), ("val_images", "validation"))
        if (number := finite(run.plan.get(key))) is not None
    ]
    classes = finite(run.plan.get("num_classes"))
    parts = [name, f"{' and '.join(images)} images" if images else "", f"{classes:,.0f} classes" if classes else ""]
    return ", ".join(filter(None, parts))


def _training(run: Run, settings: dict[str, str]) -> str:
    """Return `sgd, peak lr 0.1, batch 128, bf16`."""
    peak = finite(run.plan.get("peak_lr"))
    batch = settings.get("data.batch_size")
    parts = [
        settings.get("optim.name", ""),
        f"peak lr {peak:.4g}" if peak is not None else "",
        f"batch {batch}" if batch else "",
        settings.get("train.precision", ""),
    ]
    return clean(", ".join(filter(None, parts)))


def figures(run: Run) -> list[Figure]:
    """Return the figures in large print; of a run that has not finished those that its logs tell."""
    if run.result is None:
        return _so_far(run)
    result = run.result
    return [*_accuracy(result), *_speed(result), _wall(result), *_account(result)]


def notices(run: Run) -> list[str]:
    """Return what a person should look into, a few words each."""
    found = [count(run.warnings.total, "warning")] if run.warnings.total else []
    if run.result is not None and run.result.bad_images:
        found.append(f"{count(run.result.bad_images, 'image')} left out")
    if run.result is not None and run.result.skipped_steps:
        found.append(f"{count(run.result.skipped_steps, 'step')} skipped")
    if run.result is not None and run.result.checkpoints is not None and run.result.checkpoints.failed:
        found.append(f"{count(run.result.checkpoints.failed, 'checkpoint')} failed")
    return found


def verdict(run: Run) -> Verdict | None:
    """Return what held the run back, with the command that would help; None for a run that has not finished."""
    if run.result is None or not run.result.verdict.get("bottleneck"):
        return None
    found = {key: clean(value, 500) for key, value in run.result.verdict.items()}
    command = _command(run, run.result.verdict.get("try", ""))
    return Verdict(
        bottleneck=found["bottleneck"],
        evidence=found.get("evidence", ""),
        ceiling=_ceiling(run, found),
        command=command,
        advice="" if command else found.get("try", ""),
    )


def _ceiling(run: Run, found: dict[str, str]) -> str:
    """Return what a profile has measured, or else what the run's clock bounds, as a sentence."""
    measured = run.profile.get("verdict")
    ceiling = clean(measured.get("ceiling") or "", 500) if isinstance(measured, dict) else ""
    ceiling = ceiling or found.get("ceiling", "")
    return f"Ceiling: {ceiling.rstrip('.')}." if ceiling else ""


def _command(run: Run, overrides: str) -> str:
    """Return the command that does with `overrides` what the run did; "" where these are none."""
    try:
        words = shlex.split(overrides)
    except ValueError:
        return ""
    if not words or not all(word.partition("=")[1] and word.isprintable() for word in words):
        return ""
    return clean(shlex.join(["paceline", "profile" if run.profile else "train", str(run.path), *words]), 2000)


def _recipe_name(result: RunResult) -> str:
    """Return the recipe's name as it was given on the command line, "" where it was not."""
    command = result.provenance.get("command")
    words = [str(word) for word in command[2:]] if isinstance(command, list) else []
    names = (
        word
        for before, word in zip(["", *words], words, strict=False)
        if before not in _TAKES_A_VALUE and "=" not in word and not word.startswith("-")
    )
    return clean(next(names, "").rstrip("/").rpartition("/")[2], 60)


def _where(run: Run) -> str:
    gpus = run.machine.get("cuda_devices")
    if isinstance(gpus, list) and gpus:
        return f"{len(gpus)} x {gpus[0]}" if len(gpus) > 1 else str(gpus[0])
    return str(run.machine.get("cpu", ""))


def _accuracy(result: RunResult) -> list[Figure]:
    judged, whose = (result.ema, ", averaged weights") if result.ema is not None else (result.eval, "")
    if judged is None:
        return [
            Figure(
                "top-1",
                _NOT_MEASURED,
                "not evaluated: the recipe has train.eval_every=off, or the run ended before the first",
            )
        ]
    notes = [*_best(result.best, judged), f"top-5 {accuracy(judged.top5)}", f"loss {judged.loss:,.4f}"]
    notes.append(count(judged.images, "image"))
    return [Figure(f"top-1{whose}", cells.of_accuracy(judged.top1), ", ".join(notes))]


def _best(best: EvalResult | None, judged: EvalResult) -> list[str]:
    return [f"best {accuracy(best.top1)}"] if best is not None and best.top1 != judged.top1 else []


def _speed(result: RunResult) -> list[Figure]:
    rates = result.throughput
    if not rates.n:
        return [Figure("images/s", _NOT_MEASURED, "not measured: no step after the measurement warm-up was counted")]
    low, high = rates.spread
    note = f"{number(low)} to {number(high)} over {count(rates.n, 'window')}, without warm-up and pauses"
    return [Figure("images/s", Cell(number(rates.images_per_s), rates.images_per_s), note)]


def _wall(result: RunResult) -> Figure:
    times = result.time
    parts = [f"start-up {seconds(times.startup_s)}", f"evaluation {seconds(times.eval_s)}"]
    if times.to_target_s is not None:
        parts.insert(0, f"target reached after {seconds(times.to_target_s)}")
    return Figure("wall clock", cells.of_seconds(times.wall_s), ", ".join(parts))


def _account(result: RunResult) -> list[Figure]:
    if result.account is None:
        return []
    residual = f"{seconds(abs(result.account.residual_s))} of the wall clock are not explained"
    return [Figure("explained", Cell(share(result.account.explained), result.account.explained), residual)]


def _so_far(run: Run) -> list[Figure]:
    found = []
    if run.evals:
        last = run.evals[-1]
        top1 = finite(last.get("ema_top1", last.get("top1")))
        step = number(finite(last.get("step")) or 0)
        found.append(Figure("top-1 so far", cells.of_accuracy(top1), f"after step {step}"))
    for key, label in (("step", "last logged step"), ("images_per_s", "images/s, last"), ("trained_s", "trained")):
        if run.steps.has(key):
            last_value = run.steps.extents[key].last
            cell = cells.of_seconds(last_value) if key == "trained_s" else cells.plain(last_value)
            found.append(Figure(label, cell))
    return found
