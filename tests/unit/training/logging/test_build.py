"""Which sinks a recipe comes to; nothing that was not asked for is imported."""

import inspect
import sys
from types import ModuleType

import pytest

from paceline.core.errors import RecipeError
from paceline.core.run_dir import RunDir, read_lines
from paceline.recipe.plugins import SINK
from paceline.training.logging.async_sink import AsyncSink
from paceline.training.logging.base import LogSink
from paceline.training.logging.build import build_sinks, require_sinks
from paceline.training.logging.files import SafeSink

TRACKERS = ("wandb", "mlflow", "trackio")


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every import of a tracker fail."""
    for name in TRACKERS:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("hidden")
def test_what_is_not_asked_for_is_not_imported(tmp_path, recipe) -> None:
    sinks = build_sinks(RunDir(tmp_path), recipe(), 0, [])
    sinks.close()
    assert [type(sink) for sink in sinks.sinks] == [SafeSink]


@pytest.mark.usefixtures("hidden")
@pytest.mark.parametrize("name", TRACKERS)
def test_what_is_asked_for_and_not_installed_is_refused_before_training(recipe, name: str) -> None:
    with pytest.raises(RecipeError) as error:
        require_sinks(recipe(f"log.sinks=[{name}]").log)
    fix = f"pip install 'paceline[{name}]', or leave it out"
    assert str(error.value) == f"log.sinks[0]: {name} is not installed ({fix})"


def test_a_package_that_breaks_when_it_is_imported_is_a_warning(tmp_path, recipe, told, monkeypatch) -> None:
    (tmp_path / "mlflow.py").write_text("raise OSError('no\\n home')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    rundir = RunDir(tmp_path)
    sinks = build_sinks(rundir, recipe("log.sinks=[mlflow]"), 0, [told])
    sinks.close()
    message = "log.sinks[0]: mlflow: OSError: no home (training continues; the run directory has every record)"
    assert told.calls == [("warned", message), "close"]
    assert [line["message"] for line in read_lines(rundir.warnings)] == [message]


def test_a_tensorboard_that_breaks_when_it_is_imported_is_a_warning(tmp_path, recipe, told, monkeypatch) -> None:
    def broken(folder: str, purge_step: int):
        raise TypeError("Descriptors cannot be created directly")

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = broken
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr("paceline.training.logging.build._is_installed", lambda package: True)
    sinks = build_sinks(RunDir(tmp_path), recipe("log.tensorboard=auto"), 0, [told])
    sinks.close()
    what = "log.tensorboard: TypeError: Descriptors cannot be created directly"
    assert told.calls == [("warned", f"{what} (training continues; the run directory has every record)"), "close"]


OWN = """
class Own:
    def __init__(self, run_dir, word="none"):
        self.path = run_dir / "own.txt"
        self.lines = [word]
    def started(self, plan, step): self.lines.append(f"started {step}")
    def step(self, record): self.lines.append(f"step {record.step}")
    def evaluated(self, record): self.lines.append(f"evaluated {record.step}")
    def warned(self, message): pass
    def finished(self, result): self.lines.append(result.status)
    def close(self):
        with self.path.open("a") as file:
            file.write(" ".join(self.lines) + "\\n")

class Deaf:
    def __new__(cls, run_dir):
        raise SystemExit("no server")
    def started(self, plan, step): pass
    def step(self, record): pass
    def evaluated(self, record): pass
    def warned(self, message): pass
    def finished(self, result): pass
    def close(self): pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a module `own_sinks` to be imported."""
    (tmp_path / "own_sinks.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_sinks", raising=False)


@pytest.mark.usefixtures("own")
def test_a_sink_of_ones_own_hears_the_steps_since_the_checkpoint_again(tmp_path, recipe, attempts) -> None:
    asked = recipe('log.sinks=[{name: "own_sinks:Own", args: {word: hello}}]')
    require_sinks(asked.log)
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    attempts(lambda start: build_sinks(rundir, asked, start, []))
    assert (rundir.path / "own.txt").read_text().splitlines() == [
        "hello started 0 step 2 step 4 evaluated 4 step 6 step 8 evaluated 8 step 10 step 12 evaluated 12 step 14 "
        "preempted",
        "hello started 10 step 12 evaluated 12 step 14 step 16 evaluated 16 step 18 step 20 evaluated 20 completed",
    ]


@pytest.mark.usefixtures("own")
def test_a_sink_of_ones_own_that_leaves_when_it_is_made_is_a_warning(tmp_path, recipe, told) -> None:
    sinks = build_sinks(RunDir(tmp_path), recipe('log.sinks=["own_sinks:Deaf"]'), 0, [told])
    sinks.close()
    (kind, warning), end = told.calls
    assert (kind, end) == ("warned", "close")
    assert warning.startswith("log.sinks[0].name: own_sinks:Deaf raised SystemExit: no server at ")
    assert warning.endswith("(training continues; the run directory has every record)")


def test_a_sink_of_ones_own_needs_the_methods_that_are_called(recipe) -> None:
    called = {name: inspect.signature(each) for name, each in vars(LogSink).items() if not name.startswith("_")}
    asked = {name: f"def {name}({', '.join(signature.parameters)})" for name, signature in called.items()}
    assert len(asked) == 6
    assert dict(SINK.methods) == asked


def test_all_trackers_of_a_run_share_one_patience(tmp_path, recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sinks = build_sinks(RunDir(tmp_path), recipe("log.sinks=[wandb, trackio]"), 0, [])
    asides = [sink for sink in sinks.sinks if isinstance(sink, AsyncSink)]
    assert len(asides) == 2 and asides[0]._close_budget is asides[1]._close_budget
    assert [end.__self__ for end in sinks.on_close] == asides
    sinks.close()
