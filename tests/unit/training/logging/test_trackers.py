"""What is asked of wandb, mlflow and trackio, by stand-ins for the three; `tests/integration` has the packages."""

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from paceline.core.run_dir import RunDir
from paceline.training.logging.build import build_sinks, build_tracker
from paceline.training.logging.trackers import TrackerRun, resolve_wandb_mode

STEPS, EVALUATIONS = list(range(2, 21, 2)), list(range(4, 21, 4))
SENT, EVALUATIONS_SENT = [*range(2, 15, 2), *range(12, 21, 2)], [4, 8, 12, 12, 16, 20]
"""Steps after the checkpoint are sent again by the process that resumes there."""


def config_of(recipe) -> dict[str, object]:
    return {**recipe.to_dict(), "recipe_hash": recipe.hash}


class Run:
    """A run of W&B: online one for each id, however often it is begun, and offline one for each time."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.summary: dict[str, object] = {}
        self.ends: list[int] = []
        self.num_preempted = 0

    def log(self, values: dict[str, float], step: int) -> None:
        # W&B ignores steps that go back, and adds to the row of the current step.
        if not self.rows or step > self.rows[-1][0]:
            self.rows.append((step, dict(values)))
        elif step == self.rows[-1][0]:
            self.rows[-1][1].update(values)

    def mark_preempting(self) -> None:
        self.num_preempted += 1

    def finish(self, exit_code: int = 0) -> None:
        self.ends.append(exit_code)

    def steps_of(self, curve: str) -> list[int]:
        return [step for step, values in self.rows if curve in values]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Install a W&B whose user is not logged in."""
    module = ModuleType("wandb")
    module.runs, module.asked, module.mode, module.has_login = {}, [], "online", False

    def init(**words):
        module.asked.append(words)
        folder = f"{words['id']}-{len(module.asked)}" if words["mode"] == "offline" else words["id"]
        run = module.runs.setdefault(folder, Run())
        run.dir = folder
        return run

    def login(*, prompt: bool, verify: bool) -> bool:
        assert not prompt and not verify
        return module.has_login

    module.init, module.login = init, login
    module.Settings = lambda **words: SimpleNamespace(**words)
    module.setup = lambda settings: SimpleNamespace(settings=SimpleNamespace(mode=module.mode))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_goes_on_in_one_run_and_has_everything(tmp_path, recipe, plan, attempts, wandb) -> None:
    wandb.has_login = True
    asked = recipe("log.sinks=[{name: wandb, project: p, entity: e}]")
    attempts(lambda start: build_sinks(RunDir(tmp_path), asked, start, []))
    ((name, run),) = wandb.runs.items()
    assert name == TrackerRun(RunDir(tmp_path), "wandb").id
    assert (run.steps_of("train/loss"), run.steps_of("ema/ece")) == (STEPS, EVALUATIONS)
    assert run.summary["result/status"] == "completed" and run.summary["result/throughput.images_per_s"] == 1000.0
    assert (run.ends, run.num_preempted) == ([1, 0], 1)
    words = wandb.asked[0]
    assert (words["project"], words["entity"], words["dir"]) == ("p", "e", str(tmp_path))
    assert words["config"] == {**config_of(asked), "world_size": plan.world_size}
    assert (words["resume"], words["mode"]) == ("allow", "online")
    settings = words["settings"]
    assert (settings.console, settings.finish_timeout) == ("off", 10.0)
    assert settings.disable_git and settings.disable_code and settings.x_disable_stats


def test_wandb_offline_has_everything_in_each_folder_since_one_replaces_the_other(
    tmp_path, recipe, attempts, wandb, step, evaluation
) -> None:
    asked, rundir = recipe("log.sinks=[wandb]"), RunDir(tmp_path)
    attempts(lambda start: build_sinks(rundir, asked, start, []))
    first, second = wandb.runs.values()
    assert first.steps_of("train/loss") == [number for number in STEPS if number <= 14]
    assert (second.steps_of("train/loss"), second.steps_of("val/top1")) == (STEPS, EVALUATIONS)
    assert [words["resume"] for words in wandb.asked] == [None, None]
    assert len({words["id"] for words in wandb.asked}) == 1


