"""Report the provenance of a run: command, plan, machine, versions and recipe."""

import json
from typing import Any, Final

from paceline.core.results import RunResult
from paceline.core.units import count
from paceline.report.blocks import Block, Cell, Code, Command, Facts, Paragraph, Section
from paceline.report.run import Run
from paceline.report.sections import cells
from paceline.report.words import clean, clean_lines

_TRAINED: Final = {
    "train_images": "training images",
    "val_images": "validation images",
    "num_classes": "classes",
    "image_size": "image size",
    "total_steps": "steps planned",
    "batch_size": "batch, all ranks",
    "micro_batch": "micro-batch per rank",
}


def origin(run: Run) -> Section:
    """Return the provenance section."""
    blocks: list[Block] = []
    command = _command(run)
    if command:
        blocks += [Paragraph("The command:"), Command(command)]
    trained = _trained(run.result) if run.result is not None else []
    planned = [(name, cells.of_value(key, run.plan[key])) for key, name in _TRAINED.items() if key in run.plan]
    blocks.append(Facts([*trained, *planned], "What was trained"))
    machine = _machine(run)
    blocks.append(Facts(machine, "Machine and versions") if machine else cells.missing("machine.json is missing."))
    if run.recipe:
        blocks.append(Code("Recipe, resolved (recipe.yaml)", clean_lines(run.recipe)))
    if run.plan:
        plan = {key: value for key, value in run.plan.items() if key != "lr_schedule"}  # a chart shows it
        blocks.append(Code("Plan (plan.json)", clean_lines(json.dumps(plan, indent=2))[:20_000]))
    return Section("origin", "Provenance", blocks)


def _command(run: Run) -> str:
    command = run.result.provenance.get("command") if run.result is not None else None
    if isinstance(command, list):
        import shlex

        return clean(shlex.join(str(word) for word in command), 4000)
    return clean(command, 4000) if isinstance(command, str) else ""


def _trained(result: RunResult) -> list[tuple[str, Cell]]:
    rows = [
        ("steps", cells.count(result.steps)),
        ("epochs", Cell(f"{result.epochs:,.2f}".removesuffix(".00"), result.epochs)),
        ("images seen", cells.count(result.images_seen)),
        ("recipe hash", Cell(clean(result.recipe_hash), is_code=True)),
        ("learning rate", cells.text(result.lr, 300)),
        ("weights, SHA-256", Cell(clean(result.weights_sha256), is_code=True)),
        ("schema version of the result", cells.count(result.schema_version)),
    ]
    if result.skipped_steps:
        skipped = f"{count(result.skipped_steps, 'step')}, whose gradient was NaN or overflowed"
        rows.insert(1, ("skipped", Cell(skipped, result.skipped_steps)))
    if result.gap is not None:
        points = f"{100 * result.gap:+.2f} points of top-1"
        rows.append(("training less validation accuracy", Cell(points, result.gap)))
    return rows


def _machine(run: Run) -> list[tuple[str, Cell]]:
    known: dict[str, Any] = {**run.machine, **(run.result.provenance if run.result is not None else {})}
    for key in ("command", "telemetry_missing"):  # shown elsewhere
        known.pop(key, None)
    return cells.facts_of(known)
