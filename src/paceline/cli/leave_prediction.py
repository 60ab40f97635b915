"""Print a prediction, and write it to a folder like other experiments."""

import dataclasses
import sys
from pathlib import Path

from paceline.cli.experiment import finish_experiment, locked_experiment
from paceline.cli.show_prediction import show_prediction
from paceline.core.experiments.prediction import PredictionResult
from paceline.data.sources.places import printable
from paceline.lab.predict.asked import PredictionRequest


def output_prediction(
    result: PredictionResult, request: PredictionRequest, run_dir: Path | None, *, as_json: bool
) -> None:
    """Print the prediction and, with `run_dir`, write it there.

    Raise `RecipeError` if that folder holds something else.
    """
    result = result.model_copy(update={"command": ("paceline", *sys.argv[1:])})
    out = sys.stderr if as_json else sys.stdout
    if run_dir is not None:
        fields = {
            "source": result.source,
            "network": result.network,
            **dataclasses.asdict(request),
            "at": [*request.at],
        }
        whole = {"experiment": "prediction", **fields}
        with locked_experiment("prediction", whole, run_dir, as_json=as_json) as folder:
            finish_experiment(folder, result)
    show_prediction(result, as_json=as_json)
    if run_dir is not None:
        print(f"folder: {printable(run_dir)}", file=out)
