"""Import plugins (models, data sources, samplers, optimizers, callbacks, ...), and record which code they are."""

import contextlib
import hashlib
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final

from paceline.core.errors import PacelineError, RecipeError, suggest_similar
from paceline.core.files import read_bytes
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.augment import OwnAugment
from paceline.recipe.schema.base import LIBRARIES, is_plugin_name, refusal_reason
from paceline.recipe.schema.optim import OwnOptim
from paceline.recipe.schema.sampler import OwnSampler
from paceline.recipe.schema.source import OwnSource
from paceline.recipe.schema.train import OwnLoss, OwnSink, Train

_MAIN: Final = "__main__"
_MAX_ERROR_CHARS: Final = 200
_INSTALLED_PATHS: Final = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))


@dataclass(frozen=True)
class PluginContract:
    """The arguments that paceline passes to a plugin, and the attributes that the result must have.

    `positional` and `keyword` are passed in addition to the recipe's `args`. `methods` maps each required attribute to
    its signature, for error messages. `takes_args` is whether the recipe can give it arguments.
    With `may_be_class` a class is called with `args`, and its object with `positional`.
    """

    kind: str
    keyword: tuple[str, ...] = ()
    positional: tuple[str, ...] = ()
    methods: Mapping[str, str] = field(default_factory=dict)
    takes_args: bool = True
    may_be_class: bool = False

    @property
    def call(self) -> str:
        """The signature that the plugin needs, for error messages."""
        args = ("**args",) if self.takes_args else ()
        return f"({', '.join((*self.positional, *self.keyword, *args))})"


