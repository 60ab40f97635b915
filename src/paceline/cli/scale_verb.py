"""`paceline scale`: measure ranks, study batches, time collectives, or predict what nobody has started.

One verb for four questions; here is which of them is asked, and that no option is given that it does not hear.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from paceline.cli.arguments import Json, Oversubscribe, OwnCode, TaskNumber, Words, new_folder
from paceline.core.errors import RecipeError


class _Question(StrEnum):
    """What is asked, as it is told in messages."""

    RANKS = "measuring"
    POINTS = "--predict --points"
    RUN = "--predict RUN"
    COLLECTIVE = "--collective"


_STUDYING: Final = "A study of batches"
_PREDICTING: Final = "Predicting"
_TIMING: Final = "Timing messages"
_OF_BOTH: Final = (_Question.POINTS, _Question.RUN)
# Which questions hear an option that not all of them do.
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

Ranks = Annotated[str | None, typer.Option(metavar="N,N|auto", help="Ranks, of each node; auto: 1, 2, 4 ... (auto).")]
Nodes = Annotated[str | None, typer.Option(metavar="N,N", help="Nodes of a Slurm allocation, with --ranks on each.")]
Mode = Annotated[str | None, typer.Option(metavar="weak|strong", help="Same batch a rank, or in all (weak).")]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps after the warm-up that are measured (40).")]
Repeats = Annotated[int | None, typer.Option(min=1, help="How often each is measured, in turns (3).")]
Accuracy = Annotated[bool, typer.Option("--accuracy", help="Train whole runs, and say how accurate they become.")]
Batches = Annotated[
    str | None,
    typer.Option(metavar="N,N", help="Study batches: whole runs at each of these sizes.", rich_help_panel=_STUDYING),
]
Warmups = Annotated[str | None, typer.Option(metavar="0ep,5ep", help="Warm-ups to study.", rich_help_panel=_STUDYING)]
Rules = Annotated[
    str | None,
    typer.Option(metavar="none,sqrt,linear", help="Rules for the learning rate to study.", rich_help_panel=_STUDYING),
]
Target = Annotated[
    float | None,
    typer.Option(metavar="TOP1", help="Accuracy to train to (the recipe's own).", rich_help_panel=_STUDYING),
]
Seeds = Annotated[int | None, typer.Option(min=1, help="Whole runs of each (3).")]
Where = Annotated[Path | None, new_folder("Where it is written (runs/scale-RECIPE-TIME; of a prediction nowhere).")]
Predict = Annotated[
    bool, typer.Option("--predict", help="Predict, from a run directory or from --points.", rich_help_panel=_PREDICTING)
]
Points = Annotated[
    Path | None,
    typer.Option(metavar="CSV", help="Columns ranks,nodes,rank_batch,images,time_s.", rich_help_panel=_PREDICTING),
]
At = Annotated[
    str | None, typer.Option(metavar="N,N", help="Ranks to predict (8 to 4096).", rich_help_panel=_PREDICTING)
]
PerNode = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Ranks of a node (8; of a table as it has).", rich_help_panel=_PREDICTING),
]
RankBatch = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Images of a rank and step (as measured).", rich_help_panel=_PREDICTING),
]
Images = Annotated[
    float | None,
    typer.Option(
        metavar="N",
        help="Images of the whole run (one epoch of the run; of a table: its largest point).",
        rich_help_panel=_PREDICTING,
    ),
]
Epochs = Annotated[
    float | None, typer.Option(metavar="N", help="Or epochs of the run's own data.", rich_help_panel=_PREDICTING)
]
Network = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="Such as ndr, hdr, 100gbe; or what --collective --out wrote.",
        rich_help_panel=_PREDICTING,
    ),
]
Alpha = Annotated[
    float | None, typer.Option(metavar="US", help="Microseconds a message takes.", rich_help_panel=_PREDICTING)
]
Bandwidth = Annotated[
    float | None, typer.Option(metavar="GB/S", help="What the network gives a node.", rich_help_panel=_PREDICTING)
]
Fixed = Annotated[
    float | None,
    typer.Option(metavar="S", help="Seconds of a run without any step (as measured).", rich_help_panel=_PREDICTING),
]
Price = Annotated[
    float | None, typer.Option(metavar="MONEY", help="Of an hour of a rank.", rich_help_panel=_PREDICTING)
]
Alone = Annotated[
    Path | None,
    typer.Option(metavar="RUN", help="A run of one rank with the same rank batch.", rich_help_panel=_PREDICTING),
]
Collective = Annotated[
    bool, typer.Option("--collective", help="Time all-reduces between --ranks.", rich_help_panel=_TIMING)
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Where --collective writes what --network reads.", rich_help_panel=_TIMING),
]


def scale(
    words: Words = None,
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
    """Measure how a recipe scales over ranks, nodes and batches, or predict it."""
    given = dict(locals())
    for name in ("words", "predict", "points", "collective", "as_json"):
        del given[name]
    return _answer(
        _question(words or [], points, predict=predict, collective=collective), words or [], points, given, as_json
    )


def _question(words: list[str], points: Path | None, *, predict: bool, collective: bool) -> _Question:
    """Return what is asked. Raise `RecipeError` where it cannot be told."""
    if collective and (predict or points is not None or words):
        raise RecipeError("--collective: times messages, with neither a recipe nor --predict (leave those out)")
    if points is not None and not predict:
        raise RecipeError(f"--points: {points} is to predict from (add --predict)")
    if points is not None and words:
        raise RecipeError(f"--points: {points} and {words[0]} are both to predict from (leave one out)")
    if predict and points is None and len(words) != 1:
        raise RecipeError(
            "--predict: needs a run to predict from (write paceline scale RUN --predict, or --points CSV)"
        )
    if collective:
        return _Question.COLLECTIVE
    if not predict:
        return _Question.RANKS
    return _Question.RUN if points is None else _Question.POINTS


def _answer(question: _Question, words: list[str], points: Path | None, given: dict[str, Any], as_json: bool) -> int:
    """Do what was asked, with the options that were given; return the exit code."""
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

            return predict_run(Path(words[0]), **options, as_json=as_json)
        case _Question.RANKS:
            from paceline.cli.scale import scale as measure

            return measure(words, **_measuring(given, options), as_json=as_json)


def measuring_options(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a scaling study, or of a study of batches, by name, all others left out.

    `given` are all of the verb's, as they were read. Raise `RecipeError` where they ask for anything else.
    """
    words, points = given["words"] or [], given["points"]
    question = _question(words, points, predict=given["predict"], collective=given["collective"])
    if question != _Question.RANKS:
        raise RecipeError(f"{question}: is one run, which has no tasks (start it by itself)")
    options = {name: value for name, value in given.items() if f"--{name.replace('_', '-')}" in _HEARD}
    return _measuring(options, _heard(question, options))


def _measuring(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return what the measuring verb takes: the `options` that were given, and for the others what says nothing."""
    unsaid: dict[str, Any] = {name: None for name in given if f"--{name.replace('_', '-')}" in _MEASURING}
    return unsaid | {"ranks": "auto", "accuracy": False, "own_code": False, "oversubscribe": False} | options


def _heard(question: _Question, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given. Raise `RecipeError` for one that the question does not hear."""
    options = {name: value for name, value in given.items() if value is not None and value is not False}
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if question not in _HEARD[option]:
            needs = " or ".join(each for each in _HEARD[option])
            raise RecipeError(f"{option}: {value} has no effect here (leave it out; it is for {needs})")
    return options
