"""Verbs of runs and of the lab; `paceline submit` reads the same declarations."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import (
    JsonOption,
    OversubscribeOption,
    OwnCodeOption,
    PortOption,
    RanksOption,
    RecipeArgs,
    TaskOption,
    folder_option,
    not_distributed,
)
from paceline.core.errors import RecipeError


def train(
    args: RecipeArgs = None,
    ranks: RanksOption = "auto",
    run_dir: Annotated[Path | None, folder_option("Run directory to write (runs/RECIPE-TIME).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the newest checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print the plan, and stop.")] = False,
    own_code: OwnCodeOption = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="If a rank is lost, restart all ranks and resume, up to N times.")
    ] = 0,
    oversubscribe: OversubscribeOption = False,
    port: PortOption = 0,
    as_json: JsonOption = False,
) -> int:
    """Train a classifier, evaluate it, and write a run directory."""
    from paceline.cli.train import train as work

    return work(
        args or [],
        ranks,
        run_dir,
        resume=resume,
        dry_run=dry_run,
        own_code=own_code,
        max_restarts=max_restarts,
        port=port,
        as_json=as_json,
        oversubscribe=oversubscribe,
    )


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides of its recipe.", show_default=False)
    ] = None,
    ranks: RanksOption = "auto",
    checkpoint: Annotated[str, typer.Option(metavar="last|best|STEP", help="Checkpoint to evaluate.")] = "last",
    classes: Annotated[bool, typer.Option("--classes", help="Show the accuracy of every class.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the confusion matrix and the worst images there.")
    ] = None,
    own_code: OwnCodeOption = False,
    oversubscribe: OversubscribeOption = False,
    port: PortOption = 0,
    as_json: JsonOption = False,
) -> int:
    """Evaluate a run's weights on every image of the validation split, once each."""
    from paceline.cli.evaluate import evaluate as work

    return work(
        run,
        overrides or [],
        ranks,
        checkpoint,
        out=out,
        own_code=own_code,
        port=port,
        as_json=as_json,
        per_class=classes,
        oversubscribe=oversubscribe,
    )


@not_distributed("predict")
def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    images: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="IMAGE|FOLDER|-", show_default=False, help="Files, folders, or - to read paths from stdin."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of classes to print per image.")] = 5,
    checkpoint: Annotated[str, typer.Option(metavar="last|best|STEP", help="Checkpoint to load.")] = "last",
    batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass.")] = 64,
    format: Annotated[
        str, typer.Option(metavar="table|csv|jsonl", help="Output format (table on a terminal, else csv).")
    ] = "auto",
    device: Annotated[str, typer.Option(metavar="cpu|cuda|auto", help="Device to compute on.")] = "auto",
    own_code: OwnCodeOption = False,
    as_json: JsonOption = False,
) -> int:
    """Classify images with a trained model."""
    from paceline.cli.predict import predict as work

    return work(
        run,
        images or [],
        top=top,
        checkpoint=checkpoint,
        batch_size=batch_size,
        format=format,
        device=device,
        own_code=own_code,
        as_json=as_json,
    )


@not_distributed("export")
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    out: Annotated[Path, typer.Option(metavar="PATH", help="File to write; for safetensors, a folder.")],
    format: Annotated[str, typer.Option(metavar="onnx|torch|safetensors|state_dict", help="Output format.")] = "onnx",
    checkpoint: Annotated[str, typer.Option(metavar="last|best|STEP", help="Checkpoint to export.")] = "last",
    with_preprocessing: Annotated[
        bool, typer.Option("--preprocessing", help="Accept uint8 images, and normalise them in the exported model.")
    ] = False,
    image_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Height and width of its input images (those of the evaluation)."),
    ] = None,
    own_code: OwnCodeOption = False,
    as_json: JsonOption = False,
) -> int:
    """Export a run's model for other programs, and check that its outputs match."""
    from paceline.cli.export import export as work

    return work(
        run,
        format=format,
        out=out,
        checkpoint=checkpoint,
        with_preprocessing=with_preprocessing,
        image_size=image_size,
        own_code=own_code,
        as_json=as_json,
    )


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
