"""Typer app: all verbs. Each verb's work is in its own module, imported when the verb is called."""

import os
import sys
from collections.abc import Callable, Sequence
from copy import copy
from inspect import signature
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from paceline.cli.options import (
    AllReduceOptions,
    BatchStudyOptions,
    CheckOptions,
    CompareOptions,
    CvOptions,
    DataBenchOptions,
    DataInspectOptions,
    DataPackOptions,
    DataStageOptions,
    DataUnpackOptions,
    DataVerifyOptions,
    DoctorOptions,
    EvalOptions,
    ExportOptions,
    LadderOptions,
    LrFindOptions,
    ModelsOptions,
    OptionsT,
    PredictOptions,
    PredictScalingOptions,
    ProbeOptions,
    ProfileOptions,
    QuoteOptions,
    RecipesOptions,
    ReportOptions,
    ScaleOptions,
    SubmitOptions,
    TrainOptions,
    TuneOptions,
    WatchOptions,
    WhyOptions,
    to_command,
)
from paceline.core.errors import WorldError
from paceline.parallel.environ import ends_with_parent, world_from_environ

Verb = Callable[[OptionsT], int]


class _Command(TyperCommand):
    """A verb whose help shows no types of flags and arguments: `<bool>` and `<list[str]>` say nothing to a user."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option `--help`."""
        return _without_type(super().get_help_option(ctx))

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters."""
        params = super().get_params(ctx)
        for each in params:
            if each.param_type_name == "argument":
                each.display_type_rich = lambda ctx: None  # type: ignore[attr-defined]
        return params


class _Group(TyperGroup):
    """A group of verbs, whose help is like that of `_Command`."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option `--help`."""
        return _without_type(super().get_help_option(ctx))


def _without_type(option: Any) -> Any:
    if option is not None:
        option.metavar = ""
    return option


app = typer.Typer(
    name="paceline",
    cls=_Group,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Train image classifiers in PyTorch, from one CPU core to a Slurm cluster, and see where every second goes.",
)
# In the order of `paceline --help`.
_TRAIN, _PREPARE, _SPEED = "Train and use a model", "Before you train", "Measure and speed up"
_SCALE, _CLUSTER, _DATA = "Scale", "Run on a cluster", "Data and recipes"
data = typer.Typer(cls=_Group, no_args_is_help=True, help="Pack, inspect, verify and benchmark data before training.")


def _verb(
    example: str,
    group: typer.Typer = app,
    name: str | None = None,
    *,
    panel: str | None = None,
    runs_command: bool = False,
) -> Callable[[Verb[OptionsT]], Verb[OptionsT]]:
    """Return a decorator that adds a verb to `group`; the class of its parameter declares its options.

    `panel` is the heading that the verb stands under in `paceline --help`. With `runs_command`, all words after the
    first argument are arguments too.
    """

    def add(work: Verb[OptionsT]) -> Verb[OptionsT]:
        (parameter,) = signature(work).parameters.values()
        command = to_command(parameter.annotation, work)
        add_command = group.command(
            name or work.__name__,
            cls=_Command,
            epilog=f"Example: `{example}`",
            rich_help_panel=panel,
            context_settings={"allow_interspersed_args": not runs_command},
        )
        add_command(command)
        return work

    return add


@app.callback(invoke_without_command=True)
def paceline(
    version: Annotated[bool, typer.Option("--version", metavar="", help="Print the version.")] = False,
    show_completion: Annotated[
        str | None, typer.Option(metavar="bash|fish|zsh", help="Print the completion script for the named shell.")
    ] = None,
) -> None:
    """Train image classifiers in PyTorch, from one CPU core to a Slurm cluster, and see where every second goes."""
    if version:
        from paceline import __version__

        print(__version__)
        raise typer.Exit
    if show_completion is not None:
        from paceline.cli.complete import completion_script

        print(completion_script(show_completion), end="")
        raise typer.Exit


@_verb("paceline data inspect ~/photos", data)
def inspect(options: DataInspectOptions) -> int:
    """Summarize a dataset: classes, sizes, formats, bytes."""
    note_duplicate_work("data inspect")
    from paceline.cli.data_inspect import inspect_data, list_validation

    return list_validation(options) if options.validation_only else inspect_data(options)


@_verb("paceline data pack ~/photos photos.pack", data)
def pack(options: DataPackOptions) -> int:
    """Write a dataset as a pack: one file, or shards, with checksums. Pixels change only with --resize."""
    note_duplicate_work("data pack")
    from paceline.cli.data_pack import pack_data

    return pack_data(options)


