"""Building blocks of the schema: sections, durations such as `90ep`, variants chosen by name, import paths."""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Final, Literal, NoReturn, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    JsonValue,
    PlainSerializer,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from paceline.core.units import TIME_UNITS, TRAINING_UNITS, Duration, Unit

Auto = Literal["auto"]
Off = Literal["off"]
Switch = Literal["on", "off"]


class Section(BaseModel):
    """A frozen section of a recipe. Unknown keys are errors; the docstring of a field is its documentation."""

    # Not `use_attribute_docstrings`, which reads every source file at import: half of the time to the first line.
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, defer_build=True)

    added: ClassVar[tuple[str, ...]] = ()
    """Later fields: `Recipe.hash` leaves them out while they have their default, so that older recipes keep theirs."""

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema, with the docstrings of fields as their descriptions."""
        built = handler(schema)
        properties = handler.resolve_ref_schema(built)["properties"]
        for name, text in field_docs(cls).items():
            if handler.resolve_ref_schema(properties[name]).get("description") != text:
                properties[name]["description"] = text
        return built

    def is_set(self, field: str) -> bool:
        """Return whether `field` differs from its default."""
        return bool(getattr(self, field) != type(self).model_fields[field].default)


def as_section(value: object) -> object:
    """Convert `on` to the section's defaults."""
    if value in ("on", True):
        return {}
    return "off" if value is False else value


def field_docs(section: type[Section]) -> dict[str, str]:
    """Return the docstring of each field that has one, read from the source."""
    docs = {}
    for base in reversed(section.__mro__):
        if base is Section or not issubclass(base, Section):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as doc)):
                    docs[name] = inspect.cleandoc(doc)
    return docs


def refuse(path: str, message: str) -> NoReturn:
    """Raise the error of a validator over several sections for the field at `path`."""
    raise PydanticCustomError("refused", "{message}", {"path": path, "message": message})


def _parse(value: object, units: Sequence[Unit] = TRAINING_UNITS + TIME_UNITS) -> Duration:
    return value if isinstance(value, Duration) else Duration.parse(value, units)


def _parse_training(value: object) -> Duration:
    duration = _parse(value, TRAINING_UNITS)
    if duration.is_time:
        raise ValueError(f"'{duration}' is wall-clock time, which differs between machines (use ep, st, img or %)")
    return duration


def _parse_cadence(value: object) -> Duration:
    duration = _parse_training(value)
    if duration.value == 0:  # "off" says never
        raise ValueError(f"'{duration}' never happens (use 1st for every step)")
    return duration


def _parse_save_cadence(value: object) -> Duration:
    duration = _parse(value)
    return _parse_time(duration) if duration.is_time else _parse_cadence(duration)


def _parse_time(value: object) -> Duration:
    duration = _parse(value, TIME_UNITS)
    if not duration.is_time or duration.seconds <= 0:
        raise ValueError(f"'{duration}' is not a wall-clock time (use s, min or h)")
    return duration


def _annotated(parse: Any, pattern: str) -> Any:
    return Annotated[
        Duration,
        BeforeValidator(parse),
        PlainSerializer(str, return_type=str),
        WithJsonSchema({"type": "string", "pattern": pattern}),
    ]


TrainingDuration = _annotated(_parse_training, r"^\d+(\.\d+)?\s*(ep|st|img|%)$")
CadenceDuration = _annotated(_parse_cadence, r"^\d+(\.\d+)?\s*(ep|st|img|%)$")
TimeDuration = _annotated(_parse_time, r"^\d+(\.\d+)?\s*(s|min|h)$")
SaveCadenceDuration = _annotated(_parse_save_cadence, r"^\d+(\.\d+)?\s*(ep|st|img|%|s|min|h)$")


IMPORT_PATH_FORM: Final = "package.module:Name"
"""Tag of all import paths in unions and error messages."""
LIBRARIES: Final = ("torchvision", "timm")
"""Prefixes `LIBRARY:NAME` of models that are not import paths."""
# Only these modules of each library may be plugins: others download, compile or load code (`torch.hub`,
# `torch.utils.cpp_extension`, `torch.package`, `torch.jit`, `torch.load`, ...).
PLUGIN_MODULES: Final = {
    "torch": ("torch.nn", "torch.optim"),
    "timm": ("timm.models", "timm.layers", "timm.optim"),
    "torchvision": ("torchvision.models", "torchvision.ops", "torchvision.transforms"),
}
# Packages without components of a classifier that can load, download or evaluate code.
REFUSED_PACKAGES: Final = frozenset(
    (
        *("pip", "setuptools", "pkg_resources", "_distutils_hack", "wheel"),  # install code
        *("cloudpickle", "dill", "joblib", "numpy", "pandas", "sklearn", "scipy"),  # unpickle
        *("jinja2", "sympy", "numexpr", "numba", "cffi", "Cython", "triton", "torchgen", "functorch"),  # evaluate text
        *("fsspec", "s3fs", "huggingface_hub", "datasets", "transformers", "requests", "urllib3", "httpx"),  # download
        *("IPython", "ipykernel", "pytest", "_pytest", "dask", "mlflow", "wandb"),  # run code they are given
    )
)
_DOTTED_NAME: Final = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
PATH_PATTERN: Final = f"^{_DOTTED_NAME}:{_DOTTED_NAME}$"


