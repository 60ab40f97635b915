"""Build the header of a run report: status, description, key figures and bottleneck."""

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
_NOT_MEASURED: Final = Cell("–")  # noqa: RUF001  the note explains why
_TAKES_A_VALUE: Final = ("--run-dir", "--ranks", "--max-restarts", "--port")


def status(run: Run) -> tuple[str, Tone]:
    """Return how the run ended, and the tone of that."""
    if run.result is None:
        return "not finished", "warning"
    steps = finite(run.plan.get("total_steps"))
    ended = clean(run.result.how_it_ended(None if steps is None else int(steps)), 200)
    if run.result.status in ("preempted", "failed"):
        own_code = " --own-code" if run.result.provenance.get("own_parts") else ""
        ended += f"; resume with paceline train {clean(shlex.quote(str(run.path)), 2000)} --resume{own_code}"
    return ended, _TONES[run.result.status]


def subtitle(run: Run) -> list[str]:
    """Return short descriptions of recipe, model, data, training, start time, ranks and hardware."""
    result = run.result
    settings, _ = read_settings(run.recipe)
    descriptions = [_recipe(run), _model(result, settings), _data(run, settings), _training(run, settings)]
    started_s = finite(run.attempts.rows[0].get("started_s")) if run.attempts.rows else None
    if started_s is not None:
        descriptions.append(moment(started_s))
    if result is not None:
        descriptions.append(count(result.world_size, "rank"))
    descriptions += [clean(_where(run)), clean(f"torch {run.machine['torch']}") if "torch" in run.machine else ""]
    return [each for each in descriptions if each]


def _recipe(run: Run) -> str:
    name = clean(run.plan.get("recipe_name") or "", 60) or (_recipe_name(run.result) if run.result is not None else "")
    if name:
        return f"recipe {name}"
    if run.result is not None:
        return f"recipe {clean(run.result.recipe_hash)}"
    return clean(run.recipe.splitlines()[0].removeprefix("# ")) if run.recipe.startswith("# recipe ") else ""


def _model(result: RunResult | None, settings: dict[str, str]) -> str:
    # torchvision:resnet18, 11.2 M parameters
    name = clean(settings.get("model.name", ""), 80)
    if not name or result is None or result.parameters is None:
        return name
    frozen = result.trained_parameters is not None and result.trained_parameters != result.parameters
    trained = f", {parameters(result.trained_parameters or 0)} trained" if frozen else ""
    return f"{name}, {parameters(result.parameters)} parameters{trained}"


def _data(run: Run, settings: dict[str, str]) -> str:
    # cifar10, 50,000 training and 10,000 validation images, 10 classes
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
    # sgd, peak lr 0.1, batch 128, bf16
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
    """Return the key figures; for an unfinished run, those in its logs."""
    if run.result is None:
        return _so_far(run)
    result = run.result
    return [*_accuracy(result), *_speed(result), _wall(result), *_account(result)]


def notices(run: Run) -> list[str]:
    """Return short notices on warnings, bad images, skipped steps and failed checkpoints."""
    notices = [count(run.warnings.total, "warning")] if run.warnings.total else []
    if run.result is not None and run.result.bad_images:
        notices.append(f"{count(run.result.bad_images, 'image')} left out")
    if run.result is not None and run.result.skipped_steps:
        notices.append(f"{count(run.result.skipped_steps, 'step')} skipped")
    if run.result is not None and run.result.checkpoints is not None and run.result.checkpoints.failed:
        notices.append(f"{count(run.result.checkpoints.failed, 'checkpoint')} failed")
    return notices


def verdict(run: Run) -> Verdict | None:
    """Return the bottleneck and the command to try next; None for an unfinished run."""
    if run.result is None or not run.result.verdict.get("bottleneck"):
        return None
    recorded = {key: clean(value, 500) for key, value in run.result.verdict.items()}
    command = _command(run, run.result.verdict.get("try", ""))
    return Verdict(
        bottleneck=recorded["bottleneck"],
        evidence=recorded.get("evidence", ""),
        ceiling=_ceiling(run, recorded),
        command=command,
        advice="" if command else recorded.get("try", ""),
    )


def _ceiling(run: Run, recorded: dict[str, str]) -> str:
    # A profile's measurement is better than the bound of the clock.
    measured = run.profile.get("verdict")
    ceiling = clean(measured.get("ceiling") or "", 500) if isinstance(measured, dict) else ""
    ceiling = ceiling or recorded.get("ceiling", "")
    return f"Ceiling: {ceiling.rstrip('.')}." if ceiling else ""


def _command(run: Run, overrides: str) -> str:
    # The bottleneck may suggest something else than overrides.
    try:
        arguments = shlex.split(overrides)
    except ValueError:
        return ""
    if not arguments or not all(each.partition("=")[1] and each.isprintable() for each in arguments):
        return ""
    return clean(shlex.join(["paceline", "profile" if run.profile else "train", str(run.path), *arguments]), 2000)


def _recipe_name(result: RunResult) -> str:
    # The first argument that is neither option nor override.
    command = result.provenance.get("command")
    arguments = [str(word) for word in command[2:]] if isinstance(command, list) else []
    names = (
        word
        for before, word in zip(["", *arguments], arguments, strict=False)
        if before not in _TAKES_A_VALUE and "=" not in word and not word.startswith("-")
    )
    return clean(next(names, "").rstrip("/").rpartition("/")[2], 60)


def _where(run: Run) -> str:
    gpus = run.machine.get("cuda_devices")
    if isinstance(gpus, list) and gpus:
        return f"{len(gpus)} x {gpus[0]}" if len(gpus) > 1 else str(gpus[0])
    return str(run.machine.get("cpu", ""))


def _accuracy(result: RunResult) -> list[Figure]:
    evaluation, whose = (result.ema, ", averaged weights") if result.ema is not None else (result.eval, "")
    if evaluation is None:
        return [
            Figure(
                "top-1",
                _NOT_MEASURED,
                "not evaluated: the recipe has train.eval_every=off, or the run ended before the first",
            )
        ]
    notes = [*_best(result.best, evaluation), f"top-5 {accuracy(evaluation.top5)}", f"loss {evaluation.loss:,.4f}"]
    notes.append(count(evaluation.images, "image"))
    return [Figure(f"top-1{whose}", cells.of_accuracy(evaluation.top1), ", ".join(notes))]


def _best(best: EvalResult | None, last: EvalResult) -> list[str]:
    return [f"best {accuracy(best.top1)}"] if best is not None and best.top1 != last.top1 else []


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
    residual = f"{seconds(abs(result.account.residual_s))} of the wall clock are not attributed"
    return [Figure("attributed", Cell(share(result.account.explained), result.account.explained), residual)]


def _so_far(run: Run) -> list[Figure]:
    figures = []
    if run.evals:
        last = run.evals[-1]
        top1 = finite(last.get("ema_top1", last.get("top1")))
        step = number(finite(last.get("step")) or 0)
        figures.append(Figure("top-1 so far", cells.of_accuracy(top1), f"after step {step}"))
    for key, label in (("step", "last logged step"), ("images_per_s", "images/s, last"), ("trained_s", "trained")):
        if run.steps.has(key):
            last_value = run.steps.extents[key].last
            cell = cells.of_seconds(last_value) if key == "trained_s" else cells.plain(last_value)
            figures.append(Figure(label, cell))
    return figures