@_verb("paceline data unpack photos.pack ~/photos-again", data)
def unpack(options: DataUnpackOptions) -> int:
    """Write the images of a pack as files in class folders."""
    note_duplicate_work("data unpack")
    from paceline.cli.data_pack import unpack_data

    return unpack_data(options)


@_verb("paceline data stage ~/photos /dev/shm", data)
def stage(options: DataStageOptions) -> int:
    """Copy a dataset into memory or to a local disk, for the runs on this machine."""
    from paceline.cli.data_pack import stage_data

    return stage_data(options)


@_verb("paceline data verify photos.pack --against ~/photos", data)
def verify(options: DataVerifyOptions) -> int:
    """Read and decode every image; list images that cannot be decoded, and duplicates."""
    note_duplicate_work("data verify")
    from paceline.cli.data_verify import verify_data

    return verify_data(options)


@_verb("paceline data bench ~/photos --seconds 5", data)
def bench(options: DataBenchOptions) -> int:
    """Measure every loader on your own data, and the limits of this machine."""
    note_duplicate_work("data bench")
    from paceline.cli.data_bench import bench_data

    return bench_data(options)


@_verb("paceline train digits optim.lr=0.05 train.epochs=5 --ranks 2", panel=_TRAIN)
def train(options: TrainOptions) -> int:
    """Train a classifier, evaluate it, and write a run directory."""
    from paceline.cli.train import train as work

    return work(options)


@_verb("paceline eval runs/digits-20261121-101500 data.eval_batch_size=512", name="eval", panel=_TRAIN)
def evaluate(options: EvalOptions) -> int:
    """Evaluate a run's weights on its validation images or another dataset, counting each image once."""
    from paceline.cli.evaluate import evaluate as work

    return work(options)


@_verb("paceline cv folder data.source.root=~/photos --folds 5", panel=_TRAIN)
def cv(options: CvOptions) -> int:
    """Cross-validate a recipe: train and evaluate it on every fold of the images, and summarize the scores."""
    from paceline.cli.cv import cv as work

    return work(options)


@_verb("paceline predict runs/digits-20261121-101500 ~/photos --format csv", panel=_TRAIN)
def predict(options: PredictOptions) -> int:
    """Classify images with a trained model."""
    note_duplicate_work("predict")
    from paceline.cli.predict import predict as work

    return work(options)


@_verb("paceline export runs/digits-20261121-101500 --format onnx --out digits.onnx", panel=_TRAIN)
def export(options: ExportOptions) -> int:
    """Export a run's model for other programs, and check its outputs against PyTorch's."""
    note_duplicate_work("export")
    from paceline.cli.export import export as work

    return work(options)


@_verb("paceline report runs/digits-20261121-101500 --format md", panel=_TRAIN)
def report(options: ReportOptions) -> int:
    """Write the report of a run, with its results and where the time went, to one file."""
    from paceline.cli.report import report as work

    return work(options)


@_verb("paceline compare runs/b128-* runs/b2048-* --target 0.75 --out compare.html", panel=_TRAIN)
def compare(options: CompareOptions) -> int:
    """Compare runs: time and epochs to a target, accuracy, and the cause of a speed-up."""
    from paceline.cli.compare import compare as work

    return work(options)


@_verb("paceline check folder data.source.root=~/photos --ranks 2", panel=_PREPARE)
def check(options: CheckOptions) -> int:
    """Check the data before a long run, and estimate its time, memory and disk space."""
    from paceline.cli.check import check as work

    return work(options)


@_verb("paceline probe runs/digits-20261121-101500 --images 2000", panel=_PREPARE)
def probe(options: ProbeOptions) -> int:
    """Use a model's features to find wrong labels, near duplicates, leaks between splits and unusual images."""
    note_duplicate_work("probe")
    from paceline.cli.probe import probe as work

    return work(options)


@_verb("paceline lr-find folder data.source.root=~/photos", name="lr-find", panel=_PREPARE)
def lr_find(options: LrFindOptions) -> int:
    """Suggest a learning rate, from a few short runs in which it rises from step to step."""
    from paceline.cli.lr_find import lr_find as work

    return work(options)


@_verb("paceline profile folder data.source.root=~/photos --trace", panel=_SPEED)
def profile(options: ProfileOptions) -> int:
    """Train for a few steps, and report where the time goes and what would make training faster."""
    from paceline.cli.profile import profile as work

    return work(options)


@_verb("paceline watch --trace -- torchrun train.py", panel=_SPEED, runs_command=True)
def watch(options: WatchOptions) -> int:
    """Run any PyTorch training script, and report where the time in each step goes, on every rank."""
    from paceline.cli.watch import watch as work

    return work(options)


@_verb("paceline why watched/monday watched/friday", panel=_SPEED)
def why(options: WhyOptions) -> int:
    """Explain why one run is slower than another, or why it reached a worse result."""
    from paceline.cli.why import why as work

    return work(options)


