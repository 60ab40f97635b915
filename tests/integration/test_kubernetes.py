"""The program of a Job's pods, with the very words and variables of its manifest, as processes of this machine.

What a cluster would put in their place is: host names by 127.0.0.1, the claim and the ConfigMap by folders.
"""

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.job import ClusterJob
from paceline.cluster.kubernetes import build_manifests
from paceline.cluster.pod import run_dir_in_pods
from paceline.cluster.site import KubernetesSite
from paceline.recipe.load import Patch, load
from paceline.recipe.yaml import to_yaml_text

PATIENCE_S = 120.0
SETTINGS = (
    *("model.width=0.1", "data.source.num_images=240", "data.source.num_val_images=24", "data.batch_size=12"),
    *("data.workers=1", "log.every=1st", "log.tensorboard=off", "log.report=off", "parallel.threads=1"),
    *("parallel.device=cpu", "checkpoint.every=50st"),
)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Pods:
    """The two pods of a Job: `start` starts both, as often as it is called."""

    def __init__(self, paceline: Any, folder: Path, *settings: str) -> None:
        self.paceline, self.folder, self.started = paceline, folder, []
        run = folder / "runs" / "small"
        recipe = load("synthetic", Patch.parse([*SETTINGS, *settings])).recipe
        words = ("train", str(run / "job" / f"recipe-{recipe.hash}.yaml"), "--run-dir", str(run), "--resume")
        job = ClusterJob("small", words, run_dir=run, folder=folder, nodes=2, recipe_hash=recipe.hash)
        site = KubernetesSite(kind="job", image="image", claim="work", max_restarts=0)
        text = to_yaml_text(recipe.model_dump(mode="json"))
        config, service, self.job = build_manifests(job, site, files={job.frozen_recipe: text})
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
        there = re.compile("(?<![^=])(" + "|".join(map(re.escape, places)) + ")")  # at the start, or after =
        words = [there.sub(lambda match: places[match[1]], expanded(word, environ)) for word in container["args"]]
        python, option, program = container["command"]
        assert (python, option) == ("python", "-m")
        # Where the rank's store is, and over what gloo talks: in a cluster, by the pods' host names.
        return self.paceline.start(
            *words, program=(program,), **environ, PET_LOCAL_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo"
        )

    def action(self, code: int) -> str:
        """Return what the Job does about a pod that has ended with `code`."""
        for rule in self.job["spec"]["podFailurePolicy"]["rules"]:
            if code in rule.get("onExitCodes", {}).get("values", ()):
                return rule["action"]
        return "Count"


def expanded(text: str, variables: dict[str, str]) -> str:
    """Expand as a kubelet does."""
    return re.sub(
        r"\$\$|\$\(([^()]*)\)", lambda match: "$" if match[0] == "$$" else variables.get(match[1], match[0]), text
    )


@pytest.fixture
def pods_of(paceline, tmp_path: Path) -> Iterator[Any]:
    """Return a function from settings to pods, which are gone after the test."""
    made: list[Pods] = []

    def make(*settings: str) -> Pods:
        made.append(Pods(paceline, tmp_path, *settings))
        return made[-1]

    yield make
    for process in [process for pods in made for process in pods.started]:
        process.kill()


def ended(pods: list[Any]) -> tuple[list[int], str]:
    said = [pod.communicate(timeout=PATIENCE_S)[1] for pod in pods]
    return [pod.returncode for pod in pods], "\n".join(said)


def wait_for_steps(pods: Pods, started: list[Any], steps: int) -> None:
    path, deadline_s = pods.run / "steps.jsonl", time.monotonic() + PATIENCE_S
    while not (path.exists() and path.read_bytes().count(b"\n") >= steps):
        assert all(pod.poll() is None for pod in started), ended(started)
        assert time.monotonic() < deadline_s, "it takes too long"
        time.sleep(0.02)


def test_a_pod_that_has_to_leave_is_replaced_and_the_run_goes_on(pods_of) -> None:
    """Asked are the ranks of one pod; those of the other leave with them, and nobody's leaving is counted."""
    pods = pods_of("train.steps=60")
    first = pods.start()
    wait_for_steps(pods, first, 3)
    first[0].send_signal(15)
    codes, said = ended(first)
    assert codes == [143, 75], said
    assert [pods.action(code) for code in codes] == ["Ignore", "Ignore"]
    assert json.loads((pods.run / "result.json").read_text())["status"] == "preempted"
    codes, said = ended(pods.start())
    assert codes == [0, 0], said
    result = json.loads((pods.run / "result.json").read_text())
    assert (result["status"], result["world_size"], result["steps"]) == ("completed", 2, 60)
    assert result["goodput"]["starts"] == 2


def test_a_refusal_ends_the_job_without_another_try(pods_of) -> None:
    """One rank says what is wrong, and ends with the code of it; its pod alone decides."""
    pods = pods_of("data.source.num_images=4")
    codes, said = ended(pods.start())
    assert said.count("error: ") == 1, said
    assert set(codes) <= {1, 2}, said
    assert "FailJob" in [pods.action(code) for code in codes], (codes, said)
