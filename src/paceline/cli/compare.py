"""`paceline compare`: compare runs by time to target, accuracy and throughput."""

import json
import sys
from pathlib import Path

from paceline.cli.show_compare import show_comparison
from paceline.core.class_table import printable
from paceline.core.errors import PacelineError, RecipeError, near_miss
from paceline.core.files import write_output
from paceline.report.compare.judge import compare_runs
from paceline.report.compare.page import build_page
from paceline.report.compare.read import METRICS, Trained, read_trained
from paceline.report.compare.result import CompareResult
from paceline.report.compare.threshold import check, parse_thresholds
from paceline.report.html import to_html
from paceline.report.markdown import to_markdown

_FORMATS = (".html", ".md", ".json")
_BELOW = 1


def compare(
    runs: list[Path], *, target: float | None, metric: str, fail_below: list[str], out: Path | None, as_json: bool
) -> int:
    """Run `paceline compare`; return the exit code, 1 if a group falls below a threshold.

    `out` is an additional .html, .md or .json file to write.
    """
    if metric not in METRICS:
        raise RecipeError(f"--metric: {metric!r} is not known{near_miss(metric, METRICS)} (use {', '.join(METRICS)})")
    thresholds = parse_thresholds(fail_below, metric)
    if out is not None and out.suffix not in _FORMATS:
        raise RecipeError(f"--out: {out} has no known format (name a file ending in {', '.join(_FORMATS)})")
    folders = list({folder.resolve(): folder for folder in (run.expanduser() for run in runs)}.values())
    if not folders:
        raise RecipeError("compare: no run was named (name two or more, such as runs/digits-*)")
    trained = [read_trained(folder, metric) for folder in folders]
    result = compare_runs(trained, metric=metric, target=target, command=("paceline", *sys.argv[1:]))
    failures = check(result, thresholds)
    result = result.model_copy(update={"failures": tuple(failures)})
    if as_json:
        print(to_json(result))
    else:
        show_comparison(result, trained)
    if out is not None:
        _write(result, trained, out.expanduser(), says_so=not as_json)
    for failure in failures:
        print(f"below: {printable(failure)}", file=sys.stderr)
    return _BELOW if failures else 0


def to_json(result: CompareResult) -> str:
    """Return a comparison as JSON."""
    return json.dumps(result.model_dump(mode="json"), indent=2, allow_nan=False)


def _write(result: CompareResult, runs: list[Trained], out: Path, *, says_so: bool) -> None:
    match out.suffix:
        case ".json":
            text = to_json(result) + "\n"
        case ".md":
            text = printable(to_markdown(build_page(result, runs)))
        case _:
            text = printable(to_html(build_page(result, runs)))
    try:
        write_output(out, text)
    except OSError as error:
        raise PacelineError(f"--out: {out} cannot be written: {error.strerror} (name another with --out)") from None
    if says_so:
        print(f"comparison: {printable(str(out))}")