def check_import_path(name: str) -> str:
    """Return `name`. Raise `ValueError` if it is not an import path, or names code that can load or run other code."""
    # Checked even with --trust-code, as a recipe may come from someone else.
    if not re.fullmatch(PATH_PATTERN, name):
        raise ValueError(f"{name!r} is not an import path (write {IMPORT_PATH_FORM})")
    top = re.split(r"[.:]", name, maxsplit=1)[0]
    if top in sys.stdlib_module_names:
        raise ValueError(
            f"{name!r} is in Python's standard library, which has no plugins (name another module; yours needs a name "
            f"that the standard library does not use)"
        )
    module = name.partition(":")[0]
    if refused := refusal_reason(module):
        raise ValueError(f"{name!r} cannot be a plugin: {refused} (name a class of your own module)")
    # Such as `mypkg:Model.__init__.__globals__`, which reaches any code.
    if "__" in (each[:2] for each in re.split(r"[.:]", name)[1:]):
        raise ValueError(f"{name!r} leads through a special name of Python (name a class or function)")
    return name


def refusal_reason(module: str) -> str:
    """Return why no plugin may come from the dotted `module`, or ""."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return f"{top} is in Python's standard library"
    if top in REFUSED_PACKAGES:
        return f"{top} can load, download or run code"
    allowed = PLUGIN_MODULES.get(top)
    if allowed is not None and not f"{module}.".startswith(tuple(f"{each}." for each in allowed)):
        return f"of {top} only {', '.join(allowed)} may be used, as {module} may load, download or run code"
    return ""


ImportPath = Annotated[
    str, AfterValidator(check_import_path), WithJsonSchema({"type": "string", "pattern": PATH_PATTERN})
]
Args = Annotated[dict[str, JsonValue], WithJsonSchema({"type": "object"})]
"""Keyword arguments, as plain YAML values."""


class PluginSection(Section):
    """Your own component, by its import path."""

    name: ImportPath
    """Module and name of the class or function, such as `mypkg.plugins:MyAugment`."""
    args: Args = Field({})
    """Keyword arguments, in addition to those that paceline passes."""


def is_plugin_name(name: str) -> bool:
    """Return whether `name` is an import path, not a model of torchvision or timm."""
    return bool(re.fullmatch(PATH_PATTERN, name)) and name.partition(":")[0] not in LIBRARIES


def _variant_of(value: object) -> str | None:
    """Return the variant that a section or a mapping selects by its name; all import paths are one variant."""
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    if name is None:
        return None
    return IMPORT_PATH_FORM if isinstance(name, str) and ":" in name else str(name)


class ByName:
    """Discriminate a union of sections by `name`; the member without a default name takes import paths."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the core schema of the tagged union."""
        choices: dict[Any, CoreSchema] = {
            default_name(variant): handler.generate_schema(variant) for variant in get_args(source)
        }
        return core_schema.tagged_union_schema(choices, discriminator=_variant_of)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema with OpenAPI's discriminator."""
        union = handler(schema)
        names = (handler.resolve_ref_schema(ref)["properties"]["name"] for ref in union["oneOf"])
        mapping = {
            name.get("const", IMPORT_PATH_FORM): ref["$ref"] for name, ref in zip(names, union["oneOf"], strict=True)
        }
        return {"discriminator": {"mapping": mapping, "propertyName": "name"}, **union}


def default_name(variant: type[BaseModel]) -> str:
    """Return the name that selects a section among its variants; all import paths are one variant."""
    field = variant.model_fields["name"]
    return IMPORT_PATH_FORM if field.is_required() else str(field.default)


class _NameJsonSchema:
    """Allow a bare name or import path in the JSON schema, as `ACCEPT_NAME` does in validation."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        variants = handler(schema)
        mapping = variants.get("discriminator", {}).get("mapping", {})
        names = [name for name in mapping if name != IMPORT_PATH_FORM]
        enum = [{"enum": names}] if names else []
        return {"anyOf": [*enum, {"type": "string", "pattern": PATH_PATTERN}, variants]}


def _section_from_name(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


ACCEPT_NAME = BeforeValidator(_section_from_name)
NAME_JSON_SCHEMA = _NameJsonSchema()
