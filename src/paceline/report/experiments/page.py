"""Build the page of any experiment."""

from paceline.core.experiments.folder import Experiment, ExperimentDir
from paceline.core.experiments.ladder import LadderResult
from paceline.core.experiments.prediction import PredictionResult
from paceline.core.experiments.scaling import ScaleResult
from paceline.core.experiments.sweep import SweepResult
from paceline.core.experiments.tuning import TuneResult
from paceline.report.blocks import Page
from paceline.report.experiments.batches import batches_page
from paceline.report.experiments.frame import Told
from paceline.report.experiments.ladder import ladder_page
from paceline.report.experiments.prediction import prediction_page
from paceline.report.experiments.scaling import scale_page
from paceline.report.experiments.sweep import sweep_page
from paceline.report.experiments.tuning import tune_page
from paceline.report.files import Reader

_LONGEST_RECIPE = 256 << 10


def experiment_page(folder: ExperimentDir, result: Experiment) -> Page:
    """Return the report of an experiment's result; of its folder, read only the recipe, if it has one."""
    reader = Reader()
    recipe = reader.text(folder.recipe, _LONGEST_RECIPE)
    report = Told(folder.path, recipe, reader.problems)
    match result:
        case LadderResult():
            return ladder_page(report, result)
        case ScaleResult(mode="batch"):
            return batches_page(report, result)
        case ScaleResult():
            return scale_page(report, result)
        case PredictionResult():
            return prediction_page(report, result)
        case TuneResult():
            return tune_page(report, result)
        case SweepResult():
            return sweep_page(report, result)
