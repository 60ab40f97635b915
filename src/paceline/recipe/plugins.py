"""Import your own models, data sources, optimizers, augmentations and sinks, and identify their code."""

import hashlib
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final

from paceline.core.errors import PacelineError, RecipeError, suggest_similar
from paceline.core.files import read_bytes
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.augment import OwnAugment
from paceline.recipe.schema.base import LIBRARIES, is_own_model, why_refused
from paceline.recipe.schema.optim import OwnOptim
from paceline.recipe.schema.source import OwnSource
from paceline.recipe.schema.train import OwnSink

_MAIN: Final = "__main__"
_MAX_SHOWN: Final = 200
_INSTALLED_PATHS: Final = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))


@dataclass(frozen=True)
class PluginContract:
    """The arguments that paceline passes to a plugin, and the attributes that the result must have.

    `leading` are passed by position, `given` by name, in addition to `args`. `methods` maps each required attribute to
    its signature, for error messages.
    """

    what: str
    given: tuple[str, ...] = ()
    leading: tuple[str, ...] = ()
    methods: Mapping[str, str] = field(default_factory=dict)

    @property
    def call(self) -> str:
        """The signature of the call, as you would define it."""
        return f"({', '.join((*self.leading, *self.given, '**args'))})"


MODEL: Final = PluginContract("a model", ("num_classes", "in_channels"))
SOURCE: Final = PluginContract("a data source", ("split",))
OPTIMIZER: Final = PluginContract("an optimizer", ("lr",), ("groups",))
AUGMENT: Final = PluginContract(
    "an augmentation",
    methods={"num_draws": "num_draws: int", "__call__": "def __call__(self, images, draws) -> images"},
)
SINK: Final = PluginContract(
    "a sink",
    ("run_dir",),
    methods={
        "started": "def started(self, plan, step)",
        "step": "def step(self, record)",
        "evaluated": "def evaluated(self, record)",
        "warned": "def warned(self, message)",
        "finished": "def finished(self, result)",
        "close": "def close(self)",
    },
)


@dataclass(frozen=True)
class PluginRef:
    """A plugin named in a recipe: its dotted `path` there, its import path, and its keyword arguments."""

    path: str
    name: str
    args: Mapping[str, Any]
    contract: PluginContract

    def load(self) -> Callable[..., Any]:
        """Import the class or function without calling it. Raise `RecipeError` if it is missing or does not fit."""
        maker = load_object(self.name, f"{self.path}.name")
        if self.contract.methods:
            # Only a class can be checked for attributes before it is called.
            if not isinstance(maker, type):
                raise self.error(f"is of type {type(maker).__name__}, and {self.contract.what} is a class (name one)")
            self._require(maker)
        self._check_parameters(maker)
        return maker

    def make(self, *leading: Any, **given: Any) -> Any:
        """Create the plugin. Raise `RecipeError` if it cannot be imported, raises, or lacks a required attribute."""
        maker = self.load()
        try:
            plugin = maker(*leading, **given, **self.args)
            self._require(plugin)
        except PacelineError:
            raise
        except Exception as error:
            raise RecipeError(f"{self.path}.name: {self.name} raised {describe_error(error)} (fix it)") from error
        return plugin

    def error(self, what: str) -> RecipeError:
        """Return the error for a plugin that breaks its contract."""
        return RecipeError(f"{self.path}.name: {self.name} {what}")

    def _require(self, part: object) -> None:
        """Raise `RecipeError` for the first required attribute that `part` lacks."""
        for name, signature in self.contract.methods.items():
            is_attribute = not signature.startswith("def ")  # a class may set attributes when it is called
            if not (_has_member(part, name) or (is_attribute and isinstance(part, type))):
                raise self.error(f"has no {name}, which {self.contract.what} needs (add: {signature})")

    def _check_parameters(self, maker: Callable[..., Any]) -> None:
        """Raise `RecipeError` if `maker` does not accept the arguments it will be called with."""
        parameters, given = _parameters_of(maker, len(self.contract.leading)), self.contract.given
        if parameters is None:
            return
        refused = [name for name in given if not parameters.takes(name)]
        if refused:
            whole = f"{self.name.rpartition(':')[2]}{self.contract.call}"
            lacking = f"does not take {', '.join(refused)}, which {self.contract.what} is called with"
            raise self.error(f"{lacking} (define {whole})")
        extra = [name for name in parameters.names if name not in given]
        for name in self.args:
            if name in given:
                raise RecipeError(f"{self.path}.args.{name}: is given by paceline (leave it out)")
            if not parameters.takes(name):
                hint = suggest_similar(name, extra) or f" (it has {', '.join(extra) or 'none'})"
                raise RecipeError(f"{self.path}.args.{name}: is not an argument of {self.name}{hint}")
        for name in parameters.needed:
            if name not in (*given, *self.args):
                raise RecipeError(
                    f"{self.path}.args.{name}: is needed by {self.name} (set {self.path}.args.{name}=...)"
                )


