"""Verbs of the lab. Each verb's work is in its own module, imported when the verb is called."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.arguments import (
    JsonOption,
    OversubscribeOption,
    OwnCodeOption,
    RanksOption,
    RecipeArgs,
    TaskOption,
    folder_option,
)
from paceline.core.errors import RecipeError


def profile(
    args: RecipeArgs = None,
    ranks: RanksOption = "auto",
    run_dir: Annotated[Path | None, folder_option("Folder to write (runs/profile-RECIPE-TIME).")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure after the measurement warm-up.")] = 40,
    repeats: Annotated[int, typer.Option(min=1, help="How often to measure the run and each probe, alternating.")] = 1,
    probes: Annotated[
        bool, typer.Option("--probes/--no-probes", help="Also measure runs with free data loading and the like.")
    ] = True,
    trace: Annotated[bool, typer.Option("--trace", help="Write a Chrome trace of all ranks.")] = False,
    nvtx: Annotated[
        bool, typer.Option("--nvtx", help="Mark stages for Nsight Systems, and print its command.")
    ] = False,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V,V", help="Measure each of these values of a field instead, without probes."),
    ] = None,
    own_code: OwnCodeOption = False,
    oversubscribe: OversubscribeOption = False,
    as_json: JsonOption = False,
) -> int:
    """Train for a few steps, and report where the time goes and what would save it."""
    if vary:
        if trace or nvtx:
            raise RecipeError(
                f"--{'trace' if trace else 'nvtx'}: slows down the runs that --vary compares (leave one out)"
            )
        from paceline.cli.sweep import sweep

        return sweep(
            args or [],
            ranks,
            run_dir,
            varied=vary,
            steps=steps,
            repeats=repeats,
            own_code=own_code,
            oversubscribe=oversubscribe,
            as_json=as_json,
        )
    from paceline.cli.profile import profile as work

    return work(
        args or [],
        ranks,
        run_dir,
        steps=steps,
        repeats=repeats,
        probes=probes,
        trace=trace,
        nvtx=nvtx,
        own_code=own_code,
        as_json=as_json,
        oversubscribe=oversubscribe,
    )


def ladder(
    args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LADDER|KEY=VALUE",
            help="A shipped ladder or a ladder file (default: auto), then overrides of its recipe.",
            show_default=False,
        ),
    ] = None,
    ranks: RanksOption = "auto",
    recipe: Annotated[str | None, typer.Option(help="Recipe to start from, instead of the ladder's.")] = None,
    run_dir: Annotated[Path | None, folder_option("Folder to write (runs/ladder-NAME-TIME).")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to measure per run (the ladder's).")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Pairs of runs per rung (the ladder's).")] = None,
    list_only: Annotated[bool, typer.Option("--list", help="List the ladders, or the rungs of one, and stop.")] = False,
    task: TaskOption = None,
    own_code: OwnCodeOption = False,
    oversubscribe: OversubscribeOption = False,
    as_json: JsonOption = False,
) -> int:
    """Add settings one by one, and measure what each gains: keep it if it is faster, drop it if not."""
    from paceline.cli.ladder import ladder as work

    return work(
        args or [],
        ranks,
        run_dir,
        recipe=recipe,
        steps=steps,
        repeats=repeats,
        list_only=list_only,
        as_json=as_json,
        task=task,
        own_code=own_code,
        oversubscribe=oversubscribe,
    )


def tune(
    args: RecipeArgs = None,
    ranks: RanksOption = "auto",
    run_dir: Annotated[Path | None, folder_option("Folder to write (runs/tune-RECIPE-TIME).")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure in the shortest runs.")] = 20,
    repeats: Annotated[int, typer.Option(min=1, help="Pairs of runs that decide whether a setting stays.")] = 3,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V,V", help="Search only these values of a field; can be repeated."),
    ] = None,
    allow_batch: Annotated[
        bool, typer.Option("--allow-batch", help="Also try other batch sizes, and scale the learning rate.")
    ] = False,
    budget: Annotated[int | None, typer.Option(min=1, metavar="N", help="Maximum number of runs.")] = None,
    own_code: OwnCodeOption = False,
    oversubscribe: OversubscribeOption = False,
    as_json: JsonOption = False,
) -> int:
    """Find the fastest settings of a recipe on this machine that train as well, and write them as a recipe."""
    from paceline.cli.tune import tune as work

    return work(
        args or [],
        ranks,
        run_dir,
        steps=steps,
        repeats=repeats,
        vary=vary or [],
        allow_batch=allow_batch,
        budget=budget,
        own_code=own_code,
        as_json=as_json,
        oversubscribe=oversubscribe,
    )


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run directories; runs that differ only in their seed form one group."),
    ],
    target: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="Target accuracy (the recipes' own, else one that all runs reach that learned)."
        ),
    ] = None,
    metric: Annotated[str, typer.Option(metavar="top1|top5|mean_class_accuracy", help="Accuracy to compare.")] = "top1",
    fail_below: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[METRIC=]VALUE",
            help="Exit with code 1 if a group's speedup (without METRIC), gap, images_per_s or the --metric, such as "
            "top1=0.75, is lower; can be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the comparison as .html, .md or .json.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Compare runs: time and epochs to a target, accuracy, and the cause of a speed-up."""
    from paceline.cli.compare import compare as work

    return work(runs, target=target, metric=metric, fail_below=fail_below or [], out=out, as_json=as_json)
