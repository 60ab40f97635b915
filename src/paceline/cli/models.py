"""`paceline models`: list models with their cost and published weights, and download weights."""

import json
from collections import Counter
from dataclasses import asdict, replace
from typing import Final

from paceline.cli.options import ModelsOptions
from paceline.cli.tables import print_table
from paceline.core.errors import RecipeError
from paceline.core.units import size
from paceline.data.files import printable

_MAX_BUILT: Final = 30
_MAX_TAGS: Final = 3
_REPO: Final = "hf-hub:"


def models(options: ModelsOptions) -> int:
    """List the models that match, or download the weights of one; return the exit code."""
    from paceline.models.catalog import describe_models, list_model_names

    if (options.pattern or "").startswith(_REPO):
        return _show_repo(options)
    name, _, tag = (options.pattern or "*").partition(".")
    names = list_model_names(name)
    if not names:
        raise RecipeError(f"{printable(name)!r}: no model has such a name (see paceline models)")
    if options.download:
        return _download(names, tag)
    if options.pattern is None and not options.as_json:
        for library, number in Counter(each.partition(":")[0] if ":" in each else "paceline" for each in names).items():
            print(f"{library}: {number:,} models")
        print("note: paceline models PATTERN lists them, such as 'resnet*' or 'timm:vit_small*'")
        return 0
    rows = describe_models(names, _MAX_BUILT)
    if tag:
        rows = [replace(row, weights=tuple(each for each in row.weights if each.startswith(tag))) for row in rows]
    if options.as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    has_cost = len(rows) <= _MAX_BUILT
    tags = [", ".join(row.weights[:_MAX_TAGS] if not tag and len(rows) > 1 else row.weights) for row in rows]
    more = [f", and {len(row.weights) - _MAX_TAGS} more" if len(row.weights) > _MAX_TAGS else "" for row in rows]
    weights = [text + (rest if not tag and len(rows) > 1 else "") for text, rest in zip(tags, more, strict=True)]
    headings = ["model", "pixels", *(["parameters", "GFLOP"] if has_cost else []), "weights"]
    print_table(
        "Models",
        headings,
        [
            (row.name, str(row.image_size), *(_cost(row.params, row.flops) if has_cost else ()), each)
            for row, each in zip(rows, weights, strict=True)
        ],
        ("weights",),
    )
    if not has_cost:
        print(f"note: parameters and FLOPs are shown for up to {_MAX_BUILT} models (narrow the pattern)")
    return 0


def _cost(params: int | None, flops: int | None) -> tuple[str, str]:
    return (f"{params / 1e6:.1f} M" if params else "-", f"{flops / 1e9:.2f}" if flops else "-")


def _show_repo(options: ModelsOptions) -> int:
    """Download the weights of a repository of the Hub."""
    from paceline.models.published import find_repo_model

    weights = options.pattern or ""
    if not options.download:
        raise RecipeError(f"{printable(weights)}: a repository is not listed, only downloaded (add --download)")
    return _download_weights(find_repo_model(weights), weights)


def _download(names: list[str], tag: str) -> int:
    if len(names) > 1:
        others = ", ".join(names[:5])
        raise RecipeError(f"--download: {len(names)} models match, {others}{', ...' if names[5:] else ''} (name one)")
    library, colon, _ = names[0].partition(":")
    if not colon:
        raise RecipeError(f"--download: no weights are published for {names[0]} (name a timm: or torchvision: model)")
    return _download_weights(names[0], f"{library}:{tag}" if tag else "default")


def _download_weights(model: str, weights: str) -> int:
    from paceline.models.published import fetch_weights, find_published_weights
    from paceline.recipe.schema.model import Model

    published = find_published_weights(Model(name=model, weights=weights))
    path = fetch_weights(published, weights)
    print(f"{published.name}: {size(path.stat().st_size)} in {printable(path)}")
    print(f"paceline train RECIPE model.name={model} model.weights={weights}")
    return 0
