"""Manifests against the types that Kubeflow Trainer publishes, Kubernetes' own among them.

The models drop fields they do not know, look at neither version nor kind, and let amounts, names and numbers pass that
a cluster refuses. What is missing is checked here, and mistakes are planted to see that they are found.
"""

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from paceline.cluster.job import ClusterJob
from paceline.cluster.kubernetes import build_manifests
from paceline.cluster.site import KubernetesSite

models = pytest.importorskip(
    "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed: pip install kubeflow-trainer-api"
)

RUN = Path("/home/me/runs/photos")
WORDS = ("train", f"{RUN}/job/recipe-0.yaml", "--run-dir", str(RUN), "--resume")
JOB = ClusterJob(
    "photos", WORDS, run_dir=RUN, folder=Path("/home/me"), nodes=2, ranks_per_node=4, gpus_per_node=4, recipe_hash="0"
)
SITE: dict[str, Any] = {"image": "registry.example.org/me/paceline:1", "claim": "work"}
FULL = {
    **SITE,
    "namespace": "me",
    "pull_secrets": ["registry"],
    "node_selector": {"nvidia.com/gpu.product": "A100"},
    "tolerations": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}],
    "labels": {"team": "a"},
    "queue": "research",
    "environ": {"NCCL_DEBUG": "INFO"},
    "time": "12h",
}


def manifests(job: ClusterJob, site: KubernetesSite, files: dict[Path, str]) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(build_manifests(job, site, files=files)))


MODELS = {
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): "TrainerV1alpha1TrainJob",
    ("batch/v1", "Job"): "IoK8sApiBatchV1Job",
    ("v1", "Service"): "IoK8sApiCoreV1Service",
    ("v1", "ConfigMap"): "IoK8sApiCoreV1ConfigMap",
}
# https://kubernetes.io/docs/concepts/overview/working-with-objects/names/
DNS_LABEL = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
# https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
QUANTITY = r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?"
RULES: dict[str, Callable[[Any], bool]] = {
    r"metadata\.name": lambda name: bool(re.fullmatch(DNS_LABEL, name)),
    r".*\.(limits|requests)\..*": lambda amount: bool(re.fullmatch(QUANTITY, amount)),
    r".*\.sizeLimit": lambda amount: bool(re.fullmatch(QUANTITY, amount)),
    r".*\.(numNodes|numProcPerNode|completions|parallelism|activeDeadlineSeconds)": lambda number: number > 0,
    r".*\.(backoffLimit|terminationGracePeriodSeconds)": lambda number: number >= 0,
    r".*\.(env|containers|volumes|volumeMounts)\[\d+\]": lambda each: bool(each.get("name")),
    r".*\.env\[\d+\]\.name": lambda name: bool(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)),
    r"spec\.ports\[\d+\]": lambda port: 0 < port.get("port", 0) < 65_536,
    r"spec\.runtimeRef\.kind": lambda kind: kind in ("ClusterTrainingRuntime", "TrainingRuntime"),
    r".*\.restartPolicy": lambda policy: policy in ("Never", "OnFailure"),
    r".*\.action": lambda action: action in ("Ignore", "FailJob", "Count", "FailIndex"),
    r".*\.onExitCodes\.values": lambda codes: 0 not in codes and len(codes) == len(set(codes)) <= 255,
}
"""By path, what the models let pass and an API server does not."""


