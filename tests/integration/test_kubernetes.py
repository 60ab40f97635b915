"""The container of a Kubernetes Job, with the arguments and variables of its manifest, as processes of this machine.

Parts of a cluster are replaced: host names by 127.0.0.1, the claim and the ConfigMap by folders.
"""

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cluster.job import ClusterJob
from paceline.cluster.kubernetes import build_manifests, run_dir_in_pods
from paceline.cluster.site import KubernetesSite
from paceline.recipe.load import Patch, load
from paceline.recipe.yaml import to_yaml_text

PATIENCE_S = 120.0
SETTINGS = (
    *("model.width=0.1", "data.source.num_images=240", "data.source.num_val_images=24", "data.batch_size=12"),
    *("data.workers=0", "log.every=1st", "log.tensorboard=off", "log.report=off", "parallel.threads=1"),
    *("parallel.device=cpu", "checkpoint.every=50st"),
)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Pods:
    """The two pods of a Job; every call of `start` starts both."""

    def __init__(self, paceline: Any, folder: Path, *settings: str) -> None:
        self.paceline, self.folder, self.started = paceline, folder, []
        run = folder / "runs" / "small"
        recipe = load("synthetic", Patch.parse([*SETTINGS, *settings])).recipe
        args = ("train", str(run / "job" / f"recipe-{recipe.hash}.yaml"), "--run-dir", str(run), "--resume")
        job = ClusterJob("small", args, run_dir=run, folder=folder, nodes=2, recipe_hash=recipe.hash)
        site = KubernetesSite(kind="job", image="image", claim="work", max_restarts=0)
        text = to_yaml_text(recipe.model_dump(mode="json"))
        config, service, self.job = yaml.safe_load_all(build_manifests(job, site, files={job.frozen_recipe: text}))
        self.name, self.run = service["metadata"]["name"], folder / str(run_dir_in_pods(job, site)).removeprefix("/")
        (folder / "etc").mkdir()
        for name, content in config["data"].items():
            (folder / "etc" / name).write_text(content)

    def start(self) -> list[Any]:
        """Start both pods."""
        port = free_port()
        pods = [self._start(index, port) for index in range(2)]
        self.started += pods
        return pods

    def _start(self, index: int, port: int) -> Any:
        (container,) = self.job["spec"]["template"]["spec"]["containers"]
        environ = {each["name"]: each.get("value", str(index)) for each in container["env"]}
        places = {
            f"{self.name}-0.{self.name}:29400": f"127.0.0.1:{port}",
            "/etc/paceline/": f"{self.folder}/etc/",
            "/claim/": f"{self.folder}/claim/",
        }
        # At the start of an argument, or after =
        place_names = re.compile("(?<![^=])(" + "|".join(map(re.escape, places)) + ")")
        args = [place_names.sub(lambda match: places[match[1]], expand(word, environ)) for word in container["args"]]
        python, option, program = container["command"]
        assert (python, option) == ("python", "-m")
        # In a cluster, the address of the rank's store and gloo's interface follow from the pods' host names.
        return self.paceline.start(
            *args, program=(program,), **environ, PET_LOCAL_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo"
        )

    def action(self, code: int) -> str:
        """Return the action of the Job's pod failure policy for an exit code."""
        for rule in self.job["spec"]["podFailurePolicy"]["rules"]:
            if code in rule.get("onExitCodes", {}).get("values", ()):
                return rule["action"]
        return "Count"


def expand(text: str, variables: dict[str, str]) -> str:
    """Expand `$(NAME)` and `$$` as a kubelet does."""
    return re.sub(
        r"\$\$|\$\(([^()]*)\)", lambda match: "$" if match[0] == "$$" else variables.get(match[1], match[0]), text
    )


@pytest.fixture
def pods_of(paceline, tmp_path: Path) -> Iterator[Any]:
    """Return a function from settings to pods; they are killed after the test."""
    made: list[Pods] = []

    def make(*settings: str) -> Pods:
        made.append(Pods(paceline, tmp_path, *settings))
        return made[-1]

    yield make
    for process in [process for pods in made for process in pods.started]:
        process.kill()


def wait_for(pods: list[Any]) -> tuple[list[int], str]:
    output = [pod.communicate(timeout=PATIENCE_S)[1] for pod in pods]
    return [pod.returncode for pod in pods], "\n".join(output)


def wait_for_steps(pods: Pods, started: list[Any], steps: int) -> None:
    path, deadline_s = pods.run / "steps.jsonl", time.monotonic() + PATIENCE_S
    while not (path.exists() and path.read_bytes().count(b"\n") >= steps):
        assert all(pod.poll() is None for pod in started), wait_for(started)
        assert time.monotonic() < deadline_s, "the steps take too long"
        time.sleep(0.02)


def test_a_preempted_pod_is_replaced_and_the_run_is_resumed(pods_of) -> None:
    """Only one pod gets SIGTERM; the ranks of the other stop with it, and the Job counts neither as a failure."""
    pods = pods_of("train.steps=60")
    first = pods.start()
    wait_for_steps(pods, first, 3)
    first[0].send_signal(15)
    codes, output = wait_for(first)
    assert codes == [143, 75], output
    assert [pods.action(code) for code in codes] == ["Ignore", "Ignore"]
    assert json.loads((pods.run / "result.json").read_text())["status"] == "preempted"
    codes, output = wait_for(pods.start())
    assert codes == [0, 0], output
    result = json.loads((pods.run / "result.json").read_text())
    assert (result["status"], result["world_size"], result["steps"]) == ("completed", 2, 60)
    assert result["goodput"]["starts"] == 2


def test_a_refused_recipe_fails_the_job_without_a_retry(pods_of) -> None:
    """One rank prints the error and exits with its code; that pod alone decides."""
    pods = pods_of("data.source.num_images=4")
    codes, output = wait_for(pods.start())
    assert output.count("error: ") == 1, output
    assert set(codes) <= {1, 2}, output
    assert "FailJob" in [pods.action(code) for code in codes], (codes, output)