@dataclass(frozen=True)
class _Parameters:
    """The parameters of a class or function: all names, those without a default, and whether it has `**kwargs`."""

    names: tuple[str, ...]
    needed: tuple[str, ...]
    takes_any: bool

    def takes(self, name: str) -> bool:
        return self.takes_any or name in self.names


def _parameters_of(maker: Callable[..., Any], num_leading: int) -> _Parameters | None:
    """Return the parameters of `maker` after its leading ones; None if its signature is unknown, as for some C
    functions."""
    try:
        parameters = list(inspect.signature(maker).parameters.values())
    except (TypeError, ValueError):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = [parameter for parameter in parameters[num_leading:] if parameter.kind in by_name]
    needed = tuple(parameter.name for parameter in named if parameter.default is parameter.empty)
    return _Parameters(tuple(parameter.name for parameter in named), needed, takes_any)


def plugins_of(recipe: Recipe) -> Iterator[PluginRef]:
    """Yield the plugins that `recipe` names."""
    model, source, optim = recipe.model, recipe.data.source, recipe.optim
    if is_own_model(model.name):
        yield PluginRef("model", model.name, model.args, MODEL)
    if isinstance(source, OwnSource):
        yield PluginRef("data.source", source.name, source.args, SOURCE)
    if isinstance(optim, OwnOptim):
        yield PluginRef("optim", optim.name, optim.args, OPTIMIZER)
    for position, section in enumerate(recipe.data.augment):
        if isinstance(section, OwnAugment):
            yield PluginRef(f"data.augment[{position}]", section.name, section.args, AUGMENT)
    for position, sink in enumerate(recipe.log.sinks):
        if isinstance(sink, OwnSink):
            yield PluginRef(f"log.sinks[{position}]", sink.name, sink.args, SINK)


def check_plugins(recipe: Recipe) -> None:
    """Import every plugin of `recipe` without calling it. Raise `RecipeError` for one that cannot be used."""
    for plugin in plugins_of(recipe):
        plugin.load()


def load_object(name: str, path: str) -> Callable[..., Any]:
    """Import and return the callable at `package.module:Name`. Raise `RecipeError`, for the field `path`, if that
    fails, or if it leads to code that loads or runs other code, such as `torch.hub`."""
    module_name, _, attribute = name.partition(":")
    value: Any = _module(module_name, name, path)
    for name_part in attribute.split("."):
        value = _attribute(value, name_part, name, path)
    if not callable(value):
        raise RecipeError(f"{path}: {name} is of type {type(value).__name__}, which cannot be called (name a class)")
    origin = getattr(value, "__module__", None)
    if (inspect.isclass(value) or inspect.isroutine(value)) and (refused := why_refused(origin or "")):
        what = f"is {origin}:{getattr(value, '__qualname__', attribute)}, which cannot be a plugin: {refused}"
        raise RecipeError(f"{path}: {name} {what} (name a class of your own module)")
    maker: Callable[..., Any] = value
    return maker


def path_of(part: object, field: str) -> str:
    """Return the import path of `part`, a class or a function, for a recipe; a path is returned unchanged. Raise
    `RecipeError`, for `field`, for an object without an importable name."""
    if isinstance(part, str):
        return part
    module, name = getattr(part, "__module__", None), getattr(part, "__qualname__", None)
    if not callable(part) or module is None or name is None:
        fix = "name its class or a factory function"
        raise RecipeError(f"{field}: {type(part).__name__} is an object, not a class or function ({fix})")
    if "<" in name:
        reason = "it is a lambda" if name.endswith("<lambda>") else "it is defined in a function"
        raise RecipeError(
            f"{field}: {name} has no name by which a run could be resumed: {reason} (define it in a module)"
        )
    # The running script goes by its file name, so that a later run can import it.
    path = f"{_name_of_main() if module == _MAIN else module}:{name}"
    if load_object(path, field) is not part:
        raise RecipeError(f"{field}: {path} is another object now (pass the current {name})")
    return path


def describe_error(error: BaseException) -> str:
    """Return an exception of a user's code, with its location, on one line."""
    text = " ".join(str(error).split())[:_MAX_SHOWN]
    return f"{type(error).__name__}: {text}{_error_location(error, error.__traceback__)}"


