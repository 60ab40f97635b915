"""Report section on how to reproduce a run, and the settings that it changes."""

import json
import shlex
from collections.abc import Iterator
from typing import Any, Final

from paceline.core.metric import describe_result
from paceline.report import cells
from paceline.report.document import (
    Block,
    CodeBlock,
    Command,
    KeyValueList,
    PageSection,
    Paragraph,
    Table,
    TableCell,
)
from paceline.report.read_run import RunData
from paceline.report.run_summary import training_rows
from paceline.report.text import clean_lines, clean_text, finite_or_none, format_time

_MAX_CHIPS: Final = 8
_MAX_CHIP_CHARS: Final = 60
_MAX_CHANGES: Final = 300
_HASH_CHARS: Final = 12
_PLAN_LABELS: Final = {
    "train_images": "training images",
    "val_images": "validation images",
    "num_classes": "classes",
    "image_size": "image size",
    "total_steps": "steps planned",
    "batch_size": "global batch size",
    "micro_batch": "micro-batch per rank",
}
# Shown by other sections, or in plan.json below.
_HIDDEN_FACTS: Final = ("command", "telemetry_missing")


def override_chips(run: RunData) -> list[str]:
    """Return the overrides of the command line that change the recipe, such as `optim.lr=0.05`."""
    typed = [each for each in _changes(run) if each.get("typed") is True]
    chips = [
        clean_text(f"{each['field']}={_value_text(each.get('value'))}", _MAX_CHIP_CHARS) for each in typed[:_MAX_CHIPS]
    ]
    return [*chips, f"{len(typed) - _MAX_CHIPS} more"] if len(typed) > _MAX_CHIPS else chips


def reproduce_section(run: RunData) -> PageSection:
    """Return the command, the changes to the recipe, versions and hashes, and the resolved recipe."""
    blocks: list[Block] = []
    if command := _recorded_command(run):
        blocks += [Paragraph("The command, as typed:"), Command(command)]
    again = shlex.join(["paceline", "train", str(run.path)])
    blocks += [Paragraph("A run directory is a recipe. Train it again in a new run:"), Command(clean_text(again, 4000))]
    blocks += _change_blocks(run)
    trained: list[tuple[str, TableCell]] = []
    if run.result is not None:
        recipe_hash = TableCell(clean_text(run.result.recipe_hash), is_code=True)
        trained = [*training_rows(run.result), ("recipe hash", recipe_hash)]
    planned = [(name, cells.value_cell(key, run.plan[key])) for key, name in _PLAN_LABELS.items() if key in run.plan]
    if trained or planned:
        blocks.append(KeyValueList([*trained, *planned], "What was trained"))
    if machine := _machine_rows(run):
        blocks.append(KeyValueList(machine, "Machine and versions"))
    else:
        blocks.append(cells.missing_paragraph("machine.json is missing."))
    if run.result is not None:
        blocks.append(Paragraph(f"Cite this run: {'; '.join(_citation(run))}."))
    if run.recipe:
        blocks.append(CodeBlock("Recipe, resolved (recipe.yaml)", clean_lines(run.recipe)))
    if run.plan:
        plan = {key: value for key, value in run.plan.items() if key not in ("lr_schedule", "changes")}  # shown above
        blocks.append(CodeBlock("Plan (plan.json)", clean_lines(json.dumps(plan, indent=2))[:20_000]))
    return PageSection("origin", "Reproduce", blocks)


def _recorded_command(run: RunData) -> str:
    command = run.result.provenance.get("command") if run.result is not None else None
    if isinstance(command, list):
        return clean_text(shlex.join(str(word) for word in command), 4000)
    return clean_text(command, 4000) if isinstance(command, str) else ""


def _changes(run: RunData) -> list[dict[str, Any]]:
    recorded = run.plan.get("changes")
    rows = recorded[:_MAX_CHANGES] if isinstance(recorded, list) else []
    return [each for each in rows if isinstance(each, dict) and isinstance(each.get("field"), str)]


def _change_blocks(run: RunData) -> list[Block]:
    if not isinstance(run.plan.get("changes"), list):  # a run of an older version
        return []
    name = clean_text(run.plan.get("recipe_name") or "", 60)
    changes = _changes(run)
    if not changes:
        return [Paragraph(f"The recipe is {name or 'the named one'}, without changes.")]
    rows = [
        [
            TableCell(clean_text(each["field"], 100), is_code=True),
            cells.text_cell(_value_text(each.get("base"))),
            cells.text_cell(_value_text(each.get("value"))),
            TableCell("command line" if each.get("typed") is True else "follows"),
        ]
        for each in changes
    ]
    columns = cells.table_columns(["field", name or "base recipe", "this run", "set by"])
    return [Table(f"Changes to the recipe {name}".rstrip(), columns, rows, 12, f"all {len(rows)} changes")]


def _value_text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))  # a field such as train.epochs is a float, but people type 8
    return value if isinstance(value, str) else json.dumps(value)


def _machine_rows(run: RunData) -> list[tuple[str, TableCell]]:
    known: dict[str, Any] = {**run.machine, **(run.result.provenance if run.result is not None else {})}
    return cells.key_values({key: value for key, value in known.items() if key not in _HIDDEN_FACTS})


def _citation(run: RunData) -> Iterator[str]:
    # digits-20261124-053000; top-1 99.44 %; recipe digits (0123456789ab); weights 3f92c4bf85df; paceline 0.1.0
    result = run.result
    assert result is not None
    yield run.name
    evaluation = result.ema or result.eval
    if evaluation is not None:
        yield f"{describe_result(evaluation)} on {evaluation.images:,} images"
    name, digest = clean_text(run.plan.get("recipe_name") or "", 60), clean_text(result.recipe_hash, 40)
    yield f"recipe {name} ({digest})" if name else f"recipe {digest}"
    yield f"weights sha256 {clean_text(result.weights_sha256, 80)[:_HASH_CHARS]}"
    for package in ("paceline", "torch"):
        if package in run.machine:
            yield f"{package} {clean_text(run.machine[package], 60)}"
    ended = [each for row in run.attempts.rows if (each := finite_or_none(row.get("ended_s"))) is not None]
    if ended:
        yield format_time(ended[-1])
