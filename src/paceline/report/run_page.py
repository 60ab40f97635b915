"""Build the report page of a run: summary, health findings, sections and provenance."""

import shlex
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from paceline import __version__
from paceline.core.health import RunHistory, eval_points, find_problems, training_losses
from paceline.core.metric import format_metric, metric_label
from paceline.core.results import Finding, RunResult
from paceline.core.stages import DATA_WAIT, EXPOSED
from paceline.core.units import count, number, parameters
from paceline.report import cells
from paceline.report.document import (
    Block,
    BottleneckSummary,
    KeyFigure,
    KeyValueList,
    PageFinding,
    ReportPage,
    TableCell,
    Tone,
)
from paceline.report.input_sections import input_section
from paceline.report.learning_sections import learning_section
from paceline.report.mistake_sections import mistakes_section
from paceline.report.overview import build_findings, build_tiles, page_heading, passed_checks
from paceline.report.read_run import RunData
from paceline.report.reproduce_sections import override_chips, reproduce_section
from paceline.report.run_summary import (
    energy_rows,
    estimate_rows,
    quote_rows,
    reliability_rows,
    result_figures,
    training_rows,
    worst_classes_rows,
)
from paceline.report.system_sections import reliability_section, telemetry_section
from paceline.report.text import clean_text, finite_or_none, format_time
from paceline.report.time_sections import (
    logged_stage_seconds,
    profile_section,
    stage_table,
    time_section,
)
from paceline.report.timeline_sections import timeline_section

_STATUS_TONES: Final[dict[str, Tone]] = {
    "completed": "good",
    "target_reached": "good",
    "patience_reached": "good",
    "time_reached": "good",
    "diverged": "good",  # of a range test
    "preempted": "warning",
    "failed": "bad",
}


def build_run_page(run: RunData) -> ReportPage:
    """Return the report of a run, its sections in the order of a reader's interest."""
    # `profile_section` returns None for a run that was not profiled.
    sections = [
        learning_section(run),
        mistakes_section(run),
        input_section(run),
        time_section(run),
        profile_section(run),
        timeline_section(run),
        telemetry_section(run),
        reliability_section(run),
        reproduce_section(run),
    ]
    page = build_run_summary(run)
    return replace(
        page,
        sections=[section for section in sections if section is not None],
        heading=page_heading(run),
        chips=override_chips(run),
        tiles=build_tiles(run),
        passed=passed_checks(run, page.health),
    )


def build_run_summary(run: RunData) -> ReportPage:
    """Return the report of a run without its sections, as a terminal shows it."""
    status, tone = run_status(run)
    summary: list[Block] = []
    recorded = run.result.health if run.result is not None else None
    health = clean_findings(_findings_from_logs(run) if recorded is None else recorded)
    verdict = summarize_bottleneck(run)
    if run.result is not None:
        below = [*energy_rows(run.result), *estimate_rows(run.result), *quote_rows(run.result)]
        below += reliability_rows(run.result)
        rows = [*worst_classes_rows(run.classes), *training_rows(run.result), *below]
        stages = stage_table(run.result)
        summary = [KeyValueList(rows), *([stages] if stages else [])]
    return ReportPage(
        title=run.name,
        subtitle=run_subtitle(run),
        status=status,
        tone=tone,
        figures=_unfinished_figures(run) if run.result is None else [*result_figures(run.result, run.path)],
        verdict=verdict,
        notices=run_notices(run),
        problems=run.problems,
        paceline=__version__,
        summary=summary,
        findings=build_findings(run, health, verdict),
    )


def run_status(run: RunData) -> tuple[str, Tone]:
    """Return how the run ended, and the tone of that."""
    if run.result is None:
        return "not finished", "warning"
    steps = finite_or_none(run.plan.get("total_steps"))
    ended = clean_text(run.result.how_it_ended(None if steps is None else int(steps)), 200)
    if run.result.status in ("preempted", "failed"):
        trust_code = " --trust-code" if run.result.provenance.get("own_parts") else ""
        ended += f"; resume with paceline train {clean_text(shlex.quote(str(run.path)), 2000)} --resume{trust_code}"
    return ended, _STATUS_TONES[run.result.status]


def run_subtitle(run: RunData) -> list[str]:
    """Return recipe, model, data, training, start time, ranks and hardware."""
    result = run.result
    descriptions = [
        _describe_recipe(run),
        _describe_model(result, run.settings),
        _describe_data(run, run.settings),
        _describe_training(run, run.settings),
    ]
    started_s = finite_or_none(run.attempts.rows[0].get("started_s")) if run.attempts.rows else None
    if started_s is not None:
        descriptions.append(format_time(started_s))
    if result is not None:
        descriptions.append(count(result.world_size, "rank"))
    descriptions += [
        clean_text(_describe_device(run)),
        clean_text(f"torch {run.machine['torch']}") if "torch" in run.machine else "",
    ]
    return [each for each in descriptions if each]


def clean_findings(findings: Iterable[Finding]) -> list[PageFinding]:
    """Return findings on health for display; their texts may be of anybody."""
    return [
        PageFinding(
            clean_text(each.title),
            each.severity,
            "health",
            clean_text(each.evidence, 1000),
            clean_text(each.advice, 1000),
            guide="explanation/health",
        )
        for each in findings
    ]