def _error_location(error: BaseException, trace: TracebackType | None) -> str:
    """Return ` at FILE:LINE` of the innermost frame in the user's code, or else in a package."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {error.filename}:{error.lineno}"
    frames = [
        frame for frame in traceback.extract_tb(trace) if frame.filename != __file__ and "<" not in frame.filename
    ]
    user_frames = [frame for frame in frames if not frame.filename.startswith(_INSTALLED_PATHS)]
    return "".join(f" at {frame.filename}:{frame.lineno}" for frame in (user_frames or frames)[-1:])


def _module(module: str, name: str, path: str) -> ModuleType:
    if module == _name_of_main():  # do not run the script again under another name
        return sys.modules[_MAIN]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        absent = error.name or ""
        if module == absent or module.startswith(f"{absent}."):
            raise RecipeError(f"{path}: {name}: there is no module {absent}{_module_location(absent)}") from None
        raise RecipeError(f"{path}: {name}: importing {module} raised {describe_error(error)} (install it)") from error
    except (Exception, SystemExit) as error:
        raise RecipeError(f"{path}: {name}: importing {module} raised {describe_error(error)} (fix it)") from error


def _attribute(owner: Any, attribute_name: str, name: str, path: str) -> Any:
    """Return the attribute `part` of `found`, a module or a class. Raise `RecipeError` if there is none."""
    module_name, _, attribute = name.partition(":")
    try:
        if _has_member(owner, attribute_name):
            owner = getattr(owner, attribute_name)
            if not isinstance(owner, ModuleType):
                return owner
            reason = f"{attribute} leads through the module {owner.__name__} (name the module it is in)"
        elif module_name == _MAIN:
            reason = "it was defined in a notebook, a terminal or a file that cannot be imported (move it to a module)"
        else:
            reason = f"{module_name} has no {attribute}{suggest_similar(attribute_name, dir(owner)) or ' (correct it)'}"
    except Exception as error:  # some packages import attributes lazily
        reason = f"looking for {attribute} raised {describe_error(error)} (install what it needs, or correct it)"
    raise RecipeError(f"{path}: {name}: {reason}")


def _module_location(module: str) -> str:
    """Return the hint for a module that cannot be imported."""
    top = module.partition(".")[0]
    if module != top:
        return " (correct it, or install it)"
    if Path(f"{top}.py").is_file() or Path(top, "__init__.py").is_file():
        return " on the path, though it is in this folder (put PYTHONPATH=. before the command)"
    return suggest_similar(top, LIBRARIES) or " (install it, or put PYTHONPATH=ITS_FOLDER before the command)"


def _name_of_main() -> str:
    """Return the module name of the running script; `__main__` if it has none, as in a notebook."""
    main = sys.modules[_MAIN]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return str(spec.name)
    script = Path(file or "")
    return script.stem if script.suffix == ".py" and script.stem.isidentifier() else _MAIN


def _has_member(part: object, name: str) -> bool:
    """Whether `part` has the attribute `name`."""
    if isinstance(part, type):
        # Look in the classes' own definitions: every class has its metaclass's `__call__`.
        return any(name in vars(base) for base in part.__mro__)
    try:
        getattr(part, name)
    except AttributeError:
        return False
    return True


def code_identity(recipe: Recipe) -> dict[str, dict[str, str]]:
    """Return `file`, `sha256` and `package` of each plugin of `recipe`, as far as known. Imports them. Raise
    `RecipeError` for one that cannot be used."""
    # Code from a notebook has no file. `package` is the distribution with the name of the top module.
    return {plugin.name: _identify(plugin.load()) for plugin in plugins_of(recipe)}


def changed_code(before: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> list[str]:
    """Return the plugins whose file differs between `before` and `now`, in order."""
    both = ((name, before.get(name, {}).get("sha256"), each.get("sha256")) for name, each in now.items())
    return [name for name, old, new in both if None not in (old, new) and old != new]


def stale_code(recorded: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the plugins whose file or package version no longer matches `recorded`, a result of `code_identity`.
    Imports nothing."""
    return [name for name, each in recorded.items() if any(_is_stale(each))]


def _is_stale(each: Mapping[str, str]) -> Iterator[bool]:
    if "file" in each:
        try:
            yield hashlib.sha256(read_bytes(Path(each["file"]))).hexdigest() != each.get("sha256")
        except OSError:
            yield True
    if "package" in each:
        try:
            top = each["package"].partition(" ")[0]
            yield f"{top} {version(top)}" != each["package"]
        except (PackageNotFoundError, ValueError):
            yield True


def _identify(maker: Callable[..., Any]) -> dict[str, str]:
    identity: dict[str, str] = {}
    try:
        file = Path(inspect.getsourcefile(maker) or "")
        identity = {"file": str(file), "sha256": hashlib.sha256(read_bytes(file)).hexdigest()}
    except (OSError, TypeError):  # no file, or written in C
        pass
    top = str(getattr(maker, "__module__", "")).partition(".")[0]
    try:
        return {**identity, "package": f"{top} {version(top)}"}
    except (PackageNotFoundError, ValueError):
        return identity
