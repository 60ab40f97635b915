"""`paceline compare`: compare runs by time to target, accuracy and throughput."""

import json
import sys
from pathlib import Path

from paceline.cli.show_compare import show_comparison
from paceline.core.class_table import printable_class_name
from paceline.core.errors import PacelineError, RecipeError, suggest_similar
from paceline.core.files import write_output
from paceline.report.compare.judge import compare_runs
from paceline.report.compare.page import build_compare_page
from paceline.report.compare.read import METRICS, ComparedRun, read_compared_run
from paceline.report.compare.result import CompareResult
from paceline.report.compare.threshold import check_thresholds, parse_thresholds
from paceline.report.html import render_html
from paceline.report.markdown import render_markdown

_FORMATS = (".html", ".md", ".json")
_BELOW_CODE = 1


def compare(
    runs: list[Path], *, target: float | None, metric: str, fail_below: list[str], out: Path | None, as_json: bool
) -> int:
    """Run `paceline compare`; return the exit code, 1 if a group falls below a threshold.

    `out` is an additional .html, .md or .json file to write.
    """
    if metric not in METRICS:
        raise RecipeError(
            f"--metric: {metric!r} is not known{suggest_similar(metric, METRICS)} (use {', '.join(METRICS)})"
        )
    thresholds = parse_thresholds(fail_below, metric)
    if out is not None and out.suffix not in _FORMATS:
        raise RecipeError(f"--out: {out} has no known format (name a file ending in {', '.join(_FORMATS)})")
    folders = list({folder.resolve(): folder for folder in (run.expanduser() for run in runs)}.values())
    if not folders:
        raise RecipeError("compare: no run was named (name two or more, such as runs/digits-*)")
    trained = [read_compared_run(folder, metric) for folder in folders]
    result = compare_runs(trained, metric=metric, target=target, command=("paceline", *sys.argv[1:]))
    failures = check_thresholds(result, thresholds)
    result = result.model_copy(update={"failures": tuple(failures)})
    if as_json:
        print(comparison_json(result))
    else:
        show_comparison(result, trained)
    if out is not None:
        _write_comparison(result, trained, out.expanduser(), print_path=not as_json)
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