def test_wandb_that_never_heard_a_result_takes_the_run_for_failed(tmp_path, recipe, plan, wandb) -> None:
    sinks = build_sinks(RunDir(tmp_path), recipe("log.sinks=[wandb]"), 0, [])
    sinks.started(plan, 0)
    sinks.close()
    assert [run.ends for run in wandb.runs.values()] == [[1]]


@pytest.mark.parametrize(
    ("asked", "own", "has_login", "mode"),
    [
        ("auto", "online", False, "offline"),
        ("auto", "online", True, "online"),
        ("auto", "offline", True, "offline"),
        ("auto", "disabled", True, "disabled"),
        ("offline", "online", True, "offline"),
        ("online", "offline", False, "online"),
    ],
)
def test_wandb_is_online_for_who_is_logged_in(wandb, asked: str, own: str, has_login: bool, mode: str) -> None:
    wandb.mode, wandb.has_login = own, has_login
    assert resolve_wandb_mode(wandb, SimpleNamespace(), asked) == mode


TRACKIO = """
runs = {}
config = None
begins = None  # what is called within `init`

def init(*, project, name, resume, config, embed, auto_log_gpu, auto_log_cpu):
    assert resume == "allow" and not embed and not auto_log_gpu and not auto_log_cpu
    begins()
    print("created")
    globals()["config"] = config
    return runs.setdefault((project, name), Run())

class Run:
    def __init__(self): self.rows = []
    def log(self, values, step): self.rows.append((step, values))
    def finish(self): print("finished")
    def steps_of(self, curve): return [step for step, values in self.rows if curve in values]
"""


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Install a trackio that prints."""
    module = ModuleType("trackio")
    exec(TRACKIO, vars(module))
    module.begins = lambda: None
    monkeypatch.setitem(sys.modules, "trackio", module)
    return module


def test_what_others_print_while_trackio_begins_goes_where_they_mean_it_to(
    tmp_path, recipe, plan, trackio, capsys
) -> None:
    begins, goes_on = threading.Event(), threading.Event()
    trackio.begins = lambda: (begins.set(), goes_on.wait(30.0))
    sinks = build_sinks(RunDir(tmp_path), recipe("log.sinks=[trackio]"), 0, [])
    sinks.started(plan, 0)
    assert begins.wait(30.0)
    print("mine")
    goes_on.set()
    sinks.close()
    assert capsys.readouterr() == ("mine\n", "created\nfinished\n")


def test_trackio_goes_on_in_one_run_and_leaves_standard_output_alone(
    tmp_path, recipe, plan, attempts, trackio, capsys
) -> None:
    asked = recipe("log.sinks=[trackio]")
    attempts(lambda start: build_sinks(RunDir(tmp_path), asked, start, []))
    (((project, name), run),) = trackio.runs.items()
    assert project == "paceline" and name == f"{tmp_path.name}-{TrackerRun(RunDir(tmp_path), 'trackio').id}"
    assert (run.steps_of("train/loss"), run.steps_of("val/top1")) == (SENT, EVALUATIONS_SENT)
    assert run.steps_of("result/throughput.images_per_s") == [20]
    assert trackio.config == {**config_of(asked), "world_size": plan.world_size}
    out, err = capsys.readouterr()
    assert out == "" and err.split() == ["created", "finished"] * 2


class Client:
    """MLflow's client, of stores that last as long as the module."""

    stores: dict[str, dict[str, SimpleNamespace]]

    def __init__(self, tracking_uri: str = "http://server") -> None:
        self.runs = self.stores.setdefault(tracking_uri, {})

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> int:
        return 7

    def create_run(self, experiment_id: str, run_name: str):
        assert experiment_id == "7"
        run = SimpleNamespace(title=run_name, params={}, metrics=[], statuses=[], files={})
        run.info = SimpleNamespace(run_id=f"id{len(self.runs)}")
        return self.runs.setdefault(run.info.run_id, run)

    def log_batch(self, run_id: str, metrics=(), params=()) -> None:
        assert len(params) <= 100
        run = self.runs[run_id]
        run.metrics += metrics
        for name, value in params:
            assert run.params.setdefault(name, value) == value  # a parameter cannot change

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[run_id].statuses.append(status)

    def set_terminated(self, run_id: str, status: str) -> None:
        self.runs[run_id].statuses.append(status)

    def log_dict(self, run_id: str, values: dict, name: str) -> None:
        self.runs[run_id].files[name] = values


