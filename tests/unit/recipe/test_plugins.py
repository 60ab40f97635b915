"""`recipe.plugins`: plugins are imported by path and called by their contract; a violation is one line."""

import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest

from paceline.core.errors import RecipeError
from paceline.recipe.load import Patch, load, load_values
from paceline.recipe.plugins import (
    AUGMENT,
    MODEL,
    OPTIMIZER,
    SINK,
    SOURCE,
    PluginRef,
    check_plugins,
    load_object,
    path_of,
)
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.augment import Flip, OwnAugment
from paceline.recipe.schema.model import Model
from paceline.recipe.schema.optim import OwnOptim
from paceline.recipe.schema.source import OwnSource
from paceline.training.logging.base import LogSink

PARTS = """
class Net:
    def __init__(self, num_classes, in_channels, depth=2, width=8): self.made = (num_classes, in_channels, depth, width)
class Narrow:
    def __init__(self, num_classes): pass
class Needy:
    def __init__(self, num_classes, in_channels, depth): pass
class Sink:
    def __init__(self, run_dir): pass
    def started(self, plan, step): pass
class Change:
    def __init__(self): self.num_draws = 1
    def __call__(self, images, draws): return images
class Mute:
    num_draws = 0
def any_words(**words): return words
def broken(**words): raise LookupError("no such file")
class Outer:
    class Inner: pass
def groups_first(groups, lr, eps=1.0): return (groups, lr, eps)
number = 3
called = []
def change_maker(**words): called.append(words)
def __getattr__(name):
    if name == "Late": raise RuntimeError("cannot be imported")
    raise AttributeError(name)
class Shy(Change):
    @property
    def num_draws(self): raise OSError("gone")
    @num_draws.setter
    def num_draws(self, value): pass
import xml.dom
"""


@pytest.fixture
def parts(tmp_path, monkeypatch) -> str:
    """Return the name of a module of parts, which is on the path."""
    name = f"parts_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(PARTS)
    (tmp_path / "outside").mkdir()
    monkeypatch.chdir(tmp_path / "outside")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def own(parts: str, name: str, contract=MODEL, path="model", **args) -> PluginRef:
    return PluginRef(path, f"{parts}:{name}", args, contract)


def test_a_part_is_called_with_what_is_given_and_its_args(parts) -> None:
    assert own(parts, "Net", depth=5).make(num_classes=10, in_channels=3).made == (10, 3, 5, 8)
    assert own(parts, "groups_first", OPTIMIZER, "optim", eps=2.0).make([1], lr=0.5) == ([1], 0.5, 2.0)


def test_plugins_with_kwargs_and_nested_plugins_load(parts) -> None:
    assert own(parts, "any_words", x=1).make(num_classes=2, in_channels=1) == {
        "num_classes": 2,
        "in_channels": 1,
        "x": 1,
    }
    assert load_object(f"{parts}:Outer.Inner", "model.name").__qualname__ == "Outer.Inner"


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("Nett", {}, "model.name: PARTS:Nett: PARTS has no Nett (did you mean 'Net'?)"),
        ("number", {}, "model.name: PARTS:number is of type int, which cannot be called (name a class)"),
        ("number.foo", {}, "model.name: PARTS:number.foo: PARTS has no number.foo (correct it)"),
        (
            "Late",
            {},
            "model.name: PARTS:Late: looking for Late raised RuntimeError: cannot be imported at FILE:LINE "
            "(install what it needs, or correct it)",
        ),
        (
            "xml.dom.Node",
            {},
            "model.name: PARTS:xml.dom.Node: xml.dom.Node leads through the module xml (name the module it is in)",
        ),
        (
            "Narrow",
            {},
            "model.name: PARTS:Narrow does not take in_channels, which a model is called with "
            "(define Narrow(num_classes, in_channels, **args))",
        ),
        ("Net", {"depht": 1}, "model.args.depht: is not an argument of PARTS:Net (did you mean 'depth'?)"),
        ("Net", {"zz": 1}, "model.args.zz: is not an argument of PARTS:Net (it has depth, width)"),
        ("Net", {"in_channels": 1}, "model.args.in_channels: is given by paceline (leave it out)"),
        ("Needy", {}, "model.args.depth: is needed by PARTS:Needy (set model.args.depth=...)"),
    ],
)
def test_a_plugin_with_the_wrong_parameters_is_refused_without_calling_it(
    parts, refusal, tmp_path, name, args, says
) -> None:
    line = next(at for at, text in enumerate(PARTS.splitlines(), start=1) if '"Late"' in text)
    says = says.replace("PARTS", parts).replace("FILE:LINE", f"{tmp_path}/{parts}.py:{line}")
    assert refusal(own(parts, name, **args).load) == says


