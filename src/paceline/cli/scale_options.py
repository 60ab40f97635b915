"""Declare `paceline scale` and its four modes, and refuse options that the selected mode would ignore."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from paceline.cli.options import JsonOption, OversubscribeOption, OwnCodeOption, RecipeArgs, TaskOption, folder_option
from paceline.core.errors import RecipeError


class _ScaleMode(StrEnum):
    """Mode of `paceline scale`; the value is its name in messages."""

    RANKS = "measuring"
    POINTS = "--predict --points"
    RUN = "--predict RUN"
    COLLECTIVE = "--collective"


_STUDY_PANEL: Final = "Batch-size study"
_PREDICT_PANEL: Final = "Prediction"
_COLLECTIVE_PANEL: Final = "Collectives"
_PREDICTION_MODES: Final = (_ScaleMode.POINTS, _ScaleMode.RUN)
# The modes that use an option which not all modes use.
_OPTION_MODES: Final[Mapping[str, tuple[_ScaleMode, ...]]] = {
    **dict.fromkeys(("--ranks", "--oversubscribe"), (_ScaleMode.RANKS, _ScaleMode.COLLECTIVE)),
    **dict.fromkeys(("--nodes", "--mode", "--steps", "--repeats", "--accuracy"), (_ScaleMode.RANKS,)),
    **dict.fromkeys(("--batch-sizes", "--warmups", "--lr-rules", "--target", "--seeds"), (_ScaleMode.RANKS,)),
    "--task": (_ScaleMode.RANKS,),
    "--own-code": (_ScaleMode.RANKS,),
    "--run-dir": (_ScaleMode.RANKS, *_PREDICTION_MODES),
    **dict.fromkeys(("--at", "--ranks-per-node", "--rank-batch", "--images", "--price"), _PREDICTION_MODES),
    **dict.fromkeys(("--network", "--alpha-us", "--gigabytes-per-s", "--fixed-s"), (_ScaleMode.RUN,)),
    **dict.fromkeys(("--epochs", "--alone"), (_ScaleMode.RUN,)),
    "--out": (_ScaleMode.COLLECTIVE,),
}
_MEASURE_OPTIONS: Final = frozenset(option for option, modes in _OPTION_MODES.items() if _ScaleMode.RANKS in modes)

ScaleRanks = Annotated[
    str | None, typer.Option(metavar="N,N|auto", help="Rank counts, per node; auto: 1, 2, 4 ... (auto).")
]
Nodes = Annotated[
    str | None, typer.Option(metavar="N,N", help="Node counts in a Slurm allocation, with --ranks on each node.")
]
ModeOption = Annotated[
    str | None,
    typer.Option(metavar="weak|strong", help="Keep the batch size per rank (weak) or in total (strong); default weak."),
]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps to measure after the measurement warm-up (40).")]
Repeats = Annotated[int | None, typer.Option(min=1, help="How often to measure each, alternating (3).")]
Accuracy = Annotated[bool, typer.Option("--accuracy", help="Train full runs, and report their accuracy.")]
BatchSizes = Annotated[
    str | None,
    typer.Option(metavar="N,N", help="Study batch sizes: full runs at each of these.", rich_help_panel=_STUDY_PANEL),
]
Warmups = Annotated[
    str | None, typer.Option(metavar="0ep,5ep", help="LR warm-ups to study.", rich_help_panel=_STUDY_PANEL)
]
LrRules = Annotated[
    str | None,
    typer.Option(
        metavar="none,sqrt,linear", help="Learning-rate scaling rules to study.", rich_help_panel=_STUDY_PANEL
    ),
]
TargetOption = Annotated[
    float | None,
    typer.Option(metavar="TOP1", help="Target accuracy (the recipe's own).", rich_help_panel=_STUDY_PANEL),
]
Seeds = Annotated[int | None, typer.Option(min=1, help="Full runs of each (3).")]
ScaleRunDir = Annotated[Path | None, folder_option("Folder to write (runs/scale-RECIPE-TIME; for predictions, none).")]
PredictFlag = Annotated[
    bool,
    typer.Option("--predict", help="Predict, from a run directory or from --points.", rich_help_panel=_PREDICT_PANEL),
]
Points = Annotated[
    Path | None,
    typer.Option(metavar="CSV", help="Columns ranks,nodes,rank_batch,images,time_s.", rich_help_panel=_PREDICT_PANEL),
]
PredictAt = Annotated[
    str | None, typer.Option(metavar="N,N", help="Rank counts to predict (8 to 4096).", rich_help_panel=_PREDICT_PANEL)
]
RanksPerNode = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Ranks per node (8; for a table, as in it).", rich_help_panel=_PREDICT_PANEL),
]
RankBatch = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Images per rank and step (as measured).", rich_help_panel=_PREDICT_PANEL),
]
Images = Annotated[
    float | None,
    typer.Option(
        metavar="N",
        help="Images of the full run (one epoch of RUN; for a table, its largest point).",
        rich_help_panel=_PREDICT_PANEL,
    ),
]
Epochs = Annotated[
    float | None,
    typer.Option(
        metavar="N", help="Length in epochs of RUN's data, instead of --images.", rich_help_panel=_PREDICT_PANEL
    ),
]
NetworkOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="Network such as ndr, hdr, 100gbe; or a file written by --collective --out.",
        rich_help_panel=_PREDICT_PANEL,
    ),
]
Alpha = Annotated[
    float | None,
    typer.Option(metavar="US", help="Latency per message in microseconds.", rich_help_panel=_PREDICT_PANEL),
]
Bandwidth = Annotated[
    float | None, typer.Option(metavar="GB/S", help="Network bandwidth per node.", rich_help_panel=_PREDICT_PANEL)
]
Fixed = Annotated[
    float | None,
    typer.Option(metavar="S", help="Seconds of a run outside its steps (as measured).", rich_help_panel=_PREDICT_PANEL),
]
Price = Annotated[
    float | None, typer.Option(metavar="MONEY", help="Price per rank-hour.", rich_help_panel=_PREDICT_PANEL)
]
SingleRankRun = Annotated[
    Path | None,
    typer.Option(metavar="RUN", help="A single-rank run with the same rank batch.", rich_help_panel=_PREDICT_PANEL),
]
CollectiveFlag = Annotated[
    bool, typer.Option("--collective", help="Time all-reduces between --ranks.", rich_help_panel=_COLLECTIVE_PANEL)
]
OutFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Output file for --collective; can be passed to --network.",
        rich_help_panel=_COLLECTIVE_PANEL,
    ),
]


def scale(
    args: RecipeArgs = None,
    ranks: ScaleRanks = None,
    nodes: Nodes = None,
    mode: ModeOption = None,
    steps: Steps = None,
    repeats: Repeats = None,
    accuracy: Accuracy = False,
    batch_sizes: BatchSizes = None,
    warmups: Warmups = None,
    lr_rules: LrRules = None,
    target: TargetOption = None,
    seeds: Seeds = None,
    run_dir: ScaleRunDir = None,
    task: TaskOption = None,
    own_code: OwnCodeOption = False,
    predict: PredictFlag = False,
    points: Points = None,
    at: PredictAt = None,
    ranks_per_node: RanksPerNode = None,
    rank_batch: RankBatch = None,
    images: Images = None,
    epochs: Epochs = None,
    network: NetworkOption = None,
    alpha_us: Alpha = None,
    gigabytes_per_s: Bandwidth = None,
    fixed_s: Fixed = None,
    price: Price = None,
    alone: SingleRankRun = None,
    collective: CollectiveFlag = False,
    out: OutFile = None,
    oversubscribe: OversubscribeOption = False,
    as_json: JsonOption = False,
) -> int:
    """Measure how a recipe scales over ranks, nodes and batch sizes, or predict it."""
    given = dict(locals())
    for name in ("args", "predict", "points", "collective", "as_json"):
        del given[name]
    return _run_mode(
        _select_mode(args or [], points, predict=predict, collective=collective), args or [], points, given, as_json
    )


def _select_mode(args: list[str], points: Path | None, *, predict: bool, collective: bool) -> _ScaleMode:
    """Return the mode. Raise `RecipeError` if the arguments contradict each other."""
    if collective and (predict or points is not None or args):
        raise RecipeError("--collective: times all-reduces, with neither a recipe nor --predict (leave those out)")
    if points is not None and not predict:
        raise RecipeError(f"--points: {points} is input for a prediction (add --predict)")
    if points is not None and args:
        raise RecipeError(f"--points: {points} and {args[0]} are both inputs for a prediction (leave one out)")
    if predict and points is None and len(args) != 1:
        raise RecipeError("--predict: needs a run (write paceline scale RUN --predict, or --points CSV)")
    if collective:
        return _ScaleMode.COLLECTIVE
    if not predict:
        return _ScaleMode.RANKS
    return _ScaleMode.RUN if points is None else _ScaleMode.POINTS


def _run_mode(
    scale_mode: _ScaleMode, args: list[str], points: Path | None, given: dict[str, Any], as_json: bool
) -> int:
    options = _check_options(scale_mode, given)
    match scale_mode:
        case _ScaleMode.COLLECTIVE:
            from paceline.cli.allreduce import time_allreduce

            ranks, oversubscribe = options.get("ranks", "auto"), options.get("oversubscribe", False)
            return time_allreduce(ranks, options.get("out"), as_json=as_json, oversubscribe=oversubscribe)
        case _ScaleMode.POINTS:
            from paceline.cli.scale_predict import predict_points

            assert points is not None
            return predict_points(points, **options, as_json=as_json)
        case _ScaleMode.RUN:
            from paceline.cli.scale_predict import predict_run

            return predict_run(Path(args[0]), **options, as_json=as_json)
        case _ScaleMode.RANKS:
            from paceline.cli.scale import scale as measure

            return measure(args, **_with_defaults(given, options), as_json=as_json)


def measuring_options(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a scaling or batch-size study by name.

    `given` are all parameters of the verb. Raise `RecipeError` if they select another mode.
    """
    args, points = given["args"] or [], given["points"]
    scale_mode = _select_mode(args, points, predict=given["predict"], collective=given["collective"])
    if scale_mode != _ScaleMode.RANKS:
        raise RecipeError(f"{scale_mode}: has no tasks (start it by itself)")
    options = {name: value for name, value in given.items() if f"--{name.replace('_', '-')}" in _OPTION_MODES}
    return _with_defaults(options, _check_options(scale_mode, options))


def _with_defaults(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return `options` of a measuring study, with defaults for those left out."""
    defaults: dict[str, Any] = {name: None for name in given if f"--{name.replace('_', '-')}" in _MEASURE_OPTIONS}
    return defaults | {"ranks": "auto", "accuracy": False, "own_code": False, "oversubscribe": False} | options


def _check_options(scale_mode: _ScaleMode, given: dict[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in given.items() if value is not None and value is not False}
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if scale_mode not in _OPTION_MODES[option]:
            needs = " or ".join(each for each in _OPTION_MODES[option])
            raise RecipeError(f"{option}: {value} has no effect in this mode (leave it out; it is for {needs})")
    return options
