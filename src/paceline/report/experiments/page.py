"""Build the page of any experiment."""

from paceline.core.experiments.folder import Experiment, ExperimentDir
from paceline.core.experiments.ladder import LadderResult
from paceline.core.experiments.prediction import PredictionResult
from paceline.core.experiments.scaling import ScaleResult
from paceline.core.experiments.sweep import SweepResult
from paceline.core.experiments.tuning import TuneResult
from paceline.report.blocks import ReportPage
from paceline.report.experiments.batches import build_batch_page
from paceline.report.experiments.frame import ExperimentReport
from paceline.report.experiments.ladder import build_ladder_page
from paceline.report.experiments.prediction import build_prediction_page
from paceline.report.experiments.scaling import build_scaling_page
from paceline.report.experiments.sweep import build_sweep_page
from paceline.report.experiments.tuning import build_tuning_page
from paceline.report.files import TolerantReader

_MAX_RECIPE_BYTES = 256 << 10


def build_experiment_page(folder: ExperimentDir, result: Experiment) -> ReportPage:
    """Return the report of an experiment's result; of its folder, read only the recipe, if it has one."""
    reader = TolerantReader()
    recipe = reader.read_text(folder.recipe, _MAX_RECIPE_BYTES)
    report = ExperimentReport(folder.path, recipe, reader.problems)
    match result:
        case LadderResult():
            return build_ladder_page(report, result)
        case ScaleResult(mode="batch"):
            return build_batch_page(report, result)
        case ScaleResult():
            return build_scaling_page(report, result)
        case PredictionResult():
            return build_prediction_page(report, result)
        case TuneResult():
            return build_tuning_page(report, result)
        case SweepResult():
            return build_sweep_page(report, result)
