"""Resolve SRC of the data verbs: a folder, list or pack on disk, or the source of a recipe."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.errors import RecipeError, WorldError, suggest_similar
from paceline.core.run_dir import is_run
from paceline.data.files import expand_path, is_file, is_folder, printable
from paceline.data.sources.folder import VAL_FOLDERS
from paceline.models.weights_recipe import with_weights_defaults
from paceline.recipe.consent import require_consent
from paceline.recipe.load import DEFAULT, LoadedRecipe, Patch, load, preset_names
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.source import SourceSection

_FOLDER_PRESET: Final = "folder"
"""Preset whose sizes and augmentation are used for images without a recipe."""
_BYTE_UNITS: Final = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_AMOUNT_PATTERN: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


@dataclass(frozen=True)
class DataRequest:
    """Dataset of a data verb: its name for users, and the `data` section that reads it.

    `is_recipe`: the user named a recipe, whose sizes and augmentation then apply.
    """

    name: str
    data: Data
    is_recipe: bool

    @property
    def source(self) -> SourceSection:
        """Source of the samples."""
        return self.data.source


def read_source(
    src: str | None, overrides: list[str], *, trust_code: bool = False, for_model: bool = False
) -> DataRequest:
    """Return the dataset that `src` and the overrides name. Raise `RecipeError` if they name none.

    A folder is data, even with a `recipe.yaml` in it, unless paceline wrote it. Without `trust_code`, refuse a recipe
    whose file names code for its data. With `for_model`, sizes are those of the recipe's published weights, if any.
    """
    invalid = next((word for word in overrides if "=" not in word), None)
    if invalid is not None:
        raise RecipeError(f"{invalid!r}: is not an override (write KEY=VALUE, such as data.source.val_fraction=0.2)")
    if src is None:
        return _load_recipe_data(DEFAULT, overrides, trust_code=trust_code, for_model=for_model)
    if "=" in src and not os.path.lexists(expand_path(src)):
        return _load_recipe_data(DEFAULT, [src, *overrides], trust_code=trust_code, for_model=for_model)
    loaded = _load_folder_recipe(src, overrides)
    if loaded is None:
        return _load_recipe_data(src, overrides, trust_code=trust_code, for_model=for_model)
    return DataRequest(printable(src), loaded.recipe.data, is_recipe=False)


def load_recipe_or_data(src: str, overrides: list[str]) -> LoadedRecipe:
    """Return the recipe `src`, or the recipe for the folder, list or pack `src`. Raise `RecipeError` for neither."""
    return _load_folder_recipe(src, overrides) or load(src, Patch.parse(overrides))


def _load_folder_recipe(src: str, overrides: list[str]) -> LoadedRecipe | None:
    """Return the recipe that trains on the folder, list or pack `src`, or None if it is the name of a recipe."""
    settings = tuple(_source_settings(src, overrides))
    if settings:
        return load(_FOLDER_PRESET, Patch((*settings, *Patch.parse(overrides).assignments)))  # a path, not YAML
    _refuse_unknown(src)
    return None


def _refuse_unknown(src: str) -> None:
    """Raise `RecipeError` for a missing path, and for a word that resembles no recipe's name."""
    if _is_recipe(src):
        return
    hint = "name a folder of images, a .csv list, a .pack or a recipe"
    if ("/" in src or src.startswith((".", "~"))) and not os.path.lexists(expand_path(src)):
        raise RecipeError(f"{printable(src)}: does not exist ({hint})")
    if not src.endswith((".yaml", ".yml")) and not suggest_similar(src, preset_names()):
        raise RecipeError(f"{src!r}: is neither a preset, a recipe file, a run directory nor data ({hint})")


def _load_recipe_data(name: str, overrides: list[str], *, trust_code: bool, for_model: bool) -> DataRequest:
    loaded = load(name, Patch.parse(overrides))
    require_consent(loaded, trust_code=trust_code, paths=("data.",))
    if for_model:
        loaded = with_weights_defaults(loaded)
    is_other = any(word.partition("=")[0] in ("data.source", "data.source.name") for word in overrides)
    label = _source_label(loaded.recipe.data.source) if is_other else loaded.name
    return DataRequest(label, loaded.recipe.data, is_recipe=True)