@pytest.mark.parametrize(("contract", "path"), [(AUGMENT, "data.augment[0]"), (SINK, "log.sinks[0]")])
def test_a_function_is_refused_as_a_plugin_with_methods_and_is_not_called(parts, refusal, contract, path) -> None:
    made = own(parts, "change_maker", contract, path, command="rm")
    assert refusal(made.make, run_dir="x") == (
        f"{path}.name: {parts}:change_maker is of type function, and {contract.kind} is a class (name one)"
    )
    assert sys.modules[parts].called == []


def test_an_error_of_an_attribute_is_reported(parts, refusal) -> None:
    message = refusal(own(parts, "Shy", AUGMENT, "data.augment[0]").make)
    assert message.startswith(f"data.augment[0].name: {parts}:Shy raised OSError: gone at ")


def test_a_sink_needs_the_methods_that_runs_call() -> None:
    methods = {name: inspect.signature(each) for name, each in vars(LogSink).items() if not name.startswith("_")}
    assert methods, "the protocol has methods"
    own_words = {name: f"def {name}({', '.join(signature.parameters)})" for name, signature in methods.items()}
    assert SINK.methods == own_words


@pytest.mark.parametrize(
    "word",
    [
        "data.augment=[{name: 'os:system', args: {command: ls}}]",
        "data.source.name=subprocess:check_output",
        "model.name=os.path:join",
        "optim={name: 'builtins:dict', lr: 0.1}",
        "log.sinks=['json:loads']",
    ],
)
def test_pythons_own_library_has_no_parts(refusal, word) -> None:
    message = refusal(load, "digits", Patch.parse([word]))
    assert "is in Python's standard library, which has no plugins (name another module; yours" in message
    assert message.startswith(word.partition("=")[0].partition(".name")[0])


@pytest.mark.parametrize(
    "name",
    [
        *(
            "torch.hub:load",
            "torch:load",
            "torch:hub.load",
            "torch.utils.cpp_extension:load",
            "torch.serialization:load",
        ),
        *("torch.package:PackageImporter", "torch.jit:load", "torch.optimizers:Adam", "torchvision.datasets:CIFAR10"),
        *("timm.data:create_dataset", "timm:create_model.x", "numpy:load", "joblib:load", "cloudpickle:loads"),
        *(
            "pip:main",
            "setuptools:setup",
            "pkg_resources:run_script",
            "fsspec:open",
            "torch.nn:Linear.__init__.__globals__",
        ),
        *("datasets:load_dataset", "transformers:pipeline", "sympy:sympify", "mypkg:__builtins__.exec"),
    ],
)
def test_modules_that_load_or_download_code_are_no_plugins(refusal, name) -> None:
    for word in (f"data.source.name={name}", f"optim={{name: '{name}', lr: 0.1}}", f"log.sinks=['{name}']"):
        message = refusal(load, "digits", Patch.parse([word]))
        assert name in message and ("own module)" in message or "(name a class or function)" in message)


@pytest.mark.parametrize(
    "name", ["torch.optim:Adagrad", "torch.optim.adamw:AdamW", "torch.nn:Linear", "timm.optim:Lion"]
)
def test_parts_of_torch_and_timm_stay(name) -> None:
    assert load("digits", Patch.parse([f"optim={{name: '{name}', lr: 0.1}}"])).recipe.optim.name == name


def test_a_module_that_passes_on_what_loads_code_is_seen_through(tmp_path, monkeypatch, refusal) -> None:
    name = f"passing_{tmp_path.name}"
    text = "from torch.hub import load\nfrom subprocess import run, Popen\nfrom torch.optim import SGD\n"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for passed, of in (("load", "torch.hub:load"), ("run", "subprocess:run"), ("Popen", "subprocess:Popen")):
        assert f"model.name: {name}:{passed}: is {of}" in refusal(
            load_object, f"{name}:{passed}", "model.name"
        ).replace(f"{name}:{passed} is", f"{name}:{passed}: is")
    assert load_object(f"{name}:SGD", "optim.name").__name__ == "SGD"


def test_a_missing_method_is_named_with_its_signature(parts, refusal) -> None:
    assert refusal(own(parts, "Sink", SINK, "log.sinks[0]").load) == (
        f"log.sinks[0].name: {parts}:Sink has no step, which a sink needs (add: def step(self, record))"
    )
    assert refusal(own(parts, "Mute", AUGMENT, "data.augment[1]").load) == (
        f"data.augment[1].name: {parts}:Mute has no __call__, which an augmentation needs "
        "(add: def __call__(self, images, draws) -> images)"
    )


