"""Report what is wrong with what the model learned."""

from paceline.core.health import RunHistory, eval_points, find_problems, training_losses
from paceline.core.results import Finding
from paceline.report.blocks import HealthFinding
from paceline.report.run import RunData
from paceline.report.words import clean_text


def health_findings(run: RunData) -> list[HealthFinding]:
    """Return the findings of the result, or of the logs without one, the most severe first."""
    recorded = run.result.health if run.result is not None else None
    return [
        HealthFinding(
            clean_text(each.title), each.severity, clean_text(each.evidence, 1000), clean_text(each.advice, 1000)
        )
        for each in (_findings_from_logs(run) if recorded is None else recorded)
    ]


def _findings_from_logs(run: RunData) -> tuple[Finding, ...]:
    # Unfinished runs and results of older versions have no findings.
    result, points = run.result, eval_points(run.evals)
    fits = len(run.confusion) == len(run.classes) and all(
        sum(row) == each.images and row[number] == each.correct
        for number, (row, each) in enumerate(zip(run.confusion, run.classes, strict=True))
    )
    return find_problems(
        RunHistory(
            points=points,
            status=None if result is None else result.status,
            losses=training_losses(run.steps.points),
            classes=run.classes,
            confusion=run.confusion if fits else (),
            steps=0 if result is None else result.steps,
            skipped=0 if result is None else result.skipped_steps,
            scales_loss=True,  # may be wrong: the precision is unknown at this point
        )
    )