@_verb("paceline ladder cpu data.source.root=~/cifar10", panel=_SPEED)
def ladder(options: LadderOptions) -> int:
    """Add settings one by one, measure how much each one helps, and keep those that make training faster."""
    from paceline.cli.ladder import ladder as work

    return work(options)


@_verb("paceline tune folder data.source.root=~/photos", panel=_SPEED)
def tune(options: TuneOptions) -> int:
    """Find the settings that make a recipe train fastest without a worse loss (with --learn: reach the best accuracy),
    and save them as a new recipe."""
    if options.learn:
        from paceline.cli.tune_learn import tune_learn

        return tune_learn(options)
    from paceline.cli.tune import tune as work

    return work(options)


@_verb("paceline scale cifar10-resnet18 --ranks 1,2,4 --mode strong", panel=_SCALE)
def scale(options: ScaleOptions) -> int:
    """Measure how training speed changes with the number of ranks and nodes."""
    from paceline.cli.scale import scale as work

    return work(options)


@_verb(
    "paceline batch-study cifar10-resnet18 --batch-sizes 128,512 --warmups 0ep,5ep", name="batch-study", panel=_SCALE
)
def batch_study(options: BatchStudyOptions) -> int:
    """Train with several batch sizes, warm-ups and learning-rate rules, and compare accuracy and time."""
    from paceline.cli.scale import scale as work

    return work(options)


@_verb("paceline predict-scaling runs/digits-20261121-101500 --at 64,256", name="predict-scaling", panel=_SCALE)
def predict_scaling(options: PredictScalingOptions) -> int:
    """Predict the training time on more ranks, from a run or from measurements."""
    from paceline.cli.scale_predict import predict_scaling as work

    return work(options)


@_verb("paceline quote imagenet-resnet50-16ep --gpu a100,h100 --ranks 8 --images 1281167", panel=_SCALE)
def quote(options: QuoteOptions) -> int:
    """Estimate the speed, time, memory and cost of training on GPUs that this machine does not have."""
    from paceline.cli.quote import quote as work

    return work(options)


@_verb("srun --nodes 2 --ntasks-per-node 4 paceline allreduce --out network.json", panel=_SCALE)
def allreduce(options: AllReduceOptions) -> int:
    """Time all-reduces between ranks."""
    from paceline.cli.allreduce import time_allreduce as work

    return work(options)


@_verb("paceline submit folder data.source.root=/shared/photos --nodes 2 --gpus-per-node 4 --wait", panel=_CLUSTER)
def submit(options: SubmitOptions) -> int:
    """Generate and submit a Slurm or Kubernetes job."""
    from paceline.cli.submit import submit as work

    return work(options)


@_verb("srun --nodes 2 --ntasks-per-node 4 paceline doctor", panel=_CLUSTER)
def doctor(options: DoctorOptions) -> int:
    """Check this machine, or every rank of a job, for problems that would break or slow down a run."""
    from paceline.cli.doctor import doctor as work

    return work(options)


@_verb("paceline recipes course/wideresnet-fashion model.width=0.25 --origin", panel=_DATA)
def recipes(options: RecipesOptions) -> int:
    """List the shipped recipes, or show one with every field resolved."""
    from paceline.cli.recipes import recipes as work

    return work(options)


@_verb("paceline models 'timm:vit_small*'", panel=_DATA)
def models(options: ModelsOptions) -> int:
    """List models of paceline, torchvision and timm, and the weights that are published for them."""
    note_duplicate_work("models")
    from paceline.cli.models import models as work

    return work(options)


app.add_typer(data, name="data", rich_help_panel=_DATA)


def program_for(args: Sequence[str]) -> typer.Typer:
    """Return the program for the command line `args`, with no other verb than the one it starts with, if any."""
    # typer builds every command that it has, which takes a tenth of the time to the first line.
    chosen = [each for each in app.registered_commands if each.name in args[:1]]
    if not chosen:
        return app
    program = copy(app)
    program.registered_commands, program.registered_groups = chosen, []
    return program


def note_duplicate_work(verb: str) -> None:
    """Print a note if torchrun or Slurm started several ranks of a verb that does not distribute its work."""
    # Only a note: in a script that srun starts, each rank may have work of its own.
    try:
        world = world_from_environ(os.environ)
    except WorldError:  # variables left over in a shell, which matter only to verbs that use them
        return
    if world.is_main and world.world_size > 1 and ends_with_parent(os.environ, world):
        print(
            f"note: {verb} is not distributed: each of {world.world_size} ranks does all of the work "
            "(start one process, or give each its own input)",
            file=sys.stderr,
        )
