"""Build the page of a search for the most accurate settings."""

from typing import Final

from paceline.core.experiments.results import LearnResult, LearnTrial
from paceline.core.metric import format_metric, metric_label
from paceline.core.statistics import Interval
from paceline.core.units import count, number
from paceline.report import cells
from paceline.report.document import (
    Block,
    KeyFigure,
    KeyValueList,
    PageSection,
    Paragraph,
    ReportPage,
    TableCell,
    Tone,
)
from paceline.report.experiment_common import (
    Column,
    ExperimentReport,
    ResultRows,
    build_record,
    metric_texts,
    train_command,
)
from paceline.report.text import clean_text

_FINALS: Final = "final"
_COLUMNS: Final = (
    Column("stage", "rung"),
    Column("name", "settings"),
    Column("share", "length", cells.share_cell),
    Column("shown", "value", in_csv=False),
    Column("value"),
    Column("seed", "seed", lambda seed: TableCell(str(seed))),
    Column("patch", "changes", lambda patch: cells.patch_cell(patch, "nothing"), is_wide=True),
    Column("error", "note", is_wide=True),
    Column("wall_s", "time", cells.seconds_cell),
)


def learn_rows(result: LearnResult) -> ResultRows:
    """Return a row per run: by rung, the best first."""
    last = max(trial.rung for trial in result.trials)

    def place(trial: LearnTrial) -> tuple[int, float]:
        value = trial.value if trial.value is not None else float("inf") if result.is_minimized else float("-inf")
        return trial.rung, value if result.is_minimized else -value

    records = [
        build_record(
            trial,
            stage=_FINALS if trial.rung == last else str(trial.rung),
            shown="failed" if trial.value is None else format_metric(result.metric, trial.value),
        )
        for trial in sorted(result.trials, key=place)
    ]
    return ResultRows(_COLUMNS, records, "Runs", "stage name shown share seed error", "more runs", num_names=2)


def build_learn_page(report: ExperimentReport, result: LearnResult) -> ReportPage:
    """Return the report of a search for the most accurate settings."""
    rows, take = learn_rows(result), _next_blocks(result)
    is_clear = result.gain is not None and (result.gain.is_above(0) or result.gain.is_below(0))
    is_better = result.gain is not None and (result.gain.value < 0 if result.is_minimized else result.gain.value > 0)
    status: tuple[str, Tone] = ("no better settings were found", "warning")
    if is_better:
        status = ("better settings were found", "good") if is_clear else ("perhaps better settings", "warning")
    facts = [
        ("ranks", cells.count_cell(result.ranks)),
        ("budget", TableCell(clean_text(result.budget))),
        ("total time of runs", cells.seconds_cell(result.wall_s)),
        *(
            (clean_text(path), TableCell(clean_text(text)))
            for path, _, text in (e.partition(": ") for e in result.space)
        ),
    ]
    runs = [
        (f"{trial.name}, rung {trial.rung}, seed {trial.seed}", (trial.run,)) for trial in result.trials if trial.run
    ]
    sections = [
        PageSection("take", "Next steps", take),
        PageSection("runs", "Runs by rung", [Paragraph(_describe_rungs()), rows.main_table()]),
        PageSection("settings", "Settings of candidates", [rows.table("stage name shown patch", num_names=2)]),
        report.build_provenance(result.command, facts, result.provenance, runs),
    ]
    return report.build_page(
        "Search for accuracy",
        status,
        [f"recipe {result.recipe} {result.recipe_hash}", count(result.ranks, "rank")],
        _figures(result),
        sections,
        summary=[rows.main_table(), *take],
    )


def _describe_rungs() -> str:
    return (
        "Every run is a full one with its own schedule, of the given length. The best third of a rung is trained anew, "
        "for longer, on the next one. The finals use other seeds than the rungs."
    )


def _figures(result: LearnResult) -> list[KeyFigure]:
    label = metric_label(result.metric)
    spent = TableCell(
        f"{number(result.spent)} of {result.budget}" if result.budget.isdecimal() else number(result.spent)
    )
    return [
        KeyFigure(f"{label} of {result.best}", *_interval_texts(result, result.best_value)),
        KeyFigure(f"{label} of the recipe", *_interval_texts(result, result.recipe_value)),
        KeyFigure("full training runs spent", spent, count(len(result.trials), "run")),
    ]


def _interval_texts(result: LearnResult, interval: Interval | None) -> tuple[TableCell, str]:
    if interval is None:
        return TableCell("failed"), ""
    cell, bounds = metric_texts(result.metric, interval)
    return cell, f"{bounds}, {count(interval.n, 'seed')}" if bounds else "one seed"


def _next_blocks(result: LearnResult) -> list[Block]:
    pairs = [word.partition("=") for word in result.best_patch]
    settings = [(key, cells.sentence_cell(value)) for key, _, value in pairs]
    return [
        Paragraph(clean_text(result.sentence, 500)),
        KeyValueList(settings, f"Settings of {result.best}"),
        Paragraph("To train the better of the two:"),
        train_command(result),
    ]