MODEL: Final = PluginContract("a model", ("num_classes", "in_channels"))
SOURCE: Final = PluginContract("a data source", ("split",))
OPTIMIZER: Final = PluginContract("an optimizer", ("lr",), ("groups",))
AUGMENT: Final = PluginContract(
    "an augmentation",
    methods={"num_draws": "num_draws: int", "__call__": "def __call__(self, images, draws) -> images"},
)
SAMPLER: Final = PluginContract(
    "a sampler", methods={"__call__": "def __call__(self, seed, epoch, num_images) -> indices"}
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
CALLBACK: Final = PluginContract(
    "a callback",
    methods={
        name: f"def {name}(self, view), or derive it from paceline.training.callbacks.Callback"
        for name in ("started", "step_ended", "epoch_ended", "evaluated", "finished")
    },
)
LOSS: Final = PluginContract("a loss", (), ("logits", "targets"), may_be_class=True)
METRIC: Final = PluginContract("a metric", (), ("scores", "labels"), takes_args=False)


@dataclass(frozen=True)
class PluginRef:
    """A plugin in a recipe: its dotted `path` there, its import path `name`, and its keyword arguments."""

    path: str
    name: str
    args: Mapping[str, Any]
    contract: PluginContract

    @property
    def field(self) -> str:
        """The dotted path of the field with the import path."""
        return f"{self.path}.name" if self.contract.takes_args else self.path

    def load(self) -> Callable[..., Any]:
        """Import the class or function without calling it. Raise `RecipeError` if that fails or it does not fit."""
        factory = load_object(self.name, self.field)
        if self.contract.methods:
            # Only a class can be checked for methods before it is called.
            if not isinstance(factory, type):
                raise self.error(f"is of type {type(factory).__name__}, and {self.contract.kind} is a class (name one)")
            self._check_members(factory)
        self._check_parameters(factory)
        return factory

    def make(self, *positional: Any, **keyword: Any) -> Any:
        """Call the plugin. Raise `RecipeError` if it cannot be imported, raises, or lacks an attribute."""
        factory = self.load()
        with self.reporting():
            plugin = factory(*positional, **keyword, **self.args)
            self._check_members(plugin)
        return plugin

    @contextlib.contextmanager
    def reporting(self, method: str = "") -> Iterator[None]:
        """Raise `RecipeError` for what the plugin's code raises here, in `method` such as `.started`, and for its exit.

        A `PacelineError` passes: it is a message of the plugin's own.
        """
        try:
            yield
        except PacelineError:
            raise
        except (Exception, SystemExit) as error:
            raise RecipeError(f"{self.field}: {self.name}{method} raised {describe_error(error)} (fix it)") from error

    def error(self, problem: str) -> RecipeError:
        """Return the error for a plugin that breaks its contract."""
        return RecipeError(f"{self.field}: {self.name} {problem}")

    def _check_members(self, plugin: object) -> None:
        for name, signature in self.contract.methods.items():
            is_attribute = not signature.startswith("def ")  # which a class may set in its constructor
            if not (_has_member(plugin, name) or (is_attribute and isinstance(plugin, type))):
                raise self.error(f"has no {name}, which {self.contract.kind} needs (add: {signature})")

    def _check_parameters(self, factory: Callable[..., Any]) -> None:
        """Raise `RecipeError` if `factory` does not accept the arguments it will be called with."""
        try:
            parameters = list(inspect.signature(factory).parameters.values())
        except (TypeError, ValueError):  # some C functions have no signature
            return
        positional = () if self.contract.may_be_class and isinstance(factory, type) else self.contract.positional
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = [each for each in parameters[len(positional) :] if each.kind in by_name]
        names, keyword = [each.name for each in named], self.contract.keyword
        taken = [each for each in parameters if each.kind in (*by_name, inspect.Parameter.POSITIONAL_ONLY)]
        needed = len(positional)
        if len(taken) < needed and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
            signature = f"{self.name.rpartition(':')[2]}{self.contract.call}"
            raise self.error(
                f"takes {len(taken)} of the {needed} arguments of {self.contract.kind} (define {signature})"
            )
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
        refused = [name for name in keyword if not takes_any and name not in names]
        if refused:
            signature = f"{self.name.rpartition(':')[2]}{self.contract.call}"
            lacking = f"does not take {', '.join(refused)}, which {self.contract.kind} is called with"
            raise self.error(f"{lacking} (define {signature})")
        extra = [name for name in names if name not in keyword]
        for name in self.args:
            if name in keyword:
                raise RecipeError(f"{self.path}.args.{name}: is given by paceline (leave it out)")
            if not takes_any and name not in names:
                hint = suggest_similar(name, extra) or f" (it has {', '.join(extra) or 'none'})"
                raise RecipeError(f"{self.path}.args.{name}: is not an argument of {self.name}{hint}")
        for each in named:
            if each.default is each.empty and each.name not in (*keyword, *self.args):
                if not self.contract.takes_args:
                    raise self.error(f"needs {each.name}, which is not given (add a default)")
                path = f"{self.path}.args.{each.name}"
                raise RecipeError(f"{path}: is needed by {self.name} (set {path}=...)")


def plugins_of(recipe: Recipe) -> Iterator[PluginRef]:
    """Yield the plugins that `recipe` names."""
    model, source, optim = recipe.model, recipe.data.source, recipe.optim
    if is_plugin_name(model.name):
        yield PluginRef("model", model.name, model.args, MODEL)
    if isinstance(source, OwnSource):
        yield PluginRef("data.source", source.name, source.args, SOURCE)
    if isinstance(recipe.data.sampler, OwnSampler):
        yield PluginRef("data.sampler", recipe.data.sampler.name, recipe.data.sampler.args, SAMPLER)
    if isinstance(optim, OwnOptim):
        yield PluginRef("optim", optim.name, optim.args, OPTIMIZER)
    yield from _plugins_of_training(recipe.train)
    for position, section in enumerate(recipe.data.augment):
        if isinstance(section, OwnAugment):
            yield PluginRef(f"data.augment[{position}]", section.name, section.args, AUGMENT)
    for position, sink in enumerate(recipe.log.sinks):
        if isinstance(sink, OwnSink):
            yield PluginRef(f"log.sinks[{position}]", sink.name, sink.args, SINK)


def _plugins_of_training(train: Train) -> Iterator[PluginRef]:
    if isinstance(train.loss, OwnLoss):
        yield PluginRef("train.loss", train.loss.name, train.loss.args, LOSS)
    for position, name in enumerate(train.metrics):
        if is_plugin_name(name):
            yield PluginRef(f"train.metrics[{position}]", name, {}, METRIC)
    if is_plugin_name(train.monitor) and train.monitor not in train.metrics:
        yield PluginRef("train.monitor", train.monitor, {}, METRIC)
    for position, section in enumerate(train.callbacks):
        yield PluginRef(f"train.callbacks[{position}]", section.name, section.args, CALLBACK)


def check_plugins(recipe: Recipe) -> None:
    """Import every plugin of `recipe` without calling it. Raise `RecipeError` if one cannot be used."""
    for plugin in plugins_of(recipe):
        plugin.load()


def load_object(name: str, path: str) -> Callable[..., Any]:
    """Import and return the callable at `package.module:Name`.

    Raise `RecipeError` for the field `path` if that fails, or if it is code that can load or run other code.
    """
    module_name, _, attribute = name.partition(":")
    value: Any = _module(module_name, name, path)
    for name_part in attribute.split("."):
        value = _attribute(value, name_part, name, path)
    if not callable(value):
        raise RecipeError(f"{path}: {name} is of type {type(value).__name__}, which cannot be called (name a class)")
    # A module may re-export a function such as torch.hub.load under a harmless path, so check where it was defined.
    origin = getattr(value, "__module__", None)
    if (inspect.isclass(value) or inspect.isroutine(value)) and (refused := refusal_reason(origin or "")):
        problem = f"is {origin}:{getattr(value, '__qualname__', attribute)}, which cannot be a plugin: {refused}"
        raise RecipeError(f"{path}: {name} {problem} (name a class of your own module)")
    factory: Callable[..., Any] = value
    return factory


def path_of(plugin: object, field: str) -> str:
    """Return the import path of a class or function; a string is returned unchanged.

    Raise `RecipeError` for `field` if it cannot be imported by that path, so that the run could be resumed.
    """
    if isinstance(plugin, str):
        return plugin
    module, name = getattr(plugin, "__module__", None), getattr(plugin, "__qualname__", None)
    if not callable(plugin) or module is None or name is None:
        fix = "name its class or a factory function"
        raise RecipeError(f"{field}: {type(plugin).__name__} is an object, not a class or function ({fix})")
    if "<" in name:
        reason = "it is a lambda" if name.endswith("<lambda>") else "it is defined in a function"
        raise RecipeError(
            f"{field}: {name} has no name by which a run could be resumed: {reason} (define it in a module)"
        )
    # The running script goes by its file name, so that a later run can import it.
    path = f"{_name_of_main() if module == _MAIN else module}:{name}"
    if load_object(path, field) is not plugin:
        raise RecipeError(f"{field}: {path} is another object now (pass the current {name})")
    return path


def describe_error(error: BaseException) -> str:
    """Return an exception of a plugin and its location on one line."""
    text = " ".join(str(error).split())[:_MAX_ERROR_CHARS]
    return f"{type(error).__name__}: {text}{_error_location(error, error.__traceback__)}"


def _error_location(error: BaseException, trace: TracebackType | None) -> str:
    """Return ` at FILE:LINE` of the innermost frame of the user's code, or else of any package."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {error.filename}:{error.lineno}"
    # Without paceline's call of the plugin, and code from strings.
    frames = [
        frame for frame in traceback.extract_tb(trace) if frame.filename != __file__ and "<" not in frame.filename
    ]
    user_frames = [frame for frame in frames if not frame.filename.startswith(_INSTALLED_PATHS)]
    return "".join(f" at {frame.filename}:{frame.lineno}" for frame in (user_frames or frames)[-1:])


def _module(module: str, name: str, path: str) -> ModuleType:
    if module == _name_of_main():  # importing it would run the script a second time
        return sys.modules[_MAIN]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        absent = error.name or ""
        # The plugin's own module is missing, not one that it imports.
        if module == absent or module.startswith(f"{absent}."):
            raise RecipeError(f"{path}: {name}: there is no module {absent}{_module_location(absent)}") from None
        raise RecipeError(f"{path}: {name}: importing {module} raised {describe_error(error)} (install it)") from error
    except (Exception, SystemExit) as error:  # a script without a main guard may exit when it is imported
        raise RecipeError(f"{path}: {name}: importing {module} raised {describe_error(error)} (fix it)") from error


def _attribute(owner: Any, attribute_name: str, name: str, path: str) -> Any:
    """Return an attribute of a module or class. Raise `RecipeError` if there is none."""
    module_name, _, attribute = name.partition(":")
    try:
        if _has_member(owner, attribute_name):
            owner = getattr(owner, attribute_name)
            # Through a module, such as mypkg:os.system, any code could be reached.
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


def _has_member(owner: object, name: str) -> bool:
    if isinstance(owner, type):
        # Not `hasattr`: every class has the `__call__` of its metaclass.
        return any(name in vars(base) for base in owner.__mro__)
    try:
        getattr(owner, name)
    except AttributeError:
        return False
    return True


def code_identity(recipe: Recipe, field: str = "") -> dict[str, dict[str, str]]:
    """Import the plugins of `recipe`, or of one field; return `file`, `sha256` and `package` of each, if known.

    Raise `RecipeError`.
    """
    # Code in a notebook has no file. `package` is the distribution named like the top module, with its version.
    return {plugin.name: _identify(plugin.load()) for plugin in plugins_of(recipe) if field in ("", plugin.path)}


def changed_code(before: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> list[str]:
    """Return the plugins whose file differs between two results of `code_identity`."""
    both = ((name, before.get(name, {}).get("sha256"), each.get("sha256")) for name, each in now.items())
    return [name for name, old, new in both if None not in (old, new) and old != new]  # unknown code is not compared


def stale_code(recorded: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the plugins that no longer match `recorded`, a result of `code_identity`, without importing them."""
    stale = []
    for name, before in recorded.items():
        now = _identify_file(before.get("file", ""), before.get("package", "").partition(" ")[0])
        if any(now.get(key) != value for key, value in before.items()):
            stale.append(name)
    return stale


def unwrap_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function or class of a `functools.partial`; anything else is returned unchanged."""
    while isinstance(function, partial):
        function = function.func
    return function


def _identify(factory: Callable[..., Any]) -> dict[str, str]:
    factory = unwrap_partial(factory)
    if not (inspect.isclass(factory) or inspect.isroutine(factory)):
        factory = type(factory)
    try:
        file = inspect.getsourcefile(factory) or ""
    except (OSError, TypeError):  # in a notebook, or written in C
        file = ""
    return _identify_file(file, str(getattr(factory, "__module__", "")).partition(".")[0])


def _identify_file(file: str, package: str) -> dict[str, str]:
    """Return the digest of `file` and the version of the distribution `package`, as far as they are known."""
    identity: dict[str, str] = {}
    if file:
        with suppress(OSError):
            identity = {"file": file, "sha256": hashlib.sha256(read_bytes(Path(file))).hexdigest()}
    with suppress(PackageNotFoundError, ValueError):
        identity["package"] = f"{package} {version(package)}"
    return identity