def test_an_attribute_may_be_set_by_the_constructor(parts) -> None:
    assert own(parts, "Change", AUGMENT, "data.augment[0]").make().num_draws == 1


def test_an_error_of_a_plugin_is_reported_with_its_file_and_line(parts, refusal, tmp_path) -> None:
    line = PARTS.splitlines().index('def broken(**words): raise LookupError("no such file")') + 1
    assert refusal(own(parts, "broken", SOURCE, "data.source").make, split="train") == (
        f"data.source.name: {parts}:broken raised LookupError: no such file at {tmp_path}/{parts}.py:{line} (fix it)"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import not_there_at_all", "ModuleNotFoundError: No module named 'not_there_at_all' at FILE:1 (install it)"),
        ("def (", "SyntaxError: invalid syntax (BAD.py, line 1) at FILE:1 (fix it)"),
        ("x = 1 / 0", "ZeroDivisionError: division by zero at FILE:1 (fix it)"),
        ("raise SystemExit(3)", "SystemExit: 3 at FILE:1 (fix it)"),
    ],
)
def test_an_import_error_is_reported_with_its_file_and_line(parts, refusal, tmp_path, text, reason) -> None:
    bad = f"bad_{parts}"
    (tmp_path / f"{bad}.py").write_text(text)
    reason = reason.replace("FILE", f"{tmp_path}/{bad}.py").replace("BAD", bad)
    message = refusal(load_object, f"{bad}:Net", "model.name")
    assert message == f"model.name: {bad}:Net: importing {bad} raised {reason}"


def test_the_current_folder_is_not_searched_and_the_error_names_pythonpath(
    parts, refusal, tmp_path, monkeypatch
) -> None:
    (tmp_path / "outside" / "mine_alone.py").write_text("Net = dict")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".", str(tmp_path / "outside"))])
    assert refusal(load_object, "mine_alone:Net", "model.name") == (
        "model.name: mine_alone:Net: there is no module mine_alone on the path, though it is in this folder "
        "(put PYTHONPATH=. before the command)"
    )
    assert refusal(load_object, "torchvison:resnet18", "model.name").endswith("(did you mean 'torchvision'?)")
    assert refusal(load_object, "json.nowhere:x", "model.name").endswith(
        "there is no module json.nowhere (correct it, or install it)"
    )
    monkeypatch.setitem(sys.modules, "mine_alone", ModuleType("mine_alone"))  # it is found
    assert refusal(load_object, "mine_alone.sub:Net", "model.name").endswith(
        "there is no module mine_alone.sub (correct it, or install it)"
    )


@pytest.mark.parametrize("name", ["a:", ":b", "a b:c", "a.b", "../a:b", "a:b:c", "a/b:c", "a:b()"])
def test_only_dotted_names_are_import_paths(refusal, name) -> None:
    with pytest.raises(ValueError, match="is not an import path"):
        OwnOptim(name=name, lr=0.1)


def test_names_with_a_colon_choose_the_own_variant_and_its_args_are_kept() -> None:
    words = [
        "data.source={name: 'a.b:C', args: {root: /x, sizes: [1, 2]}}",
        "optim={name: 'a:O', lr: 0.5, args: {eps: 1.0e-8}}",
        "data.augment=[flip, 'a:Change', {name: 'a.b:D', args: {p: 0.1}}]",
        "model.name=a:Net",
        "model.args.depth=3",
    ]
    recipe = load("digits", Patch.parse(words)).recipe
    assert recipe.data.source == OwnSource(name="a.b:C", args={"root": "/x", "sizes": [1, 2]})
    assert isinstance(recipe.optim, OwnOptim) and recipe.optim.args == {"eps": 1e-8} and recipe.optim.lr == 0.5
    assert recipe.data.augment == (Flip(), OwnAugment(name="a:Change"), OwnAugment(name="a.b:D", args={"p": 0.1}))
    assert recipe.model.args == {"depth": 3}
    assert Recipe.model_validate(recipe.to_dict()) == recipe


def test_the_hash_counts_name_and_args() -> None:
    words = ([], ["model.name=a:Net"], ["model.name=b:Net"], ["model.name=a:Net", "model.args.depth=3"])
    hashes = [load("digits", Patch.parse([*each])).recipe.hash for each in words]
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["model.args.depth=3"],
            "model.args: has no effect on resnet18_cifar, only on models of timm and torchvision and your own",
        ),
        (["optim.name=a:O", "optim.momentum=1"], "optim.momentum: no such field (one of lr,"),
        (["optim.name=a:O", "optim.momentum=1"], "; arguments of your own code are optim.args.momentum)"),
        (["optim={name: 'a b:c', lr: 1}"], "optim.name: 'a b:c' is not an import path (write package.module:Name)"),
    ],
)
def test_fields_of_other_variants_are_not_args(refusal, words, says) -> None:
    assert says in refusal(load, "digits", Patch.parse(["model.width=0.25", *words]))


