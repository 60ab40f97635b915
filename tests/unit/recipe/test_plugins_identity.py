"""Which code own parts are: the file, its digest and its package; and which of them is another now."""

import hashlib
import sys
from importlib.metadata import version
from types import ModuleType

from paceline.recipe.load import Patch, load
from paceline.recipe.plugins import changed_code, code_identity, stale_code


def test_a_plugin_is_identified_by_its_file_and_package(tmp_path, monkeypatch) -> None:
    file = tmp_path / "mine_to_tell.py"
    file.write_text("class Net:\n    def __init__(self, num_classes, in_channels): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = ["model.name=mine_to_tell:Net", "optim={name: 'torch.optim:NAdam', lr: 1}"]
    found = code_identity(load("digits", Patch.parse(words)).recipe)
    sys.modules.pop("mine_to_tell")
    assert found["mine_to_tell:Net"] == {
        "file": str(file),
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
    assert found["torch.optim:NAdam"]["file"].endswith("torch/optim/nadam.py")
    assert found["torch.optim:NAdam"]["package"] == f"torch {version('torch')}"
    assert code_identity(load("digits").recipe) == {}


def test_a_partial_and_an_object_are_identified_by_their_function_and_class(tmp_path, monkeypatch) -> None:
    file = tmp_path / "made_of_others.py"
    file.write_text(
        "import functools\n\n\nclass Cost:\n    def __call__(self, scores, labels):\n        return 0.0\n\n\n"
        "def power(scores, labels, exponent):\n    return 0.0\n\n\n"
        "square, cost = functools.partial(power, exponent=2), Cost()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = ["made_of_others:square", "made_of_others:cost"]
    found = code_identity(load("digits", Patch.parse([f"train.metrics=[{','.join(names)}]"])).recipe)
    sys.modules.pop("made_of_others")
    same = {"file": str(file), "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    assert found == dict.fromkeys(names, same)


def test_a_plugin_without_a_file_is_identified_without_one(monkeypatch) -> None:
    module = ModuleType("in_no_file")
    module.Net = type("Net", (), {"__module__": "in_no_file", "__init__": lambda self, **words: None})
    monkeypatch.setitem(sys.modules, "in_no_file", module)
    assert code_identity(load("digits", Patch.parse(["model.name=in_no_file:Net"])).recipe) == {"in_no_file:Net": {}}


def test_what_is_in_another_file_now_is_named() -> None:
    now = {"a:A": {"sha256": "1"}, "b:B": {"sha256": "2"}, "c:C": {}, "d:D": {"sha256": "4"}}
    before = {"a:A": {"sha256": "1"}, "b:B": {"sha256": "9"}, "c:C": {"sha256": "3"}}
    assert changed_code(before, now) == ["b:B"]
    assert changed_code({}, now) == []


def test_what_was_recorded_is_stale_where_its_file_or_its_package_is_another_now(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("one")
    same = {"file": str(file), "sha256": hashlib.sha256(b"one").hexdigest()}
    recorded = {
        "same:A": same,
        "nothing:B": {},
        "edited:C": {**same, "sha256": hashlib.sha256(b"two").hexdigest()},
        "gone:D": {**same, "file": str(tmp_path / "gone.py")},
        "installed:E": {"package": f"torch {version('torch')}"},
        "updated:F": {**same, "package": "torch 0.0"},
        "removed:G": {"package": "no-such-package 1.0"},
    }
    assert stale_code(recorded) == ["edited:C", "gone:D", "updated:F", "removed:G"]
