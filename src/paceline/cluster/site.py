"""What a site wants of a job, from a file and from words of a command: each engine reads its own section.

A file is a shipped one's name or a path. It may extend another, such as `extends: perlmutter`. It knows nothing of the
environment: which file to read by default is told.
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
from paceline.core.errors import RecipeError, near_miss
from paceline.recipe.explain import explain
from paceline.recipe.layers import Layer, Stack, merge
from paceline.recipe.patch import Patch
from paceline.recipe.schema.section import Section
from paceline.recipe.yamlfile import read_file

SITES: Final = Path(str(resources.files("paceline.cluster") / "sites"))
_SUFFIXES: Final = (".yaml", ".yml")


class Site(Section):
    """A place where jobs run, and what its engines want to be told."""

    slurm: SlurmSite = SlurmSite()
    """Where Slurm runs jobs."""
    kubernetes: KubernetesSite = KubernetesSite()
    """Where Kubernetes does."""


def site_names() -> list[str]:
    """Return the names of the shipped sites, sorted."""
    return sorted(path.stem for path in SITES.glob("*.yaml"))


def load_site(name: str | None, words: Sequence[str], otherwise: Path | None = None, said_by: str = "--site") -> Site:
    """Return the site called `name`, else that of file `otherwise`, with `words` such as `slurm.time=2h` over it.

    `said_by` is where the name comes from, as an error tells it. With neither all is as the engine has it by default.
    Raise `RecipeError` as `file:line: field: what is wrong`.
    """
    path = otherwise if name is None else _find(name, Path(), f"{said_by}: {name!r}")
    stack = merge([*_layers(path), Layer(Patch.parse(list(words)).values(), "command line")])
    try:
        return Site.model_validate(stack.values)
    except ValidationError as error:
        raise RecipeError(_explained(error, stack)) from None


def _layers(path: Path | None) -> list[Layer]:
    """Return the layers from the root of the `extends` chain to `path`; none without one."""
    layers: list[Layer] = []
    seen: list[Path] = []
    while path is not None:
        if path.resolve() in seen:
            raise RecipeError(f"{path}: extends itself (mend the chain of `extends`)")
        seen.append(path.resolve())
        document = read_file(path)
        values = dict(document.values)
        base = values.pop("extends", None)
        layers.insert(0, Layer(values, _origin(path), document.lines))
        where = f"{layers[0].where('extends')}: extends: {base!r}"
        path = None if base is None else _find(base, path.parent, where)
    return layers


def _find(name: object, folder: Path, where: str) -> Path:
    """Return the file that `name` means: a shipped site, or a file, looked for from `folder`. Raise `RecipeError`."""
    if isinstance(name, str) and name in site_names():
        return SITES / f"{name}.yaml"
    if not isinstance(name, str) or not name.endswith(_SUFFIXES):
        hint = near_miss(str(name), site_names()) or f" (write {', '.join(site_names())} or a .yaml file)"
        raise RecipeError(f"{where} is no site{hint}")
    path = folder / Path(name).expanduser()
    if not path.is_file():
        raise RecipeError(f"{where}: there is no such file (write {', '.join(site_names())} or a .yaml file)")
    return path


def _origin(path: Path) -> str:
    return path.stem if path.is_relative_to(SITES) else str(path)


def _explained(error: ValidationError, stack: Stack) -> str:
    """Return one line about the first field that does not fit; an unknown one, which explains others, comes first."""
    unknown = [detail for detail in error.errors(include_url=False) if detail["type"] == "extra_forbidden"]
    path, message = _unknown(unknown[0]) if unknown else explain(error, stack.values)
    below = (where for field, where in stack.origins.items() if field.startswith(f"{path}."))
    origin = next(below, stack.origin(path))  # what is wrong of a section as a whole is told where it begins
    prefix = "" if origin in ("default", "command line") else f"{origin}: "
    return f"{prefix}{path or 'site'}: {message}"


def _unknown(detail: ErrorDetails) -> tuple[str, str]:
    """Return the path of a field that there is none of, and what there is beside it."""
    *parents, leaf = map(str, detail["loc"])
    model: type[BaseModel] = Site
    for part in parents:
        if part in model.model_fields:  # what is none is the branch of a union
            model = next(_models(model.model_fields[part].annotation), model)
    known = list(model.model_fields)
    hint = near_miss(leaf, known) or f" (one of {', '.join(known)})"
    return ".".join([*parents, leaf]), f"is not a field{hint}"


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models(argument)
