"""Load a site: settings per scheduler, from a file and from arguments.

A site is a shipped name or a file, which may extend another one: `extends: perlmutter`. This module reads no
environment variables; the caller passes the default file.
"""

import typing
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from paceline.cluster.kubernetes_site import KubernetesSite
from paceline.cluster.slurm_site import SlurmSite
from paceline.core.errors import RecipeError, suggest_similar
from paceline.recipe.explain import explain
from paceline.recipe.layers import Layer, LayerStack, merge_layers
from paceline.recipe.patch import Patch
from paceline.recipe.schema.section import Section
from paceline.recipe.yamlfile import read_yaml_file

SITES: Final = Path(str(resources.files("paceline.cluster") / "sites"))
_SUFFIXES: Final = (".yaml", ".yml")


class Site(Section):
    """Cluster, with one section per scheduler."""

    slurm: SlurmSite = SlurmSite()
    """Settings for Slurm."""
    kubernetes: KubernetesSite = KubernetesSite()
    """Settings for Kubernetes."""


def site_names() -> list[str]:
    """Return the names of the shipped sites, sorted."""
    return sorted(path.stem for path in SITES.glob("*.yaml"))


def load_site(
    name: str | None, overrides: Sequence[str], default_file: Path | None = None, origin: str = "--site"
) -> Site:
    """Return the site `name`, else that of file `default_file`, with overrides such as `slurm.time=2h`.

    `origin` names the origin of `name` in errors. Without either, defaults apply. Raise `RecipeError` as `file:line:
    field: problem`.
    """
    path = default_file if name is None else _find_site_file(name, Path(), f"{origin}: {name!r}")
    stack = merge_layers([*_read_layers(path), Layer(Patch.parse(list(overrides)).values(), "command line")])
    try:
        return Site.model_validate(stack.values)
    except ValidationError as error:
        raise RecipeError(_explain_error(error, stack)) from None


def _read_layers(path: Path | None) -> list[Layer]:
    """Return the layers of `path` from the root of its `extends` chain; none without a path."""
    layers: list[Layer] = []
    seen: list[Path] = []
    while path is not None:
        if path.resolve() in seen:
            raise RecipeError(f"{path}: extends itself (fix the chain of `extends`)")
        seen.append(path.resolve())
        document = read_yaml_file(path)
        values = dict(document.values)
        base = values.pop("extends", None)
        layers.insert(0, Layer(values, _layer_origin(path), document.lines))
        where = f"{layers[0].location('extends')}: extends: {base!r}"
        path = None if base is None else _find_site_file(base, path.parent, where)
    return layers


def _find_site_file(name: object, folder: Path, where: str) -> Path:
    """Return the file of a shipped site, or a path relative to `folder`. Raise `RecipeError` if it does not exist."""
    if isinstance(name, str) and name in site_names():
        return SITES / f"{name}.yaml"
    if not isinstance(name, str) or not name.endswith(_SUFFIXES):
        hint = suggest_similar(str(name), site_names()) or f" (write {', '.join(site_names())} or a .yaml file)"
        raise RecipeError(f"{where} is not a site{hint}")
    path = folder / Path(name).expanduser()
    if not path.is_file():
        raise RecipeError(f"{where}: there is no such file (write {', '.join(site_names())} or a .yaml file)")
    return path


def _layer_origin(path: Path) -> str:
    return path.stem if path.is_relative_to(SITES) else str(path)


def _explain_error(error: ValidationError, stack: LayerStack) -> str:
    """Return one line about the first invalid field; an unknown field comes first, because it explains other errors."""
    unknown = [detail for detail in error.errors(include_url=False) if detail["type"] == "extra_forbidden"]
    path, message = _explain_unknown_field(unknown[0]) if unknown else explain(error, stack.values)
    below = (where for field, where in stack.origins.items() if field.startswith(f"{path}."))
    origin = next(below, stack.origin(path))  # an error of a whole section points to its first field
    prefix = "" if origin in ("default", "command line") else f"{origin}: "
    return f"{prefix}{path or 'site'}: {message}"


def _explain_unknown_field(detail: ErrorDetails) -> tuple[str, str]:
    """Return the path of an unknown field, and the fields that exist beside it."""
    *parents, leaf = map(str, detail["loc"])
    model: type[BaseModel] = Site
    for name in parents:
        if name in model.model_fields:  # other parts name a branch of a union
            model = next(_nested_models(model.model_fields[name].annotation), model)
    known = list(model.model_fields)
    hint = suggest_similar(leaf, known) or f" (one of {', '.join(known)})"
    return ".".join([*parents, leaf]), f"is not a field{hint}"


def _nested_models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the section classes in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _nested_models(argument)
