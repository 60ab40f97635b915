"""TensorBoard event files. TensorBoard shows repeated steps once after a resume."""

from paceline.core.results import RunResult
from paceline.core.rundir import RunDir
from paceline.recipe.plan import Plan
from paceline.recipe.schema.recipe import Recipe
from paceline.recipe.yamlfile import to_yaml_text
from paceline.train.logsink import EvalRecord, StepRecord
from paceline.train.sinks.values import run_config, step_curves


class TensorBoardSink:
    """Event files for TensorBoard."""

    def __init__(self, rundir: RunDir, recipe: Recipe, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._recipe = recipe
        self._writer = SummaryWriter(str(rundir.tensorboard), purge_step=resume_step + 1)

    def started(self, plan: Plan, step: int) -> None:
        """Write the configuration as an indented Markdown code block."""
        text = to_yaml_text(run_config(self._recipe, plan))
        self._writer.add_text("recipe", "".join(f"    {line}" for line in text.splitlines(keepends=True)), step)

    def step(self, record: StepRecord) -> None:
        """Write loss, learning rate, images/s and, if measured, training accuracy."""
        self._scalars(step_curves(record), record.step)

    def evaluated(self, record: EvalRecord) -> None:
        """Write the metrics of the raw and averaged weights, and on training images."""
        report = record.report
        for tag, result in (("val", report.val), ("ema", report.ema)):
            if result is not None:
                values = result.model_dump(exclude={"images"}, exclude_none=True)
                self._scalars({f"{tag}/{name}": value for name, value in values.items()}, record.step)
        if report.train is not None and report.gap is not None:
            scalars = {"train_eval/top1": report.train.top1, "train_eval/loss": report.train.loss, "gap": report.gap}
            self._scalars(scalars, record.step)

    def warned(self, message: str) -> None:
        """Do nothing."""

    def finished(self, result: RunResult) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()

    def _scalars(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
