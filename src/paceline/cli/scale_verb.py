"""`paceline scale`: measure scaling, study batch sizes, time collectives, or predict.

One verb has four modes. This module selects the mode and refuses options that it does not use.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from paceline.cli.arguments import Json, Oversubscribe, OwnCode, TaskNumber, Words, new_folder
from paceline.core.errors import RecipeError


class _Question(StrEnum):
    """Mode of `paceline scale`; the value is its name in messages."""

    RANKS = "measuring"
    POINTS = "--predict --points"
    RUN = "--predict RUN"
    COLLECTIVE = "--collective"


_STUDYING: Final = "Batch-size study"
_PREDICTING: Final = "Prediction"
_TIMING: Final = "Collectives"
_OF_BOTH: Final = (_Question.POINTS, _Question.RUN)
# The modes that use an option which not all modes use.
_HEARD: Final[Mapping[str, tuple[_Question, ...]]] = {
    **dict.fromkeys(("--ranks", "--oversubscribe"), (_Question.RANKS, _Question.COLLECTIVE)),
    **dict.fromkeys(("--nodes", "--mode", "--steps", "--repeats", "--accuracy"), (_Question.RANKS,)),
    **dict.fromkeys(("--batch-sizes", "--warmups", "--lr-rules", "--target", "--seeds"), (_Question.RANKS,)),
    "--task": (_Question.RANKS,),
    "--own-code": (_Question.RANKS,),
    "--run-dir": (_Question.RANKS, *_OF_BOTH),
    **dict.fromkeys(("--at", "--ranks-per-node", "--rank-batch", "--images", "--price"), _OF_BOTH),
    **dict.fromkeys(("--network", "--alpha-us", "--gigabytes-per-s", "--fixed-s"), (_Question.RUN,)),
    **dict.fromkeys(("--epochs", "--alone"), (_Question.RUN,)),
    "--out": (_Question.COLLECTIVE,),
}
_MEASURING: Final = frozenset(option for option, heard in _HEARD.items() if _Question.RANKS in heard)

Ranks = Annotated[str | None, typer.Option(metavar="N,N|auto", help="Rank counts, per node; auto: 1, 2, 4 ... (auto).")]
Nodes = Annotated[
    str | None, typer.Option(metavar="N,N", help="Node counts in a Slurm allocation, with --ranks on each node.")
]
Mode = Annotated[
    str | None,
    typer.Option(metavar="weak|strong", help="Keep the batch size per rank (weak) or in total (strong); default weak."),
]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps to measure after the measurement warm-up (40).")]
Repeats = Annotated[int | None, typer.Option(min=1, help="How often to measure each, alternating (3).")]
Accuracy = Annotated[bool, typer.Option("--accuracy", help="Train full runs, and report their accuracy.")]
Batches = Annotated[
    str | None,
    typer.Option(metavar="N,N", help="Study batch sizes: full runs at each of these.", rich_help_panel=_STUDYING),
]
Warmups = Annotated[
    str | None, typer.Option(metavar="0ep,5ep", help="LR warm-ups to study.", rich_help_panel=_STUDYING)
]
Rules = Annotated[
    str | None,
    typer.Option(metavar="none,sqrt,linear", help="Learning-rate scaling rules to study.", rich_help_panel=_STUDYING),
]
Target = Annotated[
    float | None,
    typer.Option(metavar="TOP1", help="Target accuracy (the recipe's own).", rich_help_panel=_STUDYING),
]
Seeds = Annotated[int | None, typer.Option(min=1, help="Full runs of each (3).")]
Where = Annotated[Path | None, new_folder("Folder to write (runs/scale-RECIPE-TIME; for predictions, none).")]
Predict = Annotated[
    bool, typer.Option("--predict", help="Predict, from a run directory or from --points.", rich_help_panel=_PREDICTING)
]
Points = Annotated[
    Path | None,
    typer.Option(metavar="CSV", help="Columns ranks,nodes,rank_batch,images,time_s.", rich_help_panel=_PREDICTING),
]
At = Annotated[
    str | None, typer.Option(metavar="N,N", help="Rank counts to predict (8 to 4096).", rich_help_panel=_PREDICTING)
]
PerNode = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Ranks per node (8; for a table, as in it).", rich_help_panel=_PREDICTING),
]
RankBatch = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Images per rank and step (as measured).", rich_help_panel=_PREDICTING),
]
Images = Annotated[
    float | None,
    typer.Option(
        metavar="N",
        help="Images of the full run (one epoch of RUN; for a table, its largest point).",
        rich_help_panel=_PREDICTING,
    ),
]
Epochs = Annotated[
    float | None,
    typer.Option(metavar="N", help="Length in epochs of RUN's data, instead of --images.", rich_help_panel=_PREDICTING),
]
Network = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="Network such as ndr, hdr, 100gbe; or a file written by --collective --out.",
        rich_help_panel=_PREDICTING,
    ),
]
Alpha = Annotated[
    float | None, typer.Option(metavar="US", help="Latency per message in microseconds.", rich_help_panel=_PREDICTING)
]
Bandwidth = Annotated[
    float | None, typer.Option(metavar="GB/S", help="Network bandwidth per node.", rich_help_panel=_PREDICTING)
]
Fixed = Annotated[
    float | None,
    typer.Option(metavar="S", help="Seconds of a run outside its steps (as measured).", rich_help_panel=_PREDICTING),
]
Price = Annotated[float | None, typer.Option(metavar="MONEY", help="Price per rank-hour.", rich_help_panel=_PREDICTING)]
Alone = Annotated[
    Path | None,
    typer.Option(metavar="RUN", help="A single-rank run with the same rank batch.", rich_help_panel=_PREDICTING),
]
Collective = Annotated[
    bool, typer.Option("--collective", help="Time all-reduces between --ranks.", rich_help_panel=_TIMING)
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Output file for --collective; can be passed to --network.", rich_help_panel=_TIMING
    ),
]


def scale(
    args: Words = None,
    ranks: Ranks = None,
    nodes: Nodes = None,
    mode: Mode = None,
    steps: Steps = None,
    repeats: Repeats = None,
    accuracy: Accuracy = False,
    batch_sizes: Batches = None,
    warmups: Warmups = None,
    lr_rules: Rules = None,
    target: Target = None,
    seeds: Seeds = None,
    run_dir: Where = None,
    task: TaskNumber = None,
    own_code: OwnCode = False,
    predict: Predict = False,
    points: Points = None,
    at: At = None,
    ranks_per_node: PerNode = None,
    rank_batch: RankBatch = None,
    images: Images = None,
    epochs: Epochs = None,
    network: Network = None,
    alpha_us: Alpha = None,
    gigabytes_per_s: Bandwidth = None,
    fixed_s: Fixed = None,
    price: Price = None,
    alone: Alone = None,
    collective: Collective = False,
    out: Out = None,
    oversubscribe: Oversubscribe = False,
    as_json: Json = False,
) -> int:
    """Measure how a recipe scales over ranks, nodes and batch sizes, or predict it."""
    given = dict(locals())
    for name in ("args", "predict", "points", "collective", "as_json"):
        del given[name]
    return _answer(
        _question(args or [], points, predict=predict, collective=collective), args or [], points, given, as_json
    )


def _question(args: list[str], points: Path | None, *, predict: bool, collective: bool) -> _Question:
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
        return _Question.COLLECTIVE
    if not predict:
        return _Question.RANKS
    return _Question.RUN if points is None else _Question.POINTS


def _answer(question: _Question, args: list[str], points: Path | None, given: dict[str, Any], as_json: bool) -> int:
    """Run the mode with the given options, and return the exit code."""
    options = _heard(question, given)
    match question:
        case _Question.COLLECTIVE:
            from paceline.cli.collective import collective

            ranks, oversubscribe = options.get("ranks", "auto"), options.get("oversubscribe", False)
            return collective(ranks, options.get("out"), as_json=as_json, oversubscribe=oversubscribe)
        case _Question.POINTS:
            from paceline.cli.predict_scale import predict_points

            assert points is not None
            return predict_points(points, **options, as_json=as_json)
        case _Question.RUN:
            from paceline.cli.predict_run import predict_run

            return predict_run(Path(args[0]), **options, as_json=as_json)
        case _Question.RANKS:
            from paceline.cli.scale import scale as measure

            return measure(args, **_measuring(given, options), as_json=as_json)


def measuring_options(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a scaling or batch-size study by name, all others removed.

    `given` are all parameters of the verb. Raise `RecipeError` if they select another mode.
    """
    args, points = given["args"] or [], given["points"]
    question = _question(args, points, predict=given["predict"], collective=given["collective"])
    if question != _Question.RANKS:
        raise RecipeError(f"{question}: has no tasks (start it by itself)")
    options = {name: value for name, value in given.items() if f"--{name.replace('_', '-')}" in _HEARD}
    return _measuring(options, _heard(question, options))


def _measuring(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the measuring verb: `options`, and defaults for those left out."""
    unsaid: dict[str, Any] = {name: None for name in given if f"--{name.replace('_', '-')}" in _MEASURING}
    return unsaid | {"ranks": "auto", "accuracy": False, "own_code": False, "oversubscribe": False} | options


def _heard(question: _Question, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given. Raise `RecipeError` for one that the mode does not use."""
    options = {name: value for name, value in given.items() if value is not None and value is not False}
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if question not in _HEARD[option]:
            needs = " or ".join(each for each in _HEARD[option])
            raise RecipeError(f"{option}: {value} has no effect in this mode (leave it out; it is for {needs})")
    return options
