"""All commands' arguments and options, each declared once: one dataclass per command.

Field types carry typer's declarations. Nothing here imports torch or pydantic, so that help and completion are quick.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer
from typer.main import get_command

from paceline.data.files import printable

OptionsT = TypeVar("OptionsT")
ResultT = TypeVar("ResultT")
_MAX_NAME_BYTES: Final = 255
_MAX_PATH_BYTES: Final = 3900
"""Bytes. Linux allows 4,095, of which the files of a run need some."""


def _parse_folder(text: str) -> Path:
    names = [name.encode(errors="surrogateescape") for name in text.split("/")]
    if not text:  # an unset shell variable, which would mean the current folder
        raise typer.BadParameter("is empty (name a folder, or leave the option out)")
    if not text.isascii() and any("\udc80" <= character <= "\udcff" for character in text):
        raise typer.BadParameter(f"{printable(text)} is not UTF-8 (name another folder)")
    if max(map(len, names)) > _MAX_NAME_BYTES or sum(map(len, names)) + len(names) > _MAX_PATH_BYTES:
        shown = f"{printable(text[:40])}..., {len(text):,} characters,"
        raise typer.BadParameter(
            f"{shown} is too long (at most {_MAX_NAME_BYTES} bytes per name, {_MAX_PATH_BYTES:,} in all)"
        )
    return Path(text)


_flag = partial(typer.Option, metavar="")  # without a type in the help
_option = partial(typer.Option, show_default=False)
"""For options whose default is a sentence of the help, or none."""
_folder_option = partial(typer.Option, parser=_parse_folder, metavar="FOLDER")
_network_option = partial(typer.Option, rich_help_panel="Interconnect")
_argument = partial(typer.Argument, show_default=False)

RecipeArgs = Annotated[
    list[str],
    _argument(
        metavar="RECIPE|KEY=VALUE",
        help="A recipe's name, a recipe file or a run directory, then overrides such as optim.lr=0.4. "
        "[default: digits]",
    ),
]
Overrides = Annotated[
    list[str],
    _argument(metavar="KEY=VALUE", help="Overrides of recipe fields, such as data.source.val_fraction=0.2."),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
Source = Annotated[
    str | None,
    _argument(
        metavar="SRC",
        help="A folder of images, a .csv list, a .pack file or its URL, or a recipe name, recipe file or run "
        "directory. [default: digits]",
    ),
]
Ranks = Annotated[
    str,
    typer.Option(
        metavar="N|auto",
        help="Ranks (processes) to start on this machine; auto: one per GPU, or 1 without GPUs. Under srun and "
        "torchrun, which start the ranks themselves, N must be their total.",
    ),
]
Oversubscribe = Annotated[
    bool, _flag("--oversubscribe", help="Remove the limit on ranks (16, or 4 per CPU core if that is more).")
]
Port = Annotated[
    int, typer.Option(min=0, max=65535, metavar="PORT", help="Rendezvous port of local ranks; 0 picks a free one.")
]
Workers = Annotated[str, typer.Option(metavar="N|auto", help="Worker processes; auto: one per core.")]
Task = Annotated[
    int | None,
    typer.Option(
        "--task", min=1, metavar="K", help="Run only task K of a job array, and skip the summary; requires --run-dir."
    ),
]
TrustCode = Annotated[
    bool,
    _flag("--trust-code", help="Import and run custom code (plugins) named in a recipe file or run directory."),
]
AsJson = Annotated[bool, _flag("--json", help="Print the result as JSON on stdout.")]
Checkpoint = Annotated[str, typer.Option(metavar="last|best|STEP", help="Checkpoint to load.")]


def to_command(kind: type[OptionsT], work: Callable[[OptionsT], ResultT]) -> Callable[..., ResultT]:
    """Return a function that typer can make a command of: its parameters are the fields of `kind`."""

    def command(**given: Any) -> ResultT:
        return work(kind(**{name: value for name, value in given.items() if value is not None}))

    parameters = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, annotation=each.type, default=_default(each))
        for each in fields(kind)  # type: ignore[arg-type]
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__doc__ = work.__doc__
    return command


def _default(each: Field[Any]) -> Any:
    if each.default_factory is not MISSING:
        return None
    return inspect.Parameter.empty if each.default is MISSING else each.default


def parse_options(verb: str, kind: type[OptionsT], args: Sequence[str]) -> OptionsT:
    """Return the options of a command line, without its verb. Raise typer's usage error."""
    program = typer.Typer(add_completion=False)
    program.command(verb)(to_command(kind, lambda options: options))
    command = get_command(program)
    with command.make_context(verb, list(args)) as context:
        options: OptionsT = command.invoke(context)
    return options


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `paceline train`."""

    args: RecipeArgs = field(default_factory=list)
    ranks: Ranks = "auto"
    run_dir: Annotated[
        Path | None, _folder_option(help="Run directory to create.", show_default="runs/RECIPE-TIME")
    ] = None
    resume: Annotated[bool, _flag("--resume", help="Resume from the newest checkpoint.")] = False
    dry_run: Annotated[bool, _flag("--dry-run", help="Check everything and print the plan, without training.")] = False
    trust_code: TrustCode = False
    max_restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="If a rank is lost, restart all ranks and resume, up to N times.")
    ] = 0
    oversubscribe: Oversubscribe = False
    port: Port = 0
    verbose: Annotated[
        bool,
        _flag("--verbose", "-v", help="Print the result in full: every metric, and the time of each stage of a step."),
    ] = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Options of `paceline eval`."""

    run: Run
    overrides: Overrides = field(default_factory=list)
    ranks: Ranks = "auto"
    checkpoint: Checkpoint = "last"
    classes: Annotated[bool, _flag("--classes", help="Show the accuracy of every class.")] = False
    metrics: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Also report these metrics, such as f1,auroc."),
    ] = None
    calibrate: Annotated[
        bool,
        _flag(
            "--calibrate",
            help="Fit a temperature to the evaluated images; predict and export then divide logits by it.",
        ),
    ] = False
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder for the confusion matrix and the worst mistakes."),
    ] = None
    predictions: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV file for the class and the prediction of each image."),
    ] = None
    trust_code: TrustCode = False
    oversubscribe: Oversubscribe = False
    port: Port = 0
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Options of `paceline predict`."""

    run: Run
    images: Annotated[
        list[str], _argument(metavar="IMAGE|FOLDER|-", help="Image files and folders, or - to read paths from stdin.")
    ] = field(default_factory=list)
    top: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of top classes to print per image.",
            show_default="5; for a multi-label model, all classes above the threshold",
        ),
    ] = None
    checkpoint: Checkpoint = "last"
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Images per forward pass.")] = 64
    format: Annotated[
        str,
        typer.Option(
            metavar="table|csv|jsonl", help="Output format.", show_default="table on a terminal, csv otherwise"
        ),
    ] = "auto"
    device: Annotated[str, typer.Option(metavar="cpu|cuda|auto", help="Device to run the model on.")] = "auto"
    reject: Annotated[
        str | None,
        typer.Option(
            metavar="RATE|auto",
            help="Mark images unlike the training images. RATE, such as 0.01, is the false-positive rate: the "
            "share of images like the training images that are marked anyway; auto: 0.05. "
            "Run paceline probe RUN first.",
        ),
    ] = None
    explain: Annotated[
        Path | None,
        _folder_option(
            help="Create FOLDER with a page that shows, for the first 100 images, which parts led to the top "
            "prediction.",
            show_default=False,
        ),
    ] = None
    layer: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Layer for Grad-CAM with --explain, by its module name, such as layer3.",
            show_default="the last layer with a feature map; models without one, such as ViT, use occlusion",
        ),
    ] = "auto"
    trust_code: TrustCode = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of `paceline export`."""

    run: Run
    out: Annotated[Path, typer.Option(metavar="PATH", help="File to write; for safetensors, a folder.")]
    format: Annotated[str, typer.Option(metavar="onnx|torch|safetensors|state_dict", help="Output format.")] = "onnx"
    checkpoint: Checkpoint = "last"
    with_preprocessing: Annotated[
        bool, _flag("--preprocessing", help="Make the exported model accept raw pixels, and normalize them itself.")
    ] = False
    image_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Height and width of the input images.", show_default="as in evaluation"),
    ] = None
    trust_code: TrustCode = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class RecipesOptions:
    """Options of `paceline recipes`."""

    args: Annotated[
        list[str],
        _argument(
            metavar="NAME|PATTERN|KEY=VALUE",
            help="Recipe to show, with overrides; or part of a name, or a pattern such as 'cifar*', to list matches. "
            "[default: list all]",
        ),
    ] = field(default_factory=list)
    origin: Annotated[bool, _flag("--origin", help="Show where each value was set.")] = False
    schema: Annotated[bool, _flag("--schema", help="Print the JSON schema of recipe files, for editors.")] = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    """Options of `paceline models`."""

    pattern: Annotated[
        str | None,
        _argument(
            metavar="PATTERN",
            help="Model name, part of one, or a pattern such as 'timm:vit_*'. Append .TAG to select published weights. "
            "[default: show the number of models per library]",
        ),
    ] = None
    download: Annotated[
        bool, _flag("--download", help="Download the weights of the model that PATTERN matches, or of hf-hub:REPO.")
    ] = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class DataInspectOptions:
    """Options of `paceline data inspect`."""

    src: Source = None
    overrides: Overrides = field(default_factory=list)
    inspect_all: Annotated[bool, _flag("--all", help="Inspect every image, not a sample of 2,000 per split.")] = False
    validation_only: Annotated[bool, _flag("--held-out", help="List the validation images instead, one per line.")] = (
        False
    )
    trust_code: TrustCode = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class DataPackOptions:
    """Options of `paceline data pack`."""

    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A folder of images, a .csv list, a .pack file, or a recipe name, recipe file or run directory.",
        ),
    ]
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write, or folder for shards or an LMDB.")]
    overrides: Overrides = field(default_factory=list)
    form: Annotated[str, typer.Option("--format", metavar="pack|lmdb", help="Output format.")] = "pack"
    resize: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="PX",
            help="If an image's short side is longer than PX, scale it down to PX and re-encode it as JPEG.",
        ),
    ] = None
    quality: Annotated[
        int | None,
        typer.Option(min=1, max=100, metavar="N", help="JPEG quality of resized images.", show_default="90"),
    ] = None
    shard_size: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Write a folder of files of at most this size, such as 1GB.")
    ] = None
    overwrite: Annotated[bool, _flag("--overwrite", help="Replace an existing pack.")] = False
    workers: Workers = "auto"
    trust_code: TrustCode = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class DataUnpackOptions:
    """Options of `paceline data unpack`."""

    pack: Annotated[str, typer.Argument(metavar="PACK", help="A pack, or a folder of its shards.")]
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")]
    workers: Workers = "auto"
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class DataStageOptions:
    """Options of `paceline data stage`."""

    args: Annotated[
        list[str],
        _argument(metavar="SRC|FOLDER|KEY=VALUE", help="The dataset, and a folder in memory or on a local disk."),
    ] = field(default_factory=list)
    remove: Annotated[bool, _flag("--remove", help="Remove the copies in FOLDER, which is then the only argument.")] = (
        False
    )
    trust_code: TrustCode = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class DataVerifyOptions:
    """Options of `paceline data verify`."""

    args: Annotated[list[str], _argument(metavar="SRC|KEY=VALUE", help="SRC as for data inspect, then overrides.")] = (
        field(default_factory=list)
    )
    against: Annotated[
        str | None, typer.Option(metavar="SRC", help="Source of the pack: check that both hold the same images.")
    ] = None
    workers: Workers = "auto"
    trust_code: TrustCode = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class DataBenchOptions:
    """Options of `paceline data bench`."""

    src: Source = None
    overrides: Overrides = field(default_factory=list)
    seconds: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Length of each measurement.")] = 2.0
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Measurements of each loader, interleaved with the others.")
    ] = 3
    images: Annotated[int, typer.Option(min=1, metavar="N", help="Use at most N images, evenly spread.")] = 4096
    workers: Workers = "auto"
    packs: Annotated[bool, _flag("--pack/--no-pack", help="Also measure a temporary pack of the images.")] = True
    cold: Annotated[bool, _flag("--cold/--no-cold", help="Also measure reads from disk, without the page cache.")] = (
        True
    )
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write bench.json to this folder.")] = None
    trust_code: TrustCode = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """Options of `paceline submit`."""

    args: Annotated[
        list[str],
        _argument(
            metavar="[COMMAND] RECIPE|KEY=VALUE [-- OPTIONS]",
            help="What the job runs: train (the default), eval, profile, ladder, tune, scale, batch-study or cv, with "
            "its arguments. Options of that command come after --. slurm.KEY=VALUE and kubernetes.KEY=VALUE set "
            "options of the job, such as the account.",
        ),
    ] = field(default_factory=list)
    engine: Annotated[str, typer.Option(metavar="slurm|kubernetes", help="Scheduler.")] = "slurm"
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="Number of nodes.")] = 1
    gpus_per_node: Annotated[int, typer.Option(min=0, metavar="N", help="GPUs per node.")] = 0
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ranks per node.", show_default="one per GPU, or 1")
    ] = None
    site: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Defaults for jobs on this cluster: the name of a site that paceline knows, or a file.",
            show_default="$PACELINE_SITE, or ~/.config/paceline/site.yaml",
        ),
    ] = None
    run_dir: Annotated[
        Path | None,
        _folder_option(help="Run directory, on a file system that all nodes share.", show_default="runs/RECIPE-TIME"),
    ] = None
    trust_code: TrustCode = False
    array: Annotated[
        bool,
        _flag(
            "--array", help="Run the command (ladder, scale, batch-study or cv) as a job array, with one task per run."
        ),
    ] = False
    wait: Annotated[bool, _flag("--wait", help="Wait for the job, print its output, and exit with its code.")] = False
    dry_run: Annotated[
        bool, _flag("--dry-run", help="Check everything and print the job script; write and submit nothing.")
    ] = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Options of `paceline probe`."""

    args: Annotated[
        list[str],
        _argument(
            metavar="RUN|RECIPE|FOLDER|KEY=VALUE",
            help="A run directory: its model is probed on the run's images, or on those in data.source.root=FOLDER. "
            "Or a recipe or a folder of images, with model.weights set.",
        ),
    ]
    checkpoint: Checkpoint = "last"
    images: Annotated[
        int,
        typer.Option(
            min=100, metavar="N", help="Probe at most N images, up to a quarter of them from the validation split."
        ),
    ] = 5000
    run_dir: Annotated[Path | None, _folder_option(help="Folder to create.", show_default="runs/probe-RECIPE-TIME")] = (
        None
    )
    cache: Annotated[
        Path | None, _folder_option(help="Folder to cache features in.", show_default="~/.cache/paceline/features")
    ] = None
    cache_gb: Annotated[float, typer.Option(min=0, metavar="GB", help="Maximum size of the cache; 0 disables it.")] = (
        1.0
    )
    trust_code: TrustCode = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Options of `paceline doctor`."""

    args: Annotated[
        list[str],
        _argument(
            metavar="RECIPE|KEY=VALUE",
            help="A recipe's name, a recipe file or a run directory to check too, then overrides such as optim.lr=0.4. "
            "[default: the machine alone; with --mtbf: digits]",
        ),
    ] = field(default_factory=list)
    mtbf: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Recommend how often to save checkpoints for this mean time between failures, such as 8h.",
        ),
    ] = None
    ranks: Annotated[
        str | None,
        typer.Option(metavar="N|auto", help="Start this many ranks here, and check that they can communicate."),
    ] = None
    run_dir: Annotated[
        Path | None,
        _folder_option(help="Folder to check: the one in which your runs will be created.", show_default="runs"),
    ] = None
    trust_code: TrustCode = False
    oversubscribe: Oversubscribe = False
    port: Port = 0
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of `paceline check`."""

    args: RecipeArgs = field(default_factory=list)
    ranks: Ranks = "auto"
    run: Annotated[
        Path | None, _folder_option(help="A run whose model is used to find wrong labels among the validation images.")
    ] = None
    run_dir: Annotated[
        Path | None,
        _folder_option(help="Folder to check: the one in which your runs will be created.", show_default="runs"),
    ] = None
    images: Annotated[
        int,
        typer.Option(
            min=2,
            metavar="N",
            help="Look for copies among at most N images; from a larger dataset, take a random sample.",
        ),
    ] = 100_000
    seconds: Annotated[
        float,
        typer.Option(min=0, metavar="S", help="Train for S seconds to measure time and memory; 0 skips this."),
    ] = 40.0
    trust_code: TrustCode = False
    oversubscribe: Oversubscribe = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Options of `paceline profile`."""

    args: RecipeArgs = field(default_factory=list)
    ranks: Ranks = "auto"
    run_dir: Annotated[
        Path | None, _folder_option(help="Folder to create.", show_default="runs/profile-RECIPE-TIME")
    ] = None
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps to measure, after measure.warmup_steps.")] = 40
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="Measurements of the run and of each probe, interleaved.")
    ] = 1
    probes: Annotated[
        bool,
        _flag("--probes/--no-probes", help="Also measure runs with a part of the work removed, such as data loading."),
    ] = True
    trace: Annotated[bool, _flag("--trace", help="Write a Chrome trace of all ranks.")] = False
    nvtx: Annotated[
        bool, _flag("--nvtx", help="Add NVTX ranges for the stages, and print the nsys command that records them.")
    ] = False
    vary: Annotated[
        list[str],
        _option(metavar="KEY=V,V", help="Measure these values of a field, instead of probes; can be repeated."),
    ] = field(default_factory=list)
    trust_code: TrustCode = False
    oversubscribe: Oversubscribe = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Options of `paceline watch`."""

    command: Annotated[
        list[str],
        _argument(
            metavar="PROGRAM|ARG",
            help="Program that trains with PyTorch, and its arguments: python train.py, torchrun, srun, ...",
        ),
    ]
    run_dir: Annotated[Path | None, _folder_option(help="Folder to create.", show_default="runs/watch-NAME-TIME")] = (
        None
    )
    warmup: Annotated[int, typer.Option(min=0, metavar="N", help="Number of initial steps to exclude.")] = 10
    trace: Annotated[bool, _flag("--trace", help="Write a Chrome trace with the steps of all ranks.")] = False
    as_json: Annotated[
        bool,
        _flag("--json", help="Print the result as JSON on stdout; the program's own stdout goes to stderr."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class LadderOptions:
    """Options of `paceline ladder`."""

    args: Annotated[
        list[str],
        _argument(
            metavar="LADDER|KEY=VALUE",
            help="A ladder's name or file, then overrides of its recipe. With --script: the training script's command, "
            "after `--`. [default: auto]",
        ),
    ] = field(default_factory=list)
    ranks: Ranks = "auto"
    recipe: Annotated[
        str | None, typer.Option(metavar="RECIPE", help="Recipe to start from.", show_default="the ladder's")
    ] = None
    script: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|auto",
            help="Measure another training script instead of a recipe. FILE is a ladder file with the settings to "
            "try; auto: the built-in ones. The script's command follows `--`.",
        ),
    ] = None
    run_dir: Annotated[Path | None, _folder_option(help="Folder to create.", show_default="runs/ladder-NAME-TIME")] = (
        None
    )
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Steps to measure per run.", show_default="the ladder's")
    ] = None
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Pairs of runs per setting, one with it and one without.",
            show_default="the ladder's",
        ),
    ] = None
    list_only: Annotated[
        bool, _flag("--list", help="List the ladders, or the settings of one, without running anything.")
    ] = False
    task: Task = None
    trust_code: TrustCode = False
    oversubscribe: Oversubscribe = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """Options of `paceline scale`."""

    args: RecipeArgs = field(default_factory=list)
    ranks: Annotated[
        str,
        typer.Option(
            metavar="N,N|auto", help="Numbers of ranks per node to measure; auto: 1, 2, 4, ... up to all GPUs or cores."
        ),
    ] = "auto"
    nodes: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Numbers of nodes to measure in a Slurm allocation, each with --ranks ranks."),
    ] = None
    mode: Annotated[
        str,
        typer.Option(metavar="weak|strong", help="Keep the batch size constant per rank (weak), or in total (strong)."),
    ] = "weak"
    steps: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Steps to measure, after measure.warmup_steps.", show_default="40"),
    ] = None
    repeats: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Runs of each case, interleaved with the others.", show_default="3"),
    ] = None
    accuracy: Annotated[bool, _flag("--accuracy", help="Train to the end, and report accuracy too.")] = False
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="With --accuracy: full runs per case, each with its own seed.", show_default="3"
        ),
    ] = None
    run_dir: Annotated[Path | None, _folder_option(help="Folder to create.", show_default="runs/scale-RECIPE-TIME")] = (
        None
    )
    task: Task = None
    trust_code: TrustCode = False
    oversubscribe: Oversubscribe = False
    as_json: AsJson = False

    @property
    def trains_fully(self) -> bool:
        """Whether runs train to the end."""
        return self.accuracy

    @property
    def num_steps(self) -> int:
        """Measured steps of a short run."""
        return 40 if self.steps is None else self.steps

    @property
    def num_repeats(self) -> int:
        """Number of runs per case: one per seed for full runs, else repeats."""
        given = self.seeds if self.accuracy else self.repeats
        return 3 if given is None else given


@dataclass(frozen=True, kw_only=True)
class BatchStudyOptions:
    """Options of `paceline batch-study`."""

    args: RecipeArgs = field(default_factory=list)
    batch_sizes: Annotated[
        str | None, typer.Option(metavar="N,N", help="Batch sizes to try.", show_default="the recipe's")
    ] = None
    warmups: Annotated[
        str | None,
        typer.Option(metavar="0ep,5ep", help="Learning-rate warm-ups to try.", show_default="the recipe's"),
    ] = None
    lr_rules: Annotated[
        str | None,
        typer.Option(
            metavar="none,sqrt,linear",
            help="Rules to try for scaling the learning rate with the batch size.",
            show_default="the recipe's",
        ),
    ] = None
    target: Annotated[
        float | None,
        typer.Option(
            metavar="ACCURACY",
            help="Measure the time to reach this accuracy, such as 0.75.",
            show_default="the recipe's",
        ),
    ] = None
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Full runs per case, each with its own seed.")] = 3
    ranks: Ranks = "auto"
    nodes: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Nodes of a Slurm allocation to train on, with --ranks on each."),
    ] = None
    run_dir: Annotated[
        Path | None, _folder_option(help="Folder to create.", show_default="runs/batch-study-RECIPE-TIME")
    ] = None
    task: Task = None
    trust_code: TrustCode = False
    oversubscribe: Oversubscribe = False
    as_json: AsJson = False

    @property
    def trains_fully(self) -> bool:
        """Whether runs train to the end."""
        return True

    @property
    def num_repeats(self) -> int:
        """Number of runs per case."""
        return self.seeds


@dataclass(frozen=True, kw_only=True)
class PredictScalingOptions:
    """Options of `paceline predict-scaling`."""

    run: Annotated[Path | None, _argument(metavar="RUN", help="Run directory to predict from; or give --points.")] = (
        None
    )
    points: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV", help="Table to predict from, with columns ranks, nodes, rank_batch, images and time_s."
        ),
    ] = None
    at: Annotated[
        str | None, typer.Option(metavar="N,N", help="Rank counts to predict for.", show_default="8,16,...,4096")
    ] = None
    ranks_per_node: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Ranks per node.", show_default="8; with --points, that of the table"),
    ] = None
    rank_batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Images per step on each rank.", show_default="as measured")
    ] = None
    images: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Images that the full run processes: dataset size times epochs.",
            show_default="one epoch of RUN; with --points, the table's largest",
        ),
    ] = None
    epochs: Annotated[
        float | None, typer.Option(metavar="N", help="Length of the full run in epochs, instead of --images.")
    ] = None
    fixed_s: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Seconds per run spent outside training steps (start-up, checkpoints).",
            show_default="as measured",
        ),
    ] = None
    price: Annotated[
        float | None, typer.Option(metavar="PRICE", help="Price per rank-hour; adds the cost to the table.")
    ] = None
    alone: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="A single-rank run with the same batch per rank, to separate compute from communication time.",
        ),
    ] = None
    run_dir: Annotated[Path | None, _folder_option(help="Folder to write a report and tables to.")] = None
    network: Annotated[
        str | None,
        _network_option(
            metavar="NAME|FILE",
            help="Interconnect, such as ndr, hdr or 100gbe, or a file written by paceline allreduce --out.",
        ),
    ] = None
    alpha_us: Annotated[float | None, _network_option(metavar="MICROSECONDS", help="Latency per message.")] = None
    gigabytes_per_s: Annotated[float | None, _network_option(metavar="GB/S", help="Bandwidth per node.")] = None
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class QuoteOptions:
    """Options of `paceline quote`."""

    args: RecipeArgs = field(default_factory=list)
    gpu: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME",
            help="GPUs such as a100, h100 or 4090, or .yaml files with the datasheet values of other GPUs.",
        ),
    ] = "a100,h100"
    ranks: Annotated[str, typer.Option(metavar="N,N", help="Numbers of GPUs to estimate for.")] = "1,8"
    images: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of training images, if the data is not on this machine.",
            show_default="the data's",
        ),
    ] = None
    classes: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Number of classes, with --images.", show_default="1000")
    ] = None
    image_size: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Height and width of images, with --images.", show_default="the recipe's"
        ),
    ] = None
    prices: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML file with the keys date, currency and per_gpu_hour (a mapping from GPUs to hourly prices), and "
            "optionally spot (a mapping from GPUs to per_gpu_hour and hours_between_interruptions).",
        ),
    ] = None
    by: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Name the cheapest combination of GPU, number of GPUs and pricing that finishes training in this "
            "time, such as 24h.",
        ),
    ] = None
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="AMOUNT",
            help="Name the combination of GPU, number of GPUs and pricing that trains fastest for at most this amount, "
            "in the currency of --prices.",
        ),
    ] = None
    loader_rate: Annotated[
        float | None,
        typer.Option(
            metavar="IMAGES/S",
            help="Images per second that data loading on one node delivers, as `paceline data bench` measures it on "
            "such a node.",
            show_default="as many as the GPUs can process",
        ),
    ] = None
    mtbf: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="Mean time between failures of a node, such as 500h.", show_default="no failures"
        ),
    ] = None
    restart: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Time from a failure to the next step.", show_default="10min"),
    ] = None
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the quote as .html, .md or .json.")] = (
        None
    )
    network: Annotated[
        str | None,
        _network_option(
            metavar="NAME|FILE",
            help="Interconnect, as for predict-scaling.",
            show_default="the GPU's own link, within a node",
        ),
    ] = None
    ranks_per_node: Annotated[
        int | None, _network_option(min=1, metavar="N", help="Ranks per node.", show_default="8")
    ] = None
    trust_code: TrustCode = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class AllReduceOptions:
    """Options of `paceline allreduce`."""

    ranks: Ranks = "auto"
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the measurement as .json, for predict-scaling --network.")
    ] = None
    oversubscribe: Oversubscribe = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Options of `paceline tune`."""

    args: RecipeArgs = field(default_factory=list)
    ranks: Ranks = "auto"
    run_dir: Annotated[Path | None, _folder_option(help="Folder to create.", show_default="runs/tune-RECIPE-TIME")] = (
        None
    )
    steps: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Steps to measure per run in the first round; later rounds have more."),
    ] = 20
    repeats: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Pairs of runs, with and without a setting, that decide whether to keep it."
        ),
    ] = 3
    vary: Annotated[
        list[str],
        _option(metavar="KEY=V,V", help="Search only field KEY, over these values; can be repeated for more fields."),
    ] = field(default_factory=list)
    allow_batch: Annotated[
        bool, _flag("--allow-batch", help="Also try other batch sizes, and scale the learning rate with them.")
    ] = False
    budget: Annotated[
        str | None,
        _option(
            metavar="N|TIME",
            help="Maximum number of runs. With --learn, the maximum cost of the search, in full training runs or as "
            "a time such as 2h. [default with --learn: 16]",
        ),
    ] = None
    learn: Annotated[
        bool, _flag("--learn", help="Search for the best accuracy: learning rate, weight decay, augmentation, ...")
    ] = False
    search: Annotated[
        Path | None, _option(metavar="FILE", help="With --learn: YAML file of the fields to search, and their ranges.")
    ] = None
    seeds: Annotated[
        int | None,
        _option(
            min=2,
            metavar="N",
            help="With --learn: final runs of the best candidate, and as many of the recipe. [default: 3]",
        ),
    ] = None
    trust_code: TrustCode = False
    oversubscribe: Oversubscribe = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class LrFindOptions:
    """Options of `paceline lr-find`."""

    args: RecipeArgs = field(default_factory=list)
    ranks: Ranks = "auto"
    run_dir: Annotated[
        Path | None, _folder_option(help="Folder to create.", show_default="runs/lr-find-RECIPE-TIME")
    ] = None
    steps: Annotated[
        int, typer.Option(min=20, metavar="N", help="Steps per run; the rate rises from each step to the next.")
    ] = 100
    low: Annotated[float, typer.Option("--from", metavar="LR", help="First optim.lr.")] = 1e-7
    high: Annotated[float, typer.Option("--to", metavar="LR", help="Last optim.lr.")] = 10.0
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Runs to average, each with its own seed.")] = 3
    trust_code: TrustCode = False
    oversubscribe: Oversubscribe = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class CvOptions:
    """Options of `paceline cv`."""

    args: RecipeArgs = field(default_factory=list)
    folds: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Number of folds.", show_default="the recipe's, or 5")
    ] = None
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Times to divide the images anew.")] = 1
    groups: Annotated[
        str | None,
        _option(metavar="COLUMN", help="Column of the groups, such as patients: all images of one are in one fold."),
    ] = None
    groups_file: Annotated[
        Path | None, _option(metavar="FILE", help="CSV file with that column, if the dataset has none.")
    ] = None
    fold_per_group: Annotated[
        bool, _flag("--leave-one-group-out", help="Make a fold of each group; requires --groups.")
    ] = False
    only: Annotated[str | None, _option(metavar="K,K", help="Run only these folds, from 0, and skip the summary.")] = (
        None
    )
    ranks: Ranks = "auto"
    run_dir: Annotated[Path | None, _folder_option(help="Folder to create.", show_default="runs/cv-RECIPE-TIME")] = None
    task: Task = None
    trust_code: TrustCode = False
    oversubscribe: Oversubscribe = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of `paceline compare`."""

    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Run directories; runs that differ only by seed are grouped."),
    ]
    target: Annotated[
        float | None,
        typer.Option(
            metavar="ACCURACY",
            help="Target accuracy, such as 0.75.",
            show_default="the recipes', or one that all runs reach",
        ),
    ] = None
    metric: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Metric to compare, as train.metrics names it: f1, auroc, top5, ...; auto: top1, or ap for "
            "multi-label data.",
        ),
    ] = "auto"
    fail_below: Annotated[
        list[str],
        _option(
            metavar="[METRIC=]VALUE",
            help="Exit with code 1 if METRIC is below VALUE in any group after the first. METRIC: speedup (default), "
            "images_per_s, the name given to --metric (such as top1), or gap (that metric minus the first group's).",
        ),
    ] = field(default_factory=list)
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the comparison as .html, .md or .json.")
    ] = None
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class WhyOptions:
    """Options of `paceline why`."""

    a: Annotated[
        Path, typer.Argument(metavar="A", help="The baseline: a run directory, or a folder that paceline watch wrote.")
    ]
    b: Annotated[Path, typer.Argument(metavar="B", help="The slower or worse run, of the same kind.")]
    rerun: Annotated[
        bool,
        _flag(
            "--rerun",
            help="Rerun A with the differences between A and B applied one at a time, and measure the effect of each.",
        ),
    ] = False
    steps: Annotated[int, typer.Option(min=5, metavar="N", help="With --rerun: steps to measure per run.")] = 30
    repeats: Annotated[int, typer.Option(min=2, metavar="N", help="With --rerun: pairs of runs per difference.")] = 3
    trust_code: TrustCode = False
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the explanation as .html, .md or .json.")
    ] = None
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of `paceline report`."""

    run: Run
    format: Annotated[str, typer.Option(metavar="html|md|json", help="Output format.")] = "html"
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File to write.", show_default="RUN/report.html; for md and json, stdout"),
    ] = None
    follow: Annotated[
        bool, _flag("--follow", help="Serve the page on 127.0.0.1 and update it while the run trains; writes no file.")
    ] = False
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, metavar="PORT", help="Port for --follow.", show_default="a free one"),
    ] = None
    as_json: Annotated[
        bool,
        _flag("--json", help="Print the path of the report as JSON on stdout; --format json prints the report itself."),
    ] = False


JOB_VERBS: Final[dict[str, type]] = {
    "train": TrainOptions,
    "eval": EvalOptions,
    "profile": ProfileOptions,
    "ladder": LadderOptions,
    "tune": TuneOptions,
    "lr-find": LrFindOptions,
    "scale": ScaleOptions,
    "batch-study": BatchStudyOptions,
    "cv": CvOptions,
}
"""Commands that a job of `paceline submit` can run, and their options."""