def _findings_from_logs(run: RunData) -> tuple[Finding, ...]:
    # Unfinished runs and results of older versions have no findings.
    result, points = run.result, eval_points(run.evals)
    fits = len(run.confusion) == len(run.classes) and all(
        sum(row) == each.images and row[number] == each.correct
        for number, (row, each) in enumerate(zip(run.confusion, run.classes, strict=True))
    )
    return find_problems(
        RunHistory(
            points=points,
            status=None if result is None else result.status,
            losses=training_losses(run.steps.points),
            has_cross_entropy=run.settings.get("train.loss.name", "cross_entropy") == "cross_entropy",
            classes=run.classes,
            confusion=run.confusion if fits else (),
            steps=0 if result is None else result.steps,
            skipped=0 if result is None else result.skipped_steps,
            scales_loss=True,  # may be wrong: the precision is unknown at this point
        )
    )


def _describe_recipe(run: RunData) -> str:
    name = clean_text(run.plan.get("recipe_name") or "", 60)
    if name:
        return f"recipe {name}"
    if run.result is not None:
        return f"recipe {clean_text(run.result.recipe_hash)}"
    return clean_text(run.recipe.splitlines()[0].removeprefix("# ")) if run.recipe.startswith("# recipe ") else ""


def _describe_model(result: RunResult | None, settings: dict[str, str]) -> str:
    # torchvision:resnet18, 11.2 M parameters
    name = clean_text(settings.get("model.name", ""), 80)
    if not name or result is None or result.parameters is None:
        return name
    frozen = result.trained_parameters is not None and result.trained_parameters != result.parameters
    trained = f", {parameters(result.trained_parameters or 0)} trained" if frozen else ""
    return f"{name}, {parameters(result.parameters)} parameters{trained}"


def _describe_data(run: RunData, settings: dict[str, str]) -> str:
    # cifar10, 50,000 training and 10,000 validation images, 10 classes
    name = clean_text(settings.get("data.source.name", ""), 80)
    images = [
        f"{f'{number:,.0f}' if number else 'no'} {split}"
        for key, split in (("train_images", "training"), ("val_images", "validation"))
        if (number := finite_or_none(run.plan.get(key))) is not None
    ]
    classes = finite_or_none(run.plan.get("num_classes"))
    parts = [name, f"{' and '.join(images)} images" if images else "", f"{classes:,.0f} classes" if classes else ""]
    return ", ".join(filter(None, parts))


def _describe_training(run: RunData, settings: dict[str, str]) -> str:
    # sgd, peak lr 0.1, batch 128, bf16
    peak = finite_or_none(run.plan.get("peak_lr"))
    batch = settings.get("data.batch_size")
    parts = [
        settings.get("optim.name", ""),
        f"peak lr {peak:.4g}" if peak is not None else "",
        f"batch {batch}" if batch else "",
        settings.get("train.precision", ""),
    ]
    return clean_text(", ".join(filter(None, parts)))


def run_notices(run: RunData) -> list[str]:
    """Return short notices on warnings, bad images, skipped steps and failed checkpoints."""
    notices = [count(run.warnings.total, "warning")] if run.warnings.total else []
    if run.result is not None and run.result.bad_images:
        notices.append(f"{count(run.result.bad_images, 'image')} left out (bad_images.jsonl)")
    if run.result is not None and run.result.skipped_steps:
        notices.append(f"{count(run.result.skipped_steps, 'step')} skipped")
    if run.result is not None and run.result.checkpoints is not None and run.result.checkpoints.failed:
        notices.append(f"{count(run.result.checkpoints.failed, 'checkpoint')} failed")
    return notices


def summarize_bottleneck(run: RunData) -> BottleneckSummary | None:
    """Return the bottleneck and what to try next; None for an unfinished run."""
    if run.result is None:
        return None
    recorded, measured = run.result.verdict, run.profile.get("verdict")
    if isinstance(measured, dict) and measured.get("ceiling"):
        # A profile's measurement is better than the bound of the clock.
        recorded = {**recorded, "ceiling": measured["ceiling"]}
    found, command = cells.summarize_verdict(recorded), _suggested_command(run, recorded.get("try", ""))
    return replace(found, command=command, advice="") if found and command else found


def _suggested_command(run: RunData, overrides: str) -> str:
    # The bottleneck may suggest something else than overrides.
    try:
        arguments = shlex.split(overrides)
    except ValueError:
        return ""
    if not arguments or not all(each.partition("=")[1] and each.isprintable() for each in arguments):
        return ""
    return clean_text(shlex.join(["paceline", "profile" if run.profile else "train", str(run.path), *arguments]), 2000)


def _describe_device(run: RunData) -> str:
    gpus = run.machine.get("cuda_devices")
    if isinstance(gpus, list) and gpus:
        return f"{len(gpus)} x {gpus[0]}" if len(gpus) > 1 else str(gpus[0])
    return str(run.machine.get("cpu", ""))


def _unfinished_figures(run: RunData) -> list[KeyFigure]:
    figures = []
    if run.evals:
        last = run.evals[-1]
        name = "ap" if run.is_multi_label else "top1"
        value = finite_or_none(last.get(f"ema_{name}", last.get(name)))
        step = number(finite_or_none(last.get("step")) or 0)
        if value is not None:
            cell = TableCell(format_metric(name, value))
            figures.append(KeyFigure(f"{metric_label(name)} so far", cell, f"after step {step}"))
    for key, label in (("step", "last logged step"), ("images_per_s", "images/s, last"), ("trained_s", "trained")):
        if run.steps.has_key(key):
            last_value = run.steps.extents[key].last
            cell = cells.seconds_cell(last_value) if key == "trained_s" else cells.number_cell(last_value)
            figures.append(KeyFigure(label, cell))
    stages = logged_stage_seconds(run)
    for stage, label, note in ((DATA_WAIT, "data wait", ""), (EXPOSED, "communication", "exposed, ")):
        if stage in stages:
            cell = cells.share_cell(stages[stage] / sum(stages.values()))
            figures.append(KeyFigure(f"{label} so far", cell, f"{note}of rank 0's step time"))
    return figures