class Variable:
    """A variable of the environment, as MLflow has them."""

    value: object = None

    def set(self, value: object) -> None:
        self.value = value


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Install an MLflow for which no tracking URI is set."""
    names = ("mlflow", "mlflow.entities", "mlflow.environment_variables", "mlflow.telemetry")
    module, entities, variables, telemetry = (ModuleType(name) for name in names)
    module.MlflowClient = type("Client", (Client,), {"stores": {}})
    module.is_tracking_uri_set = lambda: False
    entities.Param = lambda name, value: (name, value)
    entities.Metric = lambda name, value, now_ms, step: (name, value, step)
    variables.MLFLOW_ALLOW_FILE_STORE, variables.MLFLOW_DISABLE_TELEMETRY = Variable(), Variable()
    module.variables = variables
    telemetry.set_telemetry_client = lambda: setattr(module, "reports", not variables.MLFLOW_DISABLE_TELEMETRY.value)
    for name, each in zip(names, (module, entities, variables, telemetry), strict=True):
        monkeypatch.setitem(sys.modules, name, each)
    return module


def test_mlflow_goes_on_in_one_run_and_has_everything(tmp_path, recipe, attempts, mlflow) -> None:
    asked = recipe("log.sinks=[mlflow]")
    attempts(lambda start: build_sinks(RunDir(tmp_path), asked, start, []))
    assert list(mlflow.MlflowClient.stores) == [(tmp_path / "mlruns").as_uri()]
    ((_, run),) = mlflow.MlflowClient.stores[(tmp_path / "mlruns").as_uri()].items()
    assert run.title == tmp_path.name
    assert [step for name, _, step in run.metrics if name == "train/loss"] == SENT
    assert [step for name, _, step in run.metrics if name == "val/mean_class_accuracy"] == EVALUATIONS_SENT
    assert [step for name, _, step in run.metrics if name == "result/throughput.images_per_s"] == [20]
    assert run.params["data.batch_size"] == "64" and run.params["recipe_hash"] == asked.hash
    assert run.files["result.json"]["status"] == "completed"
    assert run.statuses == ["KILLED", "RUNNING", "FINISHED"]


def test_mlflow_with_files_reports_nothing_over_the_network(tmp_path, recipe, plan, mlflow) -> None:
    tracker = build_tracker(recipe("log.sinks=[mlflow]").log.sinks[0], "", RunDir(tmp_path), config_of(recipe()))
    tracker.started(plan, 0)
    assert mlflow.variables.MLFLOW_ALLOW_FILE_STORE.value is True
    assert mlflow.reports is False


def test_mlflow_goes_where_its_variable_says(tmp_path, recipe, plan, mlflow) -> None:
    mlflow.is_tracking_uri_set = lambda: True
    tracker = build_tracker(recipe("log.sinks=[mlflow]").log.sinks[0], "", RunDir(tmp_path), config_of(recipe()))
    tracker.started(plan, 0)
    assert list(mlflow.MlflowClient.stores) == ["http://server"]
    assert mlflow.variables.MLFLOW_ALLOW_FILE_STORE.value is None


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_tracker_that_cannot_start_is_one_warning(
    tmp_path, recipe, attempts, told, wandb, mlflow, trackio, name: str
) -> None:
    def down(*words, **more):
        raise ConnectionError("no network")

    wandb.init = trackio.init = mlflow.MlflowClient.create_run = down
    sinks = []

    def build(start: int):
        sinks.append(build_sinks(RunDir(tmp_path), recipe(f"log.sinks=[{name}]"), start, [told]))
        return sinks[-1]

    attempts(build)
    said = f"log.sinks[0]: {name}: ConnectionError: no network (training continues; the run directory has every record)"
    assert [call for call in told.calls if call[0] == "warned"] == [("warned", said)] * 2  # one for each process
