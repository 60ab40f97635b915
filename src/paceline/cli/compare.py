"""`paceline compare`: compare runs by time to target, accuracy and throughput."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.cli.options import CompareOptions
from paceline.cli.tables import print_rows, print_table
from paceline.core.errors import PacelineError, RecipeError, suggest_similar
from paceline.core.files import write_output
from paceline.core.results import printable_class_name
from paceline.core.units import count
from paceline.report import cells
from paceline.report.compare_findings import format_metric, format_target
from paceline.report.compare_model import (
    METRICS,
    ComparedRun,
    CompareResult,
    GroupResult,
    RunOutcome,
    read_compared_run,
)
from paceline.report.compare_page import (
    build_compare_page,
    describe_order,
    describe_target_origin,
    ending_cells,
    hours_heading,
    reaching_cells,
)
from paceline.report.compare_runs import check_thresholds, compare_runs, parse_thresholds
from paceline.report.document import TableCell
from paceline.report.render import render_html, render_markdown
from paceline.report.text import clean_text

_TARGET_COLUMNS = ("group", "reached", "time", "epochs", "speed-up")
_FINAL_COLUMNS = ("group", "last", "best", "loss", "against the first")
_RUN_COLUMNS = ("directory", "group", "seed", "last", "best", "loss")
_FACTOR_COLUMNS = ("group", "speed-up", "= by images/s", "x by images needed")
_FORMATS = (".html", ".md", ".json")
_BELOW_CODE = 1


def compare(options: CompareOptions) -> int:
    """Run `paceline compare`; return the exit code, 1 if a group is below a threshold.

    `out` also gets the comparison, as its suffix says: .html, .md or .json.
    """
    metric, out = options.metric, options.out
    if metric not in METRICS:
        raise RecipeError(
            f"--metric: {metric!r} is not known{suggest_similar(metric, METRICS)} (use {', '.join(METRICS)})"
        )
    thresholds = parse_thresholds(options.fail_below, metric)
    if out is not None and out.suffix not in _FORMATS:
        raise RecipeError(f"--out: {out} has no known format (name a file ending in {', '.join(_FORMATS)})")
    # Two names of one folder are one run.
    folders = list({folder.resolve(): folder for folder in (run.expanduser() for run in options.runs)}.values())
    if not folders:
        raise RecipeError("compare: no run was named (name two or more, such as runs/digits-*)")
    trained = [read_compared_run(folder, metric) for folder in folders]
    result = compare_runs(trained, metric=metric, target=options.target, command=("paceline", *sys.argv[1:]))
    failures = check_thresholds(result, thresholds)
    result = result.model_copy(update={"failures": tuple(failures)})
    if options.as_json:
        print(comparison_json(result))
    else:
        show_comparison(result, trained)
    if out is not None:
        _write_comparison(result, trained, out.expanduser(), print_path=not options.as_json)
    for failure in failures:
        print(f"below: {printable_class_name(failure)}", file=sys.stderr)
    return _BELOW_CODE if failures else 0


def comparison_json(result: CompareResult) -> str:
    """Return a comparison as JSON."""
    return json.dumps(result.model_dump(mode="json"), indent=2, allow_nan=False)


def _write_comparison(result: CompareResult, runs: list[ComparedRun], out: Path, *, print_path: bool) -> None:
    match out.suffix:
        case ".json":
            text = comparison_json(result) + "\n"
        case ".md":
            text = printable_class_name(render_markdown(build_compare_page(result, runs)))
        case _:
            text = printable_class_name(render_html(build_compare_page(result, runs)))
    try:
        write_output(out, text)
    except OSError as error:
        raise PacelineError(f"--out: {out} cannot be written: {error.strerror} (name another with --out)") from None
    if print_path:
        print(f"comparison: {printable_class_name(str(out))}")


def show_comparison(result: CompareResult, runs: Sequence[ComparedRun]) -> None:
    """Print a comparison of `runs`."""
    groups = [(rank, result.groups[rank]) for rank in result.ranked_indices]
    if result.target is not None:
        rows = [[*map(_cell_text, reaching_cells(each, rank == 0))] for rank, each in groups]
        title = f"reaching {format_target(result.target)}, {describe_target_origin(result)}"
        print_table(title, _TARGET_COLUMNS, [row[:5] for row in rows], text_columns=_TARGET_COLUMNS)
        factors = [[row[0], *row[4:]] for row, (_, each) in zip(rows, groups, strict=True) if each.speedup is not None]
        if factors:
            why = "images/s until the target, and images needed"
            print_table(f"factors of the speed-up ({why})", _FACTOR_COLUMNS, factors, text_columns=_FACTOR_COLUMNS)
    rows = [[*map(_cell_text, ending_cells(each, rank == 0))] for rank, each in groups]
    title = f"{format_metric(result.metric)} at the end ({count(len(runs), 'run')}){describe_order(result)}"
    print_table(title, _FINAL_COLUMNS, [row[:5] for row in rows], text_columns=_FINAL_COLUMNS)
    took = ("group", "images/s", hours_heading(runs))
    print_table("throughput and cost", took, [[row[0], *row[5:]] for row in rows], text_columns=took)
    print_table(
        "runs",
        _RUN_COLUMNS,
        [_run_row(each, run) for _, each in groups for run in each.runs],
        text_columns=_RUN_COLUMNS,
    )
    paths = dict.fromkeys(path for each in result.groups for path in each.settings)
    if paths:
        settings = [(path, *(each.settings.get(path, "-") for each in result.groups)) for path in paths]
        print_table("settings that differ", ("setting", *(each.name for each in result.groups)), settings,
                    text_columns=[each.name for each in result.groups])  # fmt: skip
    print_rows([("found" if index == 0 else "", sentence) for index, sentence in enumerate(result.sentences)], "")
    for sentence in result.notes:
        print(f"note: {printable_class_name(sentence)}")


def _run_row(group: GroupResult, run: RunOutcome) -> list[str]:
    seed = "" if run.seed is None else str(run.seed)
    last, best = (cells.accuracy_cell(each).text for each in (run.accuracy, run.best))
    return [clean_text(run.path), group.name, seed, last, best, cells.loss_cell(run.loss).text]


def _cell_text(cell: TableCell) -> str:
    return f"{cell.text} ({cell.note})" if cell.note else cell.text
