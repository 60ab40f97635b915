"""Predict the larger runs of published tables from their smaller ones: how far off, and whether the interval holds.

    python benchmarks/prediction.py --json benchmarks/results/prediction.json

Nothing is trained: the tables are in `benchmarks/results/published/`, each with its source. The interval's two
constants were chosen on the ResNet-50 rows of `dlperf.csv` alone. What is predicted is never among the points
of the fit.
"""

import argparse
import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import record

from paceline.core.experiments.results import Predicted
from paceline.lab.predict.from_points import build_request, predict_from_points
from paceline.lab.predict.points import ScalingPoint, read_points

PUBLISHED = Path(__file__).parent / "results" / "published"
TABLES = ("jsc", "nersc", "ddp-post", "quant")


@dataclass(frozen=True)
class EvaluatedPrediction:
    """A run that was predicted from those on fewer ranks; `error` and bounds are relative to what it took.

    `number` counts measurements on the same ranks, from 1."""

    table: str
    used: tuple[int, ...]
    ranks: int
    number: int
    error: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        """Whether the interval holds what it took."""
        return self.low <= 0 <= self.high


def tables() -> dict[str, tuple[ScalingPoint, ...]]:
    """Return all published tables by name; DLPerf's, which holds many, by `resnet50 fp32: oneflow` and such."""
    found = {name: read_points(PUBLISHED / f"{name}.csv") for name in TABLES}
    sets: dict[str, list[ScalingPoint]] = {}
    lines = [line for line in (PUBLISHED / "dlperf.csv").read_text("utf-8").splitlines() if not line.startswith("#")]
    for row in csv.DictReader(lines):
        ranks, nodes, rank_batch = (int(row[name]) for name in ("ranks", "nodes", "rank_batch"))
        point = ScalingPoint(ranks, nodes, rank_batch, float(row["images"]), float(row["time_s"]))
        sets.setdefault(row["set"], []).append(point)
    return found | {name: tuple(points) for name, points in sets.items()}


def evaluate_table(name: str, points: Sequence[ScalingPoint], up_to: int) -> Iterator[EvaluatedPrediction]:
    """Yield a judgment of each larger run, predicted from those of at most `up_to` ranks."""
    used = [point for point in points if point.ranks <= up_to]
    ranks = tuple(dict.fromkeys(point.ranks for point in used))
    seen: Counter[int] = Counter()
    for point in points:
        if point.ranks > up_to:
            seen[point.ranks] += 1
            request = build_request(
                used,
                [point.ranks],
                ranks_per_node=-(-point.ranks // point.nodes),
                rank_batch=point.rank_batch,
                images=point.images,
            )
            predicted = predict_from_points(used, request, source=name).predictions[0]
            yield EvaluatedPrediction(
                name, ranks, point.ranks, seen[point.ranks], *(each / point.time_s - 1 for each in _times(predicted))
            )


def _times(predicted: Predicted) -> tuple[float, float, float]:
    return predicted.time_s, predicted.low_s, predicted.high_s


def evaluate_tables(found: Mapping[str, Sequence[ScalingPoint]]) -> list[EvaluatedPrediction]:
    """Return the judgments of all tables, from two numbers of ranks on."""
    results: list[EvaluatedPrediction] = []
    for name, points in found.items():
        sizes = sorted({point.ranks for point in points})
        for up_to in sizes[1:-1]:
            results += evaluate_table(name, points, up_to)
    return results


def title_of(result: EvaluatedPrediction) -> str:
    """Return what a result goes by in the record: `jsc, 1 4 16 32 to 64`, and which one of several measurements."""
    used = " ".join(str(ranks) for ranks in result.used)
    again = f", measured {result.number}" if result.number > 1 else ""
    return f"{result.table}, {used} to {result.ranks}{again}"


def main() -> None:
    """Judge all tables, print them, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    args = parser.parse_args()
    results = evaluate_tables(tables())
    print("| table | from ranks | ranks | error | interval about what it took | holds |\n|---|---|---|---|---|---|")
    for each in results:
        interval = f"{each.low:+.1%} to {each.high:+.1%}"
        used = ", ".join(str(ranks) for ranks in each.used)
        print(f"| {each.table} | {used} | {each.ranks} | {each.error:+.1%} | {interval} | {each.holds} |")
    print(f"\n{sum(each.holds for each in results)} of {len(results)} intervals hold what it took")
    if args.json:
        record.write(args.json, {title_of(each): asdict(each) for each in results})


if __name__ == "__main__":
    main()
