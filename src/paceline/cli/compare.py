"""`paceline compare`: compare runs by time to target, accuracy and throughput."""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.cli.options import CompareOptions
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.files import write_output
from paceline.core.metric import ALWAYS, MINIMIZED
from paceline.core.results import printable_class_name
from paceline.core.watch_result import is_watch_dir, read_watch_result
from paceline.recipe.schema.train import METRICS, check_metric
from paceline.report.compare_model import CompareResult, read_compared_run
from paceline.report.compare_page import build_compare_page
from paceline.report.compare_runs import check_thresholds, compare_runs, parse_thresholds
from paceline.report.document import ReportPage
from paceline.report.render import render_html, render_markdown
from paceline.report.render_terminal import print_page
from paceline.report.watch_page import build_watch_comparison

_FORMATS = (".html", ".md", ".json")
_BELOW_CODE = 1
_METRICS = tuple(name for name in METRICS if name not in MINIMIZED)


def compare(options: CompareOptions) -> int:
    """Run `paceline compare`; return the exit code, 1 if a group is below a threshold.

    `out` also gets the comparison, as its suffix says: .html, .md or .json.
    """
    if options.metric != "auto":
        _check_metric(options.metric)
    check_out_format(options.out)
    # Two names of one folder are one run.
    folders = list({folder.resolve(): folder for folder in (run.expanduser() for run in options.runs)}.values())
    if not folders:
        raise RecipeError("compare: no run was named (name two or more, such as runs/digits-*)")
    if all(map(is_watch_dir, folders)):
        return _compare_watched(options, folders)
    metric = _default_metric(folders) if options.metric == "auto" else options.metric
    thresholds = parse_thresholds(options.fail_below, metric)
    trained = [read_compared_run(folder, metric) for folder in folders]
    if not any(run.evals for run in trained) and (measured := set[str]().union(*(run.columns for run in trained))):
        known = [name for name in _METRICS if name in measured]
        or_train = "" if metric in ALWAYS else f", or train with train.metrics=[{metric}]"
        raise RecipeError(f"--metric: no run has values of {metric} from 0 to 1 (use {', '.join(known)}{or_train})")
    result = compare_runs(trained, metric=metric, target=options.target, command=("paceline", *sys.argv[1:]))
    failures = check_thresholds(result, thresholds)
    result = result.model_copy(update={"failures": tuple(failures)})
    show_page(comparison_json(result), build_compare_page(result, trained), options.out, as_json=options.as_json)
    for failure in failures:
        print(f"below: {printable_class_name(failure)}", file=sys.stderr)
    return _BELOW_CODE if failures else 0


def _default_metric(folders: Iterable[Path]) -> str:
    """Return top-1, or if no evaluation has it, as images have several labels, the macro AP."""
    measured = set[str]().union(*(read_compared_run(folder, "top1").columns for folder in folders))
    return "ap" if "ap" in measured and "top1" not in measured else "top1"


def _check_metric(metric: str) -> None:
    """Raise `RecipeError` unless `metric` is a metric of which more is better."""
    try:
        check_metric(metric)
    except ValueError as error:
        raise RecipeError(f"--metric: {error}") from None
    if metric in MINIMIZED:
        raise RecipeError(
            f"--metric: {metric} is better if it is lower, and a target is reached from below (use one of "
            f"{', '.join(_METRICS)})"
        )


def comparison_json(result: CompareResult) -> str:
    """Return a comparison as JSON."""
    return json.dumps(result.model_dump(mode="json"), indent=2, allow_nan=False)


def _compare_watched(options: CompareOptions, folders: Sequence[Path]) -> int:
    """Compare the steps of scripts under `paceline watch`, and return the exit code."""
    given = {"--metric": options.metric != "auto", "--target": options.target, "--fail-below": options.fail_below}
    for option, value in given.items():
        if value:
            raise RecipeError(f"{option}: has no effect on watched scripts (leave it out)")
    names = [folder.resolve().name for folder in folders]
    labels = names if len(set(names)) == len(names) else list(map(str, folders))
    results = {label: read_watch_result(folder) for label, folder in zip(labels, folders, strict=True)}
    values = {name: result.model_dump(mode="json") for name, result in results.items()}
    text = json.dumps(values, indent=2, allow_nan=False)
    show_page(text, build_watch_comparison(results), options.out, as_json=options.as_json)
    return 0


def check_out_format(out: Path | None) -> None:
    """Raise `RecipeError` unless the suffix of `--out` is that of a known format."""
    if out is not None and out.suffix not in _FORMATS:
        raise RecipeError(f"--out: {out} has no known format (name a file ending in {', '.join(_FORMATS)})")


def show_page(text: str, page: ReportPage, out: Path | None, *, as_json: bool, noun: str = "comparison") -> None:
    """Print a result, as JSON `text` or as `page`, and write it to the file `out` that was named; `noun` names it."""
    if as_json:
        print(text)
    else:
        print_page(page)
    if out is not None:
        _write_page(text, page, out.expanduser())
        if not as_json:
            print(f"{noun}: {printable_class_name(str(out.expanduser()))}")


def _write_page(json_text: str, page: ReportPage, out: Path) -> None:
    match out.suffix:
        case ".json":
            text = json_text + "\n"
        case ".md":
            text = printable_class_name(render_markdown(page))
        case _:
            text = printable_class_name(render_html(page))
    try:
        write_output(out, text)
    except OSError as error:
        raise PacelineError(f"--out: {out} cannot be written: {error.strerror} (name another with --out)") from None
