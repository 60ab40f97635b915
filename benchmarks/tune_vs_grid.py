"""Does `paceline tune` find what an exhaustive grid finds, within 3 %, in a quarter of its trials?

    python benchmarks/tune_vs_grid.py digits --json benchmarks/results/tune-vs-grid-digits.json
    python benchmarks/tune_vs_grid.py cifar10 --root ~/data/cifar10 --json benchmarks/results/tune-vs-grid-cifar10.json

Both search the same space from its slow corner. The grid runs every setting once, and its fastest is what it found; as
the fastest of many single runs is also the luckiest, what both found is then compared in pairs of fresh runs. Started
again with the same --folder, it continues where it was stopped.
"""

import argparse
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import record

from paceline.cli.options import TuneOptions
from paceline.cli.tune import tune
from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.experiments.results import TuneResult
from paceline.core.statistics import Interval, ratio_interval
from paceline.lab.ab_test import format_speedup
from paceline.lab.patches import build_measurement_patch
from paceline.lab.runner import ReusePolicy, TrialRunner
from paceline.lab.trial import Trial, apply_patch, build_run_name, format_patch, write_recipe
from paceline.recipe.load import Patch, load
from paceline.recipe.schema import Recipe

SPACE: dict[str, tuple[Any, ...]] = {
    "train.precision": ("fp32", "bf16"),
    "model.memory_format": ("contiguous", "auto"),
    "optim.implementation": ("loop", "foreach", "auto"),
    "parallel.threads": (1, "auto"),
    "data.workers": (1, "auto"),
}
"""The first value of each is the slow corner that the search starts from."""
RECIPES = {
    "digits": ("digits", ["measure.warmup_steps=5"]),
    "cifar10": (
        "cifar10-resnet18",
        ["measure.warmup_steps=3", "model.width=0.25", "data.batch_size=128"],
    ),
}
LEAST = 0.97
"""Of the grid's best: what the search may fall short of it by."""


def main() -> None:
    """Run both, and write what they found."""
    args = parse_args()
    name, arguments = RECIPES[args.recipe]
    arguments = [*arguments, *([f"data.source.root={args.root}"] if args.root else [])]
    corner = [f"{path}={values[0]}" for path, values in SPACE.items()]
    folder = Path(args.folder or tempfile.mkdtemp(prefix="tune-vs-grid-"))
    num_settings = len(list(settings()))
    found = searched([name, *arguments, *corner], folder / "tune", args.steps, budget=num_settings // 4)

    recipe = load(name, Patch.parse([*arguments, *corner])).recipe
    measured = apply_patch(recipe, build_measurement_patch(recipe, args.steps, Patch(), lr_share=0.1))
    runner = runner_of(measured, folder / "grid")
    rates = {
        tuple(format_patch(patch)): rate(runner, f"grid-{number}", patch, 1) for number, patch in enumerate(settings())
    }
    best = Patch.parse(list(max(rates.items(), key=lambda each: each[1])[0]))
    ours = Patch.parse(list(found.best_patch))
    ratio = compared(runner, ours, best, args.pairs)
    print(f"tune: {found.trials} runs; grid: {num_settings}; tuned is {format_speedup(ratio, 3)} the grid's best")
    record.write(
        args.json,
        {
            **record.provenance(),
            "recipe": args.recipe,
            "space": {path: list(values) for path, values in SPACE.items()},
            "tune": {"runs": found.trials, "patch": list(found.best_patch), "gain": found.gain and found.gain.value},
            "grid": {"runs": num_settings, "patch": format_patch(best), "images_per_s": max(rates.values())},
            "slowest_images_per_s": min(rates.values()),
            "tuned_over_grid_best": ratio.model_dump(),
            "least": LEAST,
            "holds": ratio.value >= LEAST and found.trials <= num_settings / 4,
            "low": ratio.low,
        },
    )


def settings() -> Iterator[Patch]:
    """Yield every setting of the space."""
    for values in itertools.product(*SPACE.values()):
        yield Patch(tuple(zip(SPACE, values, strict=True)))


def searched(arguments: Sequence[str], folder: Path, steps: int, budget: int) -> TuneResult:
    """Return what the search has found, with single pairs, as the grid has single runs."""
    space = [f"{path}={','.join(str(value) for value in values)}" for path, values in SPACE.items()]
    code = tune(
        TuneOptions(
            args=list(arguments), ranks="1", run_dir=folder, steps=steps, repeats=1, vary=space, budget=str(budget)
        )
    )
    found = ExperimentDir(folder).read()
    assert code == 0 and isinstance(found, TuneResult)
    return found


def runner_of(recipe: Recipe, folder: Path) -> TrialRunner:
    """Return what runs the settings of the grid, each in a folder of its own."""
    recipe_file = folder / "measured.yaml"
    write_recipe(recipe, recipe_file)
    return TrialRunner(
        recipe,
        recipe_file,
        ranks=1,
        get_folder=lambda trial, repeat: folder / build_run_name(trial, recipe, 1, repeat),
        reuse_policy=ReusePolicy(folder.with_name(f"{folder.name}-replaced"), print),
    )


def rate(runner: TrialRunner, name: str, patch: Patch, turn: int) -> float:
    """Return images/s of one run."""
    outcome = runner.run(Trial(name, patch), turn)
    if outcome.result is None:
        raise SystemExit(f"{name}: {' '.join(format_patch(patch))}: {outcome.error}")
    print(f"{name}, turn {turn}: {outcome.result.throughput.images_per_s:,.0f} images/s", flush=True)
    return outcome.result.throughput.images_per_s


def compared(runner: TrialRunner, ours: Patch, best: Patch, num_pairs: int) -> Interval:
    """Return how many times as fast as `best` what the search has found is, in pairs of fresh runs.

    Both of a pair have the same seed, each pair another one, and each goes first in every other pair.
    """

    def run(name: str, patch: Patch, turn: int) -> float:
        seeded = Patch((*patch.assignments, ("seed", runner.recipe.seed + turn - 1)))
        return rate(runner, name, seeded, turn)

    rates: dict[str, list[float]] = {"tuned": [], "grid-best": []}
    patches = {"tuned": ours, "grid-best": best}
    for turn in range(1, num_pairs + 1):
        for name in patches if turn % 2 else reversed(patches):
            rates[name].append(run(name, patches[name], turn))
    return ratio_interval(rates["tuned"], rates["grid-best"])


def parse_args() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("--root", default="", help="folder of the dataset")
    parser.add_argument("--folder", default="", help="where runs are written and found again (a temporary one)")
    parser.add_argument("--steps", type=int, default=20, help="steps that are counted in a run")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs of what both have found")
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    return parser.parse_args()


if __name__ == "__main__":
    main()