def _source_label(source: SourceSection) -> str:
    """Return the path of a source that replaces a recipe's, or its name."""
    fields = source.model_dump(exclude_defaults=True)
    return next((printable(fields[key]) for key in ("root", "train_root", "train") if key in fields), source.name)


def _source_settings(src: str, overrides: list[str]) -> Iterator[tuple[str, str | bool]]:
    """Yield the settings that read `src`; none if it is a recipe's name."""
    path = expand_path(src)
    name = "" if _is_recipe(src) else _detect_source(src, path)
    if not name:
        return
    yield "data.source.name", name
    if name == "manifest":
        yield from _manifest_settings(path, overrides)
        return
    yield "data.source.root", src
    if name in ("cifar10", "cifar100", "fashion_mnist"):
        yield "data.source.download", False


def _is_recipe(src: str) -> bool:
    return src in preset_names() or is_run(expand_path(src))


def _detect_source(src: str, path: Path) -> str:
    """Return the name of the source that reads `src`; "" for none."""
    if "://" in src or path.suffix == ".pack":
        return "pack"
    if path.suffix == ".csv":
        return "manifest"
    return _detect_folder_source(path) if is_folder(path) else ""


def _detect_folder_source(path: Path) -> str:
    markers = {
        "data.mdb": "lmdb",
        "index.pack": "pack",
        "cifar-10-batches-py": "cifar10",
        "cifar-100-python": "cifar100",
        "train-images-idx3-ubyte": "fashion_mnist",
        "train-images-idx3-ubyte.gz": "fashion_mnist",
        "dataset_dict.json": "huggingface",
    }
    return next((name for marker, name in markers.items() if os.path.lexists(path / marker)), "folder")


def _manifest_settings(path: Path, overrides: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the lists of a manifest: `src` to train on, its sibling to validate on."""
    yield "data.source.train", str(path)
    if any(word.startswith("data.source.val=") for word in overrides):
        return
    candidates = (path.with_name(path.name.replace("train", name)) for name in VAL_FOLDERS if "train" in path.name)
    val = next((each for each in candidates if is_file(each)), None)
    if val is None and not is_file(path):
        raise RecipeError(f"{printable(path)}: is not a file (name a .csv list of training images)")
    if val is None:
        raise RecipeError(
            f"{printable(path)}: lists training images, but there is no list of validation images beside it "
            f"(add data.source.val=FILE.csv, or data.source.val=off for none)"
        )
    yield "data.source.val", str(val)


def recipe_overrides(source: SourceSection) -> str:
    """Return the overrides that make a recipe read `source`, as typed."""
    fields = [f"data.source.name={source.name}"]
    fields += [
        f"data.source.{name}={value}"
        for name, value in source.model_dump(exclude_defaults=True).items()
        if name != "name"
    ]
    return printable(" ".join(fields))


def parse_bytes(text: str, option: str) -> int:
    """Return `text`, such as `1GB`, in bytes. Raise `RecipeError`, naming `option`, if it is not an amount."""
    match = _AMOUNT_PATTERN.fullmatch(text.strip())
    units = {unit.lower(): amount for unit, amount in _BYTE_UNITS.items()}
    if match is None or match[2].lower() not in {*units, ""}:
        raise RecipeError(f"{option}: {text!r} is not an amount of bytes (write 500MB or 1GB)")
    return round(float(match[1]) * units.get(match[2].lower(), 1))


def count_workers(text: str) -> int:
    """Return the number of worker processes; `auto`: one per usable core."""
    if text == "auto":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not text.isdecimal() or int(text) < 1:
        raise WorldError(f"--workers: {text!r} is not a number of processes (write 1, 2, ... or auto)")
    return int(text)
