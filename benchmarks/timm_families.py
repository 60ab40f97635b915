"""Which families of timm's classifiers does paceline train and export?

Of each family (a module of `timm.models`) the member with the fewest parameters is trained for one step, at the
smallest image size in `SIZES` that it accepts or else its own, and exported:

    python benchmarks/timm_families.py --json benchmarks/results/timm-families.json

`--models` names members instead, and `--onnx` exports to ONNX too, which takes several times as long. `table` makes the
table of docs/reference/models.md from the record.
"""

import argparse
import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterable
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path

import timm
import torch
from record import provenance, write

import paceline
from paceline.core.errors import PacelineError
from paceline.core.run_dir import RunDir
from paceline.inference.classifier import load_classifier
from paceline.inference.export import build_export_format, export_classifier

SIZES = (64, 96, 112, 128, 160, 192)
EXTRA = {
    # Their smallest members have up to 400 million parameters.
    **dict.fromkeys(("deepseek_vit", "gemma4_vit", "qwen3_vit"), ("model.args={depth: 2}",)),
    # After one step, their batch norms' running statistics are so far off that the logits are infinite.
    **dict.fromkeys(("inception_v3", "inception_v4"), ("train.steps=40",)),
}
"""Overrides by family."""
RECIPE = (
    *("parallel.device=cpu", "parallel.threads=1", "data.workers=0", "data.batch_size=2", "data.source.num_images=4"),
    *("data.source.num_val_images=2", "data.source.num_classes=3", "model.width=1", "optim.lr=0.001"),
    *("train.epochs=auto", "train.steps=1", "train.eval_every=off", "log.report=off", "log.tensorboard=off"),
)
_LARGE = re.compile(r"large|huge|giant|gigantic|xlarge|so400m|so150m|_[1-9]\d?b_|_7b")


@dataclass(frozen=True)
class Row:
    """A member of a family: `image_size` in pixels; reasons in `train`, `torch` and `onnx`, "" if it worked."""

    family: str
    model: str
    parameters: int = 0
    image_size: int = 0
    train: str = ""
    torch: str = ""
    onnx: str | None = None


def list_families() -> dict[str, list[str]]:
    """Return timm's models by family."""
    families: dict[str, list[str]] = defaultdict(list)
    for family in timm.list_modules():
        for name in timm.list_models(module=family):
            families[family].append(name)
    return dict(families)


def count_parameters(name: str) -> int:
    """Return the number of parameters of a model with three classes; raise what timm raises."""
    with torch.device("meta"):
        return sum(each.numel() for each in timm.create_model(name, num_classes=3).parameters())


def find_smallest(names: Iterable[str]) -> str:
    """Return the classifier with the fewest parameters; the largest, by name, are left out: they take long to build."""
    names = list(names)
    small = [name for name in names if not _LARGE.search(name) and not name.endswith("_enc")] or names
    sizes = {}
    for name in small:
        with suppress(Exception):  # some constructors read values, which the meta device does not have
            sizes[name] = count_parameters(name)
    return min(sizes, key=sizes.__getitem__, default=names[0])


def try_model(family: str, name: str, *, with_onnx: bool) -> Row:
    """Train and export a model."""
    config = timm.get_pretrained_cfg(name)
    own = max(config.input_size[1:]) if config and config.input_size else 224
    reason = ""
    with tempfile.TemporaryDirectory() as folder:
        for size in (*(each for each in SIZES if each < own), own):
            run = Path(folder, f"run-{size}")
            reason = train(name, size, run, *EXTRA.get(family, ()))
            if reason.startswith("model.") and size != own:
                continue
            break
        row = {"family": family, "model": name, "image_size": size, "train": reason}
        if not reason:
            row["parameters"] = RunDir(run).read_result().parameters
            row["torch"] = export(run, "torch", Path(folder, "model.pt2"))
            if with_onnx:
                row["onnx"] = export(run, "onnx", Path(folder, "model.onnx"))
    return Row(**row)


def train(name: str, size: int, run: Path, *args: str) -> str:
    """Train a step on images of `size` pixels; return the reason of a failure, or ""."""
    images = (f"data.source.image_size={size}", f"data.image_size={size}", "data.source.channels=3")
    try:
        with redirect_stdout(StringIO()):
            paceline.train("synthetic", *RECIPE, *images, f"model.name=timm:{name}", *args, run_dir=run)
    except PacelineError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def export(run: Path, form: str, out: Path) -> str:
    """Export a run; return the reason of a failure, or ""."""
    try:
        classifier = load_classifier(run, device="cpu")
        export_classifier(classifier, build_export_format(form, classifier.recipe.model), out, with_preprocessing=False)
    except PacelineError as error:
        return str(error)
    return ""


def table(rows: Iterable[Row]) -> str:
    """Return the rows as Markdown, with the reason of the first failure of each."""
    lines = ["| family | model | parameters | trained at | exported |", "|---|---|---|---|---|"]
    for row in rows:
        failure, size = (row.train or row.torch).replace("|", "\\|"), "no" if row.train else f"{row.image_size} px"
        cells = (row.family, f"`timm:{row.model}`", f"{row.parameters / 1e6:.1f} M", size, failure or "yes")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Try all families, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--onnx", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for family, names in list_families().items():
        members = [name for name in names if name in options.models]
        if options.models and not members:
            continue
        rows.append(try_model(family, find_smallest(members or names), with_onnx=options.onnx))
        print(rows[-1], flush=True)
        if options.json:
            values = {"timm": timm.__version__, "families": [asdict(row) for row in rows], "provenance": provenance()}
            write(options.json, values)


if __name__ == "__main__":
    main()
