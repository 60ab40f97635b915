"""Does fine-tuning beat training from scratch on a few photographs, and does it pay to train the classifier first?

    python benchmarks/fine_tune.py --photos DIR --backbone RUN --json benchmarks/results/fine-tune-cpu.json

DIR holds photographs named by their WordNet id, such as n02085936_Maltese_dog.JPEG, in any folders. They become five
coarse classes by the table below, and half of each is kept for evaluation, another half per seed. RUN is a run whose
model has learnt other images, such as `paceline train cifar-base` at an eighth of its width. The learning rate of every
way to train is chosen from one list by the accuracy of seeds that are not used again; the record holds all outcomes.
"""

import argparse
import random
import re
import tempfile
from pathlib import Path
from typing import Any, Final

import accuracy
import record
from PIL import Image, ImageOps

import paceline
from paceline.core.statistics import mean_interval

# First and last WordNet id (https://wordnet.princeton.edu) of each class of ImageNet's 1,000 synsets.
RANGES: Final = {
    "bird": (("n01514668", "n01622779"), ("n01795545", "n01860187"), ("n02002556", "n02058221")),
    "dog": (("n02085620", "n02113978"),),
    "food": (("n07579787", "n07932039"),),
    "reptile": (("n01629819", "n01756291"),),
}
VEHICLES: Final = (
    *("n02692877", "n02782093", "n02835271", "n02917067", "n02951358", "n03100240", "n03272562", "n03344393"),
    *("n03417042", "n03444034", "n03447447", "n03538406", "n03594945", "n03599486", "n03673027", "n03769881"),
    *("n03791053", "n03895866", "n03930630", "n03947888", "n04037443", "n04065272", "n04252077", "n04285008"),
    *("n04310018", "n04347754", "n04389033", "n04465501", "n04482393", "n04487081", "n04552348", "n04612504"),
    "n04613696",
)
COMMON: Final = (
    *("data.batch_size=16", "data.workers=0", "train.eval_every=100%", "checkpoint.every=off"),
    *("log.tensorboard=off", "log.report=off", "measure.telemetry=off", "parallel.threads=1"),
)
SCRATCH: Final = ("model.weights=off", "model.freeze=off", "model.unfreeze=off", "optim.layer_decay=off")
SIZE: Final = 96
RATES: Final = (0.000625, 0.0025, 0.01, 0.04)


def ways(backbone: str) -> dict[str, list[str]]:
    """Return the settings of each way to train."""
    head, loaded = "model.freeze=backbone", f"model.weights={backbone}"
    all_layers = [loaded, "model.freeze=off", "model.unfreeze=off"]
    return {
        "from scratch": list(SCRATCH),
        "from scratch, 4 times as long": [*SCRATCH, "train.epochs=60"],
        "classifier only": [loaded, head, "model.unfreeze=off", "optim.layer_decay=off"],
        "all layers at once": [*all_layers, "optim.layer_decay=off"],
        "all layers at once, layer decay 0.65": [*all_layers, "optim.layer_decay=0.65"],
        "classifier first for 20 %": [loaded, head, "model.unfreeze=20%", "optim.layer_decay=off"],
        "classifier first for 20 %, layer decay 0.65": [loaded, head, "model.unfreeze=20%", "optim.layer_decay=0.65"],
    }


def main() -> None:
    """Train all ways at all seeds, print the table, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", required=True, type=Path, help="folder of photographs named by WordNet id")
    parser.add_argument("--backbone", required=True, help="run directory to start from")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides for every run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rate-seeds", type=int, nargs="+", default=[10], help="to choose the learning rate by")
    parser.add_argument("--only", nargs="+", default=[], help="ways whose name holds one of these")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    args = parser.parse_args()
    searched: dict[str, dict[str, float]] = {}
    top1: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        seeds = [*args.rate_seeds, *args.seeds]
        roots = {seed: split_photos(args.photos, Path(folder, str(seed)), seed) for seed in seeds}

        def mean_top1(settings: list[str], rate: float, seeds: list[int]) -> list[float]:
            overrides = [*COMMON, *args.set, *settings, f"optim.lr={rate}"]
            return [train_photos([*overrides, f"data.source.root={roots[seed]}", f"seed={seed}"]) for seed in seeds]

        for name, settings in ways(args.backbone).items():
            if args.only and not any(each in name for each in args.only):
                continue
            tried = {rate: sum(mean_top1(settings, rate, args.rate_seeds)) / len(args.rate_seeds) for rate in RATES}
            best = max(tried, key=lambda rate: tried[rate])
            searched[name] = {str(rate): value for rate, value in tried.items()}
            top1[name] = mean_top1(settings, best, args.seeds)
            print(f"{name:45} {describe(top1[name])}  lr {best:g}  of {searched[name]}", flush=True)
    values: dict[str, Any] = {"benchmark": "fine_tune", **record.provenance(), "settings": args.set}
    values["command"] = accuracy.without_folders(values["command"])
    values["top1"] = {
        name: {**accuracy.over_seeds(each), "lr": best_rate(searched[name])} for name, each in top1.items()
    }
    scratch = top1.get("from scratch", [])
    if scratch:
        # A seed is one half of the photographs, so differences are within seeds.
        gains = {name: list(map(float.__sub__, each, scratch)) for name, each in top1.items() if each is not scratch}
        values["gain_over_scratch"] = {name: describe(each) for name, each in gains.items()}
    if args.json:
        record.write(args.json, {**values, "searched": searched})


def train_photos(overrides: list[str]) -> float:
    """Return the top-1 accuracy at the end of a run."""
    with tempfile.TemporaryDirectory() as folder:
        result = paceline.train("folder-finetune", *overrides, run_dir=Path(folder, "run"))
    assert result.eval is not None
    return result.eval.top1


def best_rate(tried: dict[str, float]) -> float:
    """Return the learning rate of the best accuracy."""
    return float(max(tried, key=lambda rate: tried[rate]))


def describe(values: list[float]) -> str:
    """Return the mean of `values` and its 95 % interval by Student's t."""
    interval = mean_interval(values)
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def split_photos(photos: Path, root: Path, seed: int) -> Path:
    """Write half of the photographs of each class below `root / "train"`, and half below `val`; return `root`."""
    by_class: dict[str, list[Path]] = {name: [] for name in (*RANGES, "vehicle")}
    for path in sorted(photos.rglob("n*.JPEG")):
        name = class_of(path.name)
        if name:
            by_class[name].append(path)
    for name, paths in by_class.items():
        random.Random(seed).shuffle(paths)
        for number, path in enumerate(paths):
            folder = root / ("val" if number % 2 else "train") / name
            folder.mkdir(parents=True, exist_ok=True)
            with Image.open(path) as photo:  # once, as decoding large photographs would take most of the time
                ImageOps.fit(photo.convert("RGB"), (SIZE, SIZE)).save(folder / path.name, quality=95)
    return root


def class_of(name: str) -> str:
    """Return the class of a photograph by the WordNet id that its name begins with, or ""."""
    found = re.match(r"n\d{8}", name)
    if found is None:
        return ""
    if found[0] in VEHICLES:
        return "vehicle"
    return next((each for each, ends in RANGES.items() if any(low <= found[0] <= high for low, high in ends)), "")


if __name__ == "__main__":
    main()
