"""Report the provenance of a run: command, plan, machine, versions and recipe."""

import json
from typing import Any, Final

from paceline.core.results import RunResult
from paceline.core.units import count
from paceline.report.blocks import Block, CodeBlock, Command, KeyValueList, PageSection, Paragraph, TableCell
from paceline.report.run import RunData
from paceline.report.sections import cells
from paceline.report.words import clean_lines, clean_text

_PLAN_LABELS: Final = {
    "train_images": "training images",
    "val_images": "validation images",
    "num_classes": "classes",
    "image_size": "image size",
    "total_steps": "steps planned",
    "batch_size": "batch, all ranks",
    "micro_batch": "micro-batch per rank",
}


def provenance_section(run: RunData) -> PageSection:
    """Return the provenance section."""
    blocks: list[Block] = []
    command = _recorded_command(run)
    if command:
        blocks += [Paragraph("The command:"), Command(command)]
    trained = _training_rows(run.result) if run.result is not None else []
    planned = [(name, cells.value_cell(key, run.plan[key])) for key, name in _PLAN_LABELS.items() if key in run.plan]
    blocks.append(KeyValueList([*trained, *planned], "What was trained"))
    machine = _machine_rows(run)
    blocks.append(
        KeyValueList(machine, "Machine and versions")
        if machine
        else cells.missing_paragraph("machine.json is missing.")
    )
    if run.recipe:
        blocks.append(CodeBlock("Recipe, resolved (recipe.yaml)", clean_lines(run.recipe)))
    if run.plan:
        plan = {key: value for key, value in run.plan.items() if key != "lr_schedule"}  # a chart shows it
        blocks.append(CodeBlock("Plan (plan.json)", clean_lines(json.dumps(plan, indent=2))[:20_000]))
    return PageSection("origin", "Provenance", blocks)


def _recorded_command(run: RunData) -> str:
    command = run.result.provenance.get("command") if run.result is not None else None
    if isinstance(command, list):
        import shlex

        return clean_text(shlex.join(str(word) for word in command), 4000)
    return clean_text(command, 4000) if isinstance(command, str) else ""


def _training_rows(result: RunResult) -> list[tuple[str, TableCell]]:
    rows = [
        ("steps", cells.count_cell(result.steps)),
        ("epochs", TableCell(f"{result.epochs:,.2f}".removesuffix(".00"), result.epochs)),
        ("images seen", cells.count_cell(result.images_seen)),
        ("recipe hash", TableCell(clean_text(result.recipe_hash), is_code=True)),
        ("learning rate", cells.text_cell(result.lr, 300)),
        ("weights, SHA-256", TableCell(clean_text(result.weights_sha256), is_code=True)),
        ("schema version of the result", cells.count_cell(result.schema_version)),
    ]
    if result.skipped_steps:
        skipped = f"{count(result.skipped_steps, 'step')}, whose gradient was NaN or overflowed"
        rows.insert(1, ("skipped", TableCell(skipped, result.skipped_steps)))
    if result.gap is not None:
        points = f"{100 * result.gap:+.2f} points of top-1"
        rows.append(("training less validation accuracy", TableCell(points, result.gap)))
    return rows


def _machine_rows(run: RunData) -> list[tuple[str, TableCell]]:
    known: dict[str, Any] = {**run.machine, **(run.result.provenance if run.result is not None else {})}
    for key in ("command", "telemetry_missing"):  # shown elsewhere
        known.pop(key, None)
    return cells.key_values(known)
