"""`paceline why`: explain why a run is slower than another one, or why it ended worse."""

import os
import shlex
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.compare import check_out_format, show_page
from paceline.cli.options import WhyOptions
from paceline.core.errors import RecipeError
from paceline.core.run_dir import RunDir
from paceline.core.secrets import MASK
from paceline.core.watch_result import read_watch_result
from paceline.core.why_result import RerunResult, WhyResult
from paceline.data.files import expand_path, printable
from paceline.report.text import clean_text
from paceline.report.why_causes import MIN_SCORE, find_effect, find_score
from paceline.report.why_compare import compare_sides, find_differences
from paceline.report.why_page import build_why_page
from paceline.report.why_sides import Side, read_side

if TYPE_CHECKING:
    from paceline.lab.why_rerun import Change, RecipeRuns, ScriptRuns


def why(options: WhyOptions) -> int:
    """Run `paceline why`, and return the exit code."""
    check_out_format(options.out)
    folders = [expand_path(str(each)) for each in (options.a, options.b)]
    if folders[0].resolve() == folders[1].resolve():
        raise RecipeError(f"why: {options.a} and {options.b} are one folder (name two runs)")
    a, b = map(read_side, folders)
    result = compare_sides(a, b)
    if options.rerun:
        result = result.model_copy(update={"rerun": _rerun(a, b, result, options)})
    text = result.model_dump_json(indent=2)
    show_page(text, build_why_page(result), options.out, as_json=options.as_json)
    return 0


def _rerun(a: Side, b: Side, result: WhyResult, options: WhyOptions) -> RerunResult:
    """Measure the differences that can be put back, the likeliest causes first. Raise `PacelineError` without any."""
    from paceline.lab.why_rerun import MAX_CHANGES, NotMeasuredError, list_left, measure_changes

    assert result.speed is not None
    if result.speed.verdict == "same":
        raise RecipeError(f"--rerun: {b.path} is as fast as {a.path}, so nothing is to be measured (leave it out)")
    # Others are left as they are: they take no time, or name a folder in which the second run has its files.
    timed = [each for each in find_differences(a, b) if find_effect(each.name).speed >= MIN_SCORE]
    names = [each.name for each in sorted(timed, key=lambda each: -find_score(each, result.causes))]
    changes, build_runs = (
        _plan_script_runs(a, b, names, options, per_sample=result.speed.unit == "sample")
        if a.kind == "watched script"
        else _plan_recipe_runs(a, b, names, options)
    )
    if not changes:
        raise RecipeError(
            "--rerun: no argument, environment variable or recipe field differs that could be put back (leave it out)"
        )
    folder = RunDir.claim("why", datetime.now()).path
    print(f"runs: {printable(folder)}", file=sys.stderr, flush=True)
    try:
        return measure_changes(
            build_runs(folder).measure,
            changes[:MAX_CHANGES],
            list(list_left(names, changes[:MAX_CHANGES])),
            ratio=result.speed.ratio.value,
            steps=options.steps,
            repeats=options.repeats,
            report=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except NotMeasuredError as error:
        raise RecipeError(f"--rerun: {error} (lower --steps, or see {printable(folder)})") from error


def _plan_script_runs(
    a: Side, b: Side, names: list[str], options: WhyOptions, *, per_sample: bool
) -> "tuple[list[Change], Callable[[Path], ScriptRuns]]":
    from paceline.lab.why_rerun import ScriptRuns, find_masked_argument, find_script_changes
    from paceline.recipe.consent import TRUST_CODE

    first, second = (read_watch_result(each.path) for each in (a, b))
    if not options.trust_code:
        raise RecipeError(
            f"{printable(a.path)}: command: {clean_text(shlex.join(first.command), 200)} would run with your full "
            f"permissions (add {TRUST_CODE} if you trust the authors of {printable(a.path)} and {printable(b.path)})"
        )
    if (masked := find_masked_argument(first.command)) is not None:
        raise RecipeError(
            f"{printable(a.path)}: command: {printable(masked)} is {MASK}, as its value was not recorded (give it to "
            "the script in an environment variable, and watch it again)"
        )
    build = partial(
        ScriptRuns, first, second, os.environ,
        steps=options.steps, warmup=first.warmup_steps, per_sample=per_sample,
    )  # fmt: skip
    return find_script_changes(first, second, names), build


def _plan_recipe_runs(
    a: Side, b: Side, names: list[str], options: WhyOptions
) -> "tuple[list[Change], Callable[[Path], RecipeRuns]]":
    from paceline.lab.why_rerun import build_recipe_runs, find_recipe_changes
    from paceline.recipe.consent import require_consent
    from paceline.recipe.load import load

    first, second = (load(str(each.path)) for each in (a, b))
    for each in (first, second):
        require_consent(each, trust_code=options.trust_code)
    ranks = int(a.settings.get("ranks", "1"))
    build = partial(build_recipe_runs, first.recipe, second.recipe, ranks=ranks, steps=options.steps)
    return find_recipe_changes(first.recipe, second.recipe, names), build
