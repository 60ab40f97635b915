"""All verbs' arguments and options, each declared once: one dataclass per verb.

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


_folder_option = partial(typer.Option, parser=_parse_folder, metavar="PATH")
_study_option = partial(typer.Option, rich_help_panel="Batch-size study")
_predict_option = partial(typer.Option, rich_help_panel="Prediction")
_collective_option = partial(typer.Option, rich_help_panel="Collectives")
_argument = partial(typer.Argument, show_default=False)

RecipeArgs = Annotated[
    list[str],
    _argument(
        metavar="RECIPE|KEY=VALUE",
        help="A preset, a recipe file or a run directory (default: digits), then overrides such as optim.lr=0.4.",
    ),
]
Overrides = Annotated[list[str], _argument(metavar="KEY=VALUE", help="Overrides of its recipe.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
Source = Annotated[
    str | None,
    _argument(
        metavar="SRC|KEY=VALUE",
        help="A folder of images, a .csv list, a .pack or its URL, or a recipe's name, file or run (default: digits).",
    ),
]
Ranks = Annotated[str, typer.Option(metavar="N|auto", help="Processes on this machine; auto: one per GPU, or one.")]
Oversubscribe = Annotated[
    bool, typer.Option("--oversubscribe", help="Allow more ranks than 16, or 4 per CPU core if that is more.")
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Rendezvous port of the local ranks; 0 selects a free one.")]
Workers = Annotated[str, typer.Option(metavar="N|auto", help="Workers; auto: one per core.")]
Task = Annotated[
    int | None,
    typer.Option("--task", min=1, metavar="K", help="Run only the K-th task, without a conclusion; needs --run-dir."),
]
OwnCode = Annotated[
    bool, typer.Option("--own-code", help="Import code that a recipe file or run directory names; it can do anything.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout, and nothing else.")]


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
    run_dir: Annotated[Path | None, _folder_option(help="Run directory to write (runs/RECIPE-TIME).")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the newest checkpoint.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print the plan, and stop.")] = False
    own_code: OwnCode = False
    max_restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="If a rank is lost, restart all ranks and resume, up to N times.")
    ] = 0
    oversubscribe: Oversubscribe = False
    port: Port = 0
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print the result in full: every figure, and the stages of a step.")
    ] = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Options of `paceline eval`."""

    run: Run
    overrides: Overrides = field(default_factory=list)
    ranks: Ranks = "auto"
    checkpoint: Annotated[str, typer.Option(metavar="last|best|STEP", help="Checkpoint to evaluate.")] = "last"
    classes: Annotated[bool, typer.Option("--classes", help="Show the accuracy of every class.")] = False
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the confusion matrix and the worst images there.")
    ] = None
    own_code: OwnCode = False
    oversubscribe: Oversubscribe = False
    port: Port = 0
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Options of `paceline predict`."""

    run: Run
    images: Annotated[
        list[str], _argument(metavar="IMAGE|FOLDER|-", help="Files, folders, or - to read paths from stdin.")
    ] = field(default_factory=list)
    top: Annotated[int, typer.Option(min=1, help="Number of classes to print per image.")] = 5
    checkpoint: Annotated[str, typer.Option(metavar="last|best|STEP", help="Checkpoint to load.")] = "last"
    batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass.")] = 64
    format: Annotated[
        str, typer.Option(metavar="table|csv|jsonl", help="Output format (table on a terminal, else csv).")
    ] = "auto"
    device: Annotated[str, typer.Option(metavar="cpu|cuda|auto", help="Device to compute on.")] = "auto"
    own_code: OwnCode = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of `paceline export`."""

    run: Run
    out: Annotated[Path, typer.Option(metavar="PATH", help="File to write; for safetensors, a folder.")]
    format: Annotated[str, typer.Option(metavar="onnx|torch|safetensors|state_dict", help="Output format.")] = "onnx"
    checkpoint: Annotated[str, typer.Option(metavar="last|best|STEP", help="Checkpoint to export.")] = "last"
    with_preprocessing: Annotated[
        bool, typer.Option("--preprocessing", help="Accept uint8 images, and normalise them in the exported model.")
    ] = False
    image_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Height and width of its input images (those of the evaluation)."),
    ] = None
    own_code: OwnCode = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class RecipesOptions:
    """Options of `paceline recipes`."""

    args: Annotated[
        list[str], _argument(metavar="NAME|KEY=VALUE", help="Recipe to show (default: list all), and overrides.")
    ] = field(default_factory=list)
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value was set.")] = False
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a recipe, for editors.")] = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class DataInspectOptions:
    """Options of `paceline data inspect`."""

    src: Source = None
    overrides: Overrides = field(default_factory=list)
    inspect_all: Annotated[bool, typer.Option("--all", help="Inspect every image, not 2,000 per split.")] = False
    validation_only: Annotated[bool, typer.Option("--held-out", help="List the validation images, one per line.")] = (
        False
    )
    own_code: OwnCode = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class DataPackOptions:
    """Options of `paceline data pack`."""

    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="A folder of images, a .csv list, a .pack, or a recipe's name, file or run."
        ),
    ]
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write, or folder for shards or an LMDB.")]
    overrides: Overrides = field(default_factory=list)
    form: Annotated[str, typer.Option("--format", metavar="pack|lmdb", help="Output format.")] = "pack"
    resize: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="PX", help="Scale down images with longer short sides, and re-encode them as JPEG."
        ),
    ] = None
    quality: Annotated[
        int | None, typer.Option(min=1, max=100, help="Quality of those JPEGs (90).", show_default=False)
    ] = None
    shard_size: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Write a folder of files of at most this size, such as 1GB.")
    ] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing pack.")] = False
    workers: Workers = "auto"
    own_code: OwnCode = False
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
        typer.Argument(metavar="SRC WHERE [KEY=VALUE]", help="A data set, and a folder in memory or on a local disk."),
    ] = field(default_factory=list)
    remove: Annotated[bool, typer.Option("--remove", help="Remove the copies in WHERE, the only argument.")] = False
    own_code: OwnCode = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class DataVerifyOptions:
    """Options of `paceline data verify`."""

    args: Annotated[list[str], _argument(metavar="SRC|KEY=VALUE", help="SRC as for inspect, then overrides.")] = field(
        default_factory=list
    )
    against: Annotated[
        str | None, typer.Option(metavar="SRC", help="Source of the pack: check that both hold the same images.")
    ] = None
    workers: Workers = "auto"
    own_code: OwnCode = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class DataBenchOptions:
    """Options of `paceline data bench`."""

    src: Source = None
    overrides: Overrides = field(default_factory=list)
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds per measurement.")] = 2.0
    rounds: Annotated[int, typer.Option(min=1, help="How often to measure each, alternating.")] = 3
    images: Annotated[int, typer.Option(min=1, help="Maximum number of images, evenly spread.")] = 4096
    workers: Workers = "auto"
    packs: Annotated[bool, typer.Option("--pack/--no-pack", help="Also measure a temporary pack of the images.")] = True
    cold: Annotated[
        bool, typer.Option("--cold/--no-cold", help="Also measure reads from disk, without the page cache.")
    ] = True
    out: Annotated[Path | None, typer.Option(help="Folder to write bench.json to.")] = None
    own_code: OwnCode = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """Options of `paceline submit`."""

    args: Annotated[
        list[str],
        _argument(
            metavar="[VERB] RECIPE|KEY=VALUE [-- OPTIONS]",
            help="train (the default), eval, ladder, scale, tune or profile; its arguments; slurm.KEY=VALUE and "
            "kubernetes.KEY=VALUE for the site; after --, options of the verb.",
        ),
    ] = field(default_factory=list)
    engine: Annotated[
        str | None, typer.Option(metavar="slurm|kubernetes", help="Scheduler (slurm, if sbatch is installed).")
    ] = None
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs per node, with one rank each.")] = 0
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks per node (one per GPU, or one).")] = None
    site: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE", help="Settings of the cluster ($PACELINE_SITE, ~/.config/paceline/site.yaml)."
        ),
    ] = None
    run_dir: Annotated[Path | None, _folder_option(help="Run directory, on a file system that all nodes share.")] = None
    own_code: OwnCode = False
    array: Annotated[bool, typer.Option("--array", help="Run the tasks of a ladder or of scale as a job array.")] = (
        False
    )
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job, and exit with its code.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script; write and queue nothing.")] = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Options of `paceline doctor`."""

    args: RecipeArgs = field(default_factory=list)
    mtbf: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Mean time between failures, such as 8h, to advise how often to save."),
    ] = None
    ranks: Annotated[
        str | None, typer.Option(metavar="N|auto", help="Start this many ranks here, and check their communication.")
    ] = None
    run_dir: Annotated[Path | None, _folder_option(help="Folder that runs would be written to (runs/).")] = None
    own_code: OwnCode = False
    oversubscribe: Oversubscribe = False
    port: Port = 0
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Options of `paceline profile`."""

    args: RecipeArgs = field(default_factory=list)
    ranks: Ranks = "auto"
    run_dir: Annotated[Path | None, _folder_option(help="Folder to write (runs/profile-RECIPE-TIME).")] = None
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure after the measurement warm-up.")] = 40
    repeats: Annotated[int, typer.Option(min=1, help="How often to measure the run and each probe, alternating.")] = 1
    probes: Annotated[
        bool, typer.Option("--probes/--no-probes", help="Also measure runs with free data loading and the like.")
    ] = True
    trace: Annotated[bool, typer.Option("--trace", help="Write a Chrome trace of all ranks.")] = False
    nvtx: Annotated[bool, typer.Option("--nvtx", help="Mark stages for Nsight Systems, and print its command.")] = False
    vary: Annotated[
        list[str],
        typer.Option(metavar="KEY=V,V", help="Measure each of these values of a field instead, without probes."),
    ] = field(default_factory=list)
    own_code: OwnCode = False
    oversubscribe: Oversubscribe = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class LadderOptions:
    """Options of `paceline ladder`."""

    args: Annotated[
        list[str],
        _argument(
            metavar="LADDER|KEY=VALUE",
            help="A shipped ladder or a ladder file (default: auto), then overrides of its recipe.",
        ),
    ] = field(default_factory=list)
    ranks: Ranks = "auto"
    recipe: Annotated[str | None, typer.Option(help="Recipe to start from, instead of the ladder's.")] = None
    run_dir: Annotated[Path | None, _folder_option(help="Folder to write (runs/ladder-NAME-TIME).")] = None
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to measure per run (the ladder's).")] = None
    repeats: Annotated[int | None, typer.Option(min=1, help="Pairs of runs per rung (the ladder's).")] = None
    list_only: Annotated[bool, typer.Option("--list", help="List the ladders, or the rungs of one, and stop.")] = False
    task: Task = None
    own_code: OwnCode = False
    oversubscribe: Oversubscribe = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """Options of `paceline scale`; `scale_options.py` says which of its modes use which."""

    args: RecipeArgs = field(default_factory=list)
    ranks: Annotated[
        str | None, typer.Option(metavar="N,N|auto", help="Rank counts, per node; auto: 1, 2, 4 ... (auto).")
    ] = None
    nodes: Annotated[
        str | None, typer.Option(metavar="N,N", help="Node counts in a Slurm allocation, with --ranks on each node.")
    ] = None
    mode: Annotated[
        str | None,
        typer.Option(
            metavar="weak|strong", help="Keep the batch size per rank (weak) or in total (strong); default weak."
        ),
    ] = None
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to measure after the measurement warm-up (40).")] = (
        None
    )
    repeats: Annotated[int | None, typer.Option(min=1, help="How often to measure each, alternating (3).")] = None
    accuracy: Annotated[bool, typer.Option("--accuracy", help="Train full runs, and report their accuracy.")] = False
    batch_sizes: Annotated[
        str | None, _study_option(metavar="N,N", help="Study batch sizes: full runs at each of these.")
    ] = None
    warmups: Annotated[str | None, _study_option(metavar="0ep,5ep", help="LR warm-ups to study.")] = None
    lr_rules: Annotated[
        str | None, _study_option(metavar="none,sqrt,linear", help="Learning-rate scaling rules to study.")
    ] = None
    target: Annotated[float | None, _study_option(metavar="TOP1", help="Target accuracy (the recipe's own).")] = None
    seeds: Annotated[int | None, typer.Option(min=1, help="Full runs of each (3).")] = None
    run_dir: Annotated[
        Path | None, _folder_option(help="Folder to write (runs/scale-RECIPE-TIME; for predictions, none).")
    ] = None
    task: Task = None
    own_code: OwnCode = False
    predict: Annotated[bool, _predict_option("--predict", help="Predict, from a run directory or from --points.")] = (
        False
    )
    points: Annotated[
        Path | None, _predict_option(metavar="CSV", help="Columns ranks,nodes,rank_batch,images,time_s.")
    ] = None
    at: Annotated[str | None, _predict_option(metavar="N,N", help="Rank counts to predict (8 to 4096).")] = None
    ranks_per_node: Annotated[
        int | None, _predict_option(min=1, metavar="N", help="Ranks per node (8; for a table, as in it).")
    ] = None
    rank_batch: Annotated[
        int | None, _predict_option(min=1, metavar="N", help="Images per rank and step (as measured).")
    ] = None
    images: Annotated[
        float | None,
        _predict_option(metavar="N", help="Images of the full run (one epoch of RUN; for a table, its largest point)."),
    ] = None
    epochs: Annotated[
        float | None, _predict_option(metavar="N", help="Length in epochs of RUN's data, instead of --images.")
    ] = None
    network: Annotated[
        str | None,
        _predict_option(
            metavar="NAME|FILE", help="Network such as ndr, hdr, 100gbe; or a file written by --collective --out."
        ),
    ] = None
    alpha_us: Annotated[float | None, _predict_option(metavar="US", help="Latency per message in microseconds.")] = None
    gigabytes_per_s: Annotated[float | None, _predict_option(metavar="GB/S", help="Network bandwidth per node.")] = None
    fixed_s: Annotated[
        float | None, _predict_option(metavar="S", help="Seconds of a run outside its steps (as measured).")
    ] = None
    price: Annotated[float | None, _predict_option(metavar="MONEY", help="Price per rank-hour.")] = None
    alone: Annotated[
        Path | None, _predict_option(metavar="RUN", help="A single-rank run with the same rank batch.")
    ] = None
    collective: Annotated[bool, _collective_option("--collective", help="Time all-reduces between --ranks.")] = False
    out: Annotated[
        Path | None,
        _collective_option(metavar="FILE", help="Output file for --collective; can be passed to --network."),
    ] = None
    oversubscribe: Oversubscribe = False
    as_json: AsJson = False

    @property
    def rank_counts(self) -> str:
        """`--ranks`, or auto if omitted."""
        return self.ranks or "auto"

    @property
    def is_study(self) -> bool:
        """Whether batch sizes are studied, not ranks."""
        return any(axis is not None for axis in (self.batch_sizes, self.warmups, self.lr_rules))

    @property
    def trains_fully(self) -> bool:
        """Whether runs train to the end."""
        return self.is_study or self.accuracy

    @property
    def num_steps(self) -> int:
        """Counted steps of a short run."""
        return 40 if self.steps is None else self.steps

    @property
    def num_repeats(self) -> int:
        """Number of runs per case: one per seed for full runs, else repeats."""
        given = self.seeds if self.trains_fully else self.repeats
        return 3 if given is None else given


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Options of `paceline tune`."""

    args: RecipeArgs = field(default_factory=list)
    ranks: Ranks = "auto"
    run_dir: Annotated[Path | None, _folder_option(help="Folder to write (runs/tune-RECIPE-TIME).")] = None
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure in the shortest runs.")] = 20
    repeats: Annotated[int, typer.Option(min=1, help="Pairs of runs that decide whether a setting stays.")] = 3
    vary: Annotated[
        list[str], typer.Option(metavar="KEY=V,V", help="Search only these values of a field; can be repeated.")
    ] = field(default_factory=list)
    allow_batch: Annotated[
        bool, typer.Option("--allow-batch", help="Also try other batch sizes, and scale the learning rate.")
    ] = False
    budget: Annotated[int | None, typer.Option(min=1, metavar="N", help="Maximum number of runs.")] = None
    own_code: OwnCode = False
    oversubscribe: Oversubscribe = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of `paceline compare`."""

    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run directories; runs that differ only in their seed form one group."),
    ]
    target: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="Target accuracy (the recipes' own, else one that all runs reach that learned)."
        ),
    ] = None
    metric: Annotated[str, typer.Option(metavar="top1|top5|mean_class_accuracy", help="Accuracy to compare.")] = "top1"
    fail_below: Annotated[
        list[str],
        typer.Option(
            metavar="[METRIC=]VALUE",
            help="Exit with code 1 if a group's speedup (without METRIC), gap, images_per_s or the --metric, such as "
            "top1=0.75, is lower; can be repeated.",
        ),
    ] = field(default_factory=list)
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the comparison as .html, .md or .json.")
    ] = None
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of `paceline report`."""

    run: Run
    format: Annotated[str, typer.Option(metavar="html|md|json", help="Output format.")] = "html"
    out: Annotated[Path | None, typer.Option(help="Output file (RUN/report.html; for md and json, stdout).")] = None
    follow: Annotated[
        bool, typer.Option("--follow", help="Serve the page on 127.0.0.1 and update it while the run trains; no file.")
    ] = False
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of --follow (a free one).", show_default=False)
    ] = None
    as_json: AsJson = False


JOB_VERBS: Final[dict[str, type]] = {
    "train": TrainOptions,
    "eval": EvalOptions,
    "ladder": LadderOptions,
    "scale": ScaleOptions,
    "tune": TuneOptions,
    "profile": ProfileOptions,
}
"""Verbs that a job of `paceline submit` can run, and their options."""
