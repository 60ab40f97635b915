"""Verbs of one run. Each verb's work is in its own module, imported when the verb is called."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.arguments import (
    JsonOption,
    OversubscribeOption,
    OwnCodeOption,
    PortOption,
    RanksOption,
    RecipeArgs,
    folder_option,
)
from paceline.cli.unshared import not_distributed


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