def places(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a manifest with its path, such as spec.env[0].name."""
    yield path, value
    if isinstance(value, dict):
        for key, each in value.items():
            yield from places(each, f"{path}.{key}".lstrip("."))
    if isinstance(value, list):
        for position, each in enumerate(value):
            yield from places(each, f"{path}[{position}]")


def leaves(manifest: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the values of a manifest that hold no others."""
    return [(path, value) for path, value in places(manifest) if not value or not isinstance(value, dict | list)]


def problems(manifest: dict[str, Any]) -> list[str]:
    """Return what is wrong with a manifest: its kind, what its model refuses, drops or changes, what the rules refuse.

    A model may add what a cluster takes for granted, such as TCP.
    """
    name = MODELS.get((manifest.get("apiVersion", ""), manifest.get("kind", "")))
    if name is None:
        return ["apiVersion and kind name nothing"]
    try:
        kept = getattr(models, name).from_dict(copy.deepcopy(manifest)).to_dict()
    except (ValidationError, AttributeError, TypeError, ValueError) as error:
        return [f"the model: {error}"]
    known = dict(places(kept))
    return [
        *(f"{path} is lost" for path, value in places(manifest) if path not in known),
        *(f"{path} becomes {known[path]!r}" for path, value in leaves(manifest) if known.get(path, value) != value),
        *broken(manifest),
    ]


def broken(manifest: dict[str, Any]) -> list[str]:
    """Return the values that a rule refuses, and containers that mount what is no volume."""
    wrong = [
        f"{path}: {value!r}"
        for path, value in places(manifest)
        for pattern, is_right in RULES.items()
        if re.fullmatch(pattern, path) and not is_right(value)
    ]
    pods = [value for _, value in places(manifest) if isinstance(value, dict) and "containers" in value]
    for pod in pods:
        volumes = {each.get("name") for each in pod.get("volumes", [])}
        mounted = {each.get("name") for container in pod["containers"] for each in container.get("volumeMounts", [])}
        wrong += [f"no volume {name}" for name in mounted - volumes]
    return wrong


@pytest.mark.parametrize("kind", ["trainjob", "job"])
@pytest.mark.parametrize("site", [SITE, FULL], ids=["least", "all"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_manifests_match_the_published_types(kind: str, site: dict[str, Any], nodes: int) -> None:
    made = manifests(
        replace(JOB, nodes=nodes, comments=("paceline submit photos",)),
        KubernetesSite.model_validate({**site, "kind": kind}),
        files={JOB.frozen_recipe: "seed: 0\n"},
    )
    assert len(made) == (3 if kind == "job" and nodes == 2 else 2)
    assert [problems(each) for each in made] == [[]] * len(made)


def test_every_rule_applies_to_something_that_is_written() -> None:
    made = [
        each
        for kind in ("trainjob", "job")
        for each in manifests(JOB, KubernetesSite.model_validate({**FULL, "kind": kind}), {})
    ]
    paths = [path for manifest in made for path, _ in places(manifest)]
    assert [pattern for pattern in RULES if not any(re.fullmatch(pattern, path) for path in paths)] == []


def planted(kind: str, path: str, value: Any) -> dict[str, Any]:
    """Return a manifest with `value` at `path`, or without what stands there where the value is `...`."""
    site = KubernetesSite.model_validate({**FULL, "kind": "trainjob" if kind == "TrainJob" else "job"})
    (manifest,) = [
        each for each in manifests(JOB, site, files={JOB.frozen_recipe: "seed: 0\n"}) if each["kind"] == kind
    ]
    *parents, last = [int(part) if part.isdecimal() else part for part in re.findall(r"[^.\[\]]+", path)]
    target: Any = manifest
    for part in parents:
        target = target[part]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return manifest


POD = "spec.template.spec"
PATCH = "spec.runtimePatches[0].trainingRuntimeSpec.template.spec.replicatedJobs[0].template.spec.template.spec"


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("TrainJob", "apiVersion", "trainer.kubeflow.org/v2alpha1"),
        ("TrainJob", "kind", "PyTorchJob"),
        ("TrainJob", "metadata.name", "Photos"),
        ("TrainJob", "spec.runtimeRef", ...),
        ("TrainJob", "spec.runtimeRef.kind", "Runtime"),
        ("TrainJob", "spec.podTemplateOverrides", []),  # what runtimePatches took the place of in Trainer 2.2
        ("TrainJob", "spec.trainer.numNodes", -1),
        ("TrainJob", "spec.trainer.numNodes", "2"),
        ("TrainJob", "spec.trainer.numProcPerNode", "auto"),
        ("TrainJob", "spec.trainer.nodes", 2),
        ("TrainJob", "spec.trainer.env[0].name", ...),
        ("TrainJob", "spec.trainer.env[0].value", 1),
        ("TrainJob", "spec.trainer.resourcesPerNode.limits.memory", "8 gigs"),
        ("TrainJob", "spec.trainer.workingDir", "/claim"),
        ("TrainJob", f"{PATCH}.subdomain", "photos"),
        ("TrainJob", f"{PATCH}.containers[0].image", "other"),
        ("TrainJob", f"{PATCH}.containers[0].name", ...),
        ("TrainJob", f"{PATCH}.volumes[0]", {"name": "other", "emptyDir": {}}),
        ("Job", "apiVersion", "batch/v2"),
        ("Job", "spec.completionmode", "Indexed"),
        ("Job", "spec.completions", 0),
        ("Job", "spec.backoffLimit", -1),
        ("Job", "spec.template", ...),
        ("Job", "spec.podFailurePolicy.rules[1].action", "Fail"),
        ("Job", "spec.podFailurePolicy.rules[1].onExitCodes.values", [0]),
        ("Job", "spec.podFailurePolicy.rules[1].onExitCodes.values", ["2"]),
        ("Job", f"{POD}.restartPolicy", "Always"),
        ("Job", f"{POD}.containers", ...),
        ("Job", f"{POD}.containers[0].name", ...),
        ("Job", f"{POD}.containers[0].securitycontext", {}),
        ("Job", f"{POD}.volumes[1].emptyDir.sizeLimit", "8GiB"),
        ("Job", f"{POD}.volumes[0].persistentVolumeClaim.claimName", ...),
        ("Service", "spec.ports[0].port", "29400"),
        ("Service", "spec.ports[0].port", ...),
        ("Service", "spec.headless", True),
        ("ConfigMap", "data.a", 1),
        ("ConfigMap", "spec", {}),
    ],
)
def test_a_planted_mistake_is_found(kind: str, path: str, value: Any) -> None:
    assert problems(planted(kind, path, value)) != []