def test_another_network_drops_the_args_of_the_one_before() -> None:
    values = {"extends": "digits", "model": {"name": "a:Net", "args": {"depth": 3}}}
    assert load_values(values).recipe.model.args == {"depth": 3}
    assert load_values(values, Patch.parse(["model.name=b:Net"])).recipe.model.args == {}
    assert load_values(values, Patch.parse(["model.name=a:Net"])).recipe.model.args == {"depth": 3}


def test_a_model_plugin_drops_the_built_in_settings_of_a_preset() -> None:
    model = load("digits").recipe.model
    assert model.width == 0.25
    assert load("digits", Patch.parse(["model.name=a:Net"])).recipe.model == Model(name="a:Net")
    kept = {"extends": "digits", "model": {"norm": "sync_batch"}}
    assert load_values(kept, Patch.parse(["model.name=a:Net"])).recipe.model.norm == "sync_batch"
    asked = load("digits", Patch.parse(["model.name=a:Net", "model.width=2"])).recipe.model
    assert asked.width == 2, "what is asked for beside the name is refused when the network is made"


def test_the_parts_of_a_recipe_are_checked_before_anything_is_made(parts, refusal) -> None:
    for word, path in (
        (f"model.name={parts}:Gone", "model"),
        (f"data.source.name={parts}:Gone", "data.source"),
        (f"optim={{name: '{parts}:Gone', lr: 1}}", "optim"),
        (f"data.augment=[flip, '{parts}:Gone']", "data.augment[1]"),
        (f"log.sinks=['{parts}:Gone']", "log.sinks[0]"),
    ):
        recipe = load("digits", Patch.parse([word])).recipe
        assert refusal(check_plugins, recipe) == f"{path}.name: {parts}:Gone: {parts} has no Gone (correct it)"
    check_plugins(load("digits").recipe)


def test_a_part_that_is_handed_over_is_named_by_where_it_is(parts) -> None:
    net = load_object(f"{parts}:Outer.Inner", "model")
    assert path_of(net, "model") == f"{parts}:Outer.Inner"
    assert path_of("a.b:C", "model") == "a.b:C"


def test_what_a_script_defines_is_named_by_the_script_and_not_imported_again(monkeypatch, refusal) -> None:
    main = ModuleType("__main__")
    main.__file__ = "/somewhere/my_script.py"
    main.Net = type("Net", (), {"__module__": "__main__"})
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert path_of(main.Net, "model") == "my_script:Net"
    assert load_object("my_script:Net", "model.name") is main.Net


def test_what_a_notebook_defined_is_found_in_it_and_nowhere_else(monkeypatch, refusal) -> None:
    main = ModuleType("__main__")
    main.Net = type("Net", (), {"__module__": "__main__"})
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert load_object(path_of(main.Net, "model"), "model.name") is main.Net
    assert refusal(load_object, "__main__:Other", "model.name") == (
        "model.name: __main__:Other: it was defined in a notebook, a terminal or a file that cannot be imported "
        "(move it to a module)"
    )


def test_what_another_object_has_taken_the_name_of_is_refused(monkeypatch, refusal) -> None:
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    before = type("Net", (), {"__module__": "__main__"})
    main.Net = type("Net", (), {"__module__": "__main__"})  # the cell was run again
    assert refusal(path_of, before, "model") == ("model: __main__:Net is another object now (pass the current Net)")


def test_what_has_no_name_at_the_top_of_a_module_is_refused(refusal) -> None:
    class Here:
        """Only here."""

    assert "it is defined in a function (define it in a module)" in refusal(path_of, Here, "model")
    assert "it is a lambda (define it in a module)" in refusal(path_of, lambda: None, "source")
    assert refusal(path_of, SimpleNamespace(), "model") == (
        "model: SimpleNamespace is an object, not a class or function (name its class or a factory function)"
    )


def test_a_mapping_extends_a_preset_and_overrides_win() -> None:
    loaded = load_values({"extends": "digits", "train": {"epochs": 2}}, Patch.parse(["seed=3"]), name="mine")
    assert (loaded.name, loaded.recipe.train.epochs, loaded.recipe.seed) == ("mine", 2, 3)
    assert loaded.recipe.optim == load("digits").recipe.optim
    with pytest.raises(RecipeError, match=r"mine: train\.epochz: no such field"):
        load_values({"extends": "digits", "train": {"epochz": 2}}, name="mine")
