"""Write a job as Kubernetes manifests: a Kubeflow TrainJob, or an indexed Job with a headless Service."""

import re
import shlex
from collections.abc import Iterable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

from paceline.cluster.job import ClusterJob
from paceline.cluster.pod import (
    PORT,
    PodSpec,
    active_deadline,
    build_pod,
    container_command,
    container_environ,
    container_resources,
    node_rank_variable,
    pod_placement,
    pod_volumes,
    security_context,
    volume_mounts,
)
from paceline.cluster.site import KubernetesSite
from paceline.core.errors import RecipeError, WorldError
from paceline.core.units import count, mib

_PLAIN_SCALAR: Final = re.compile(r"[A-Za-z/][-A-Za-z0-9_./]*")
_YAML_1_1_KEYWORDS: Final = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null"])
"""Words that YAML 1.1 reads as bool or null, in any case: https://yaml.org/type/bool.html, /null.html."""
_BLOCK_TEXT: Final = re.compile(r"(?=[!-~])(?:[ -~]*[!-~]\n|\n)+")
"""Lines of printable ASCII: the first has no leading space, none a trailing one, and each ends with a newline."""
Manifest = dict[str, Any]
_CONTAINER_NAME: Final = "node"
"""Name of the container and of the replicated job in Kubeflow's runtimes; the plain Job uses it too."""
_MAX_CONFIG_MAP_BYTES: Final = 1_048_576
"""Size limit of a ConfigMap: https://kubernetes.io/docs/concepts/configuration/configmap/."""
_INSTANCE_LABEL: Final = "app.kubernetes.io/instance"


def manifests_to_yaml(manifests: Iterable[Mapping[str, Any]]) -> str:
    """Return the manifests as one YAML stream."""
    yaml = YAML(typ="rt", pure=True)
    yaml.width = 1_000_000  # folded lines are hard to read
    yaml.indent(mapping=2, sequence=4, offset=2)
    out = StringIO()
    yaml.dump_all([_quote_strings(manifest) for manifest in manifests], out)
    return out.getvalue()


def _quote_strings(value: Any) -> Any:
    match value:
        case Mapping():
            return {_quote_strings(str(key)): _quote_strings(each) for key, each in value.items()}
        case list() | tuple():
            return [_quote_strings(each) for each in value]
        case str():
            return _quote_text(value)
        case _:
            return value


def _quote_text(value: str) -> str:
    if _PLAIN_SCALAR.fullmatch(value) and value.lower() not in _YAML_1_1_KEYWORDS:
        return value
    # A block scalar of `|` ends with exactly one newline.
    is_block = "\n" in value and _BLOCK_TEXT.fullmatch(value) and not value.endswith("\n\n")
    quoted: str = LiteralScalarString(value) if is_block else DoubleQuotedScalarString(value)
    return quoted


def build_manifests(
    job: ClusterJob, site: KubernetesSite, *, files: Mapping[Path, str] | None = None
) -> tuple[Manifest, ...]:
    """Return the objects of `job` in creation order; `files` are the texts of its frozen files.

    Raise `RecipeError` for missing site fields, and `WorldError` for a job that pods cannot run.
    """
    pod = build_pod(job, site, files or {})
    _check_pod(pod)
    config = (_build_config_map(pod),) if pod.files else ()
    match site.kind:
        case "trainjob":
            return (*config, _build_train_job(pod))
        case "job":
            service = (_build_service(pod),) if job.nodes > 1 else ()
            return (*config, *service, _build_job(pod))


def kubectl_commands(job: ClusterJob, site: KubernetesSite, file: Path) -> tuple[str, ...]:
    """Return the kubectl commands that create `file`, show the pods, follow their logs, and delete everything."""
    pod = build_pod(job, site, {})
    where = f" -n {site.namespace}" if site.namespace else ""
    path = shlex.quote(str(file))
    these = f"{where} -l {_INSTANCE_LABEL}={pod.name}"
    return (
        f"kubectl create{where} -f {path}",
        f"kubectl get pods{these} --watch",
        f"kubectl logs{these} --follow --prefix --max-log-requests={max(5, job.nodes)}",
        f"kubectl delete{where} -f {path}",
    )


def _check_pod(pod: PodSpec) -> None:
    job, site = pod.job, pod.site
    if not site.image:
        raise RecipeError(
            "kubernetes.image: is not set (build the Dockerfile, push it, and name it: REGISTRY/NAME:TAG)"
        )
    if not site.claim:
        raise RecipeError("kubernetes.claim: is not set (name the PersistentVolumeClaim with the data and the runs)")
    if job.tasks:
        raise WorldError(
            f"--array: {count(len(job.tasks), 'task')}, but on Kubernetes a job cannot have tasks (leave --array out)"
        )
    if job.nodes > 1 and not job.starts_ranks:
        raise WorldError(
            f"--nodes: {job.nodes}, but {job.args[0]} starts its own ranks, on Kubernetes only within one pod "
            "(write --nodes 1)"
        )
    num_bytes = sum(len(text.encode("utf-8", "surrogateescape")) for text in pod.config_data.values())
    if num_bytes > _MAX_CONFIG_MAP_BYTES:
        raise RecipeError(
            f"recipe: {mib(num_bytes)} does not fit into a ConfigMap, which holds 1 MiB (name files in it)"
        )


def _object_metadata(pod: PodSpec) -> Manifest:
    metadata: Manifest = {"name": pod.name}
    if pod.site.namespace:
        metadata["namespace"] = pod.site.namespace
    metadata["labels"] = _object_labels(pod)
    if pod.job.comments:
        metadata["annotations"] = {"paceline/said": "\n".join(pod.job.comments) + "\n"}
    return metadata


def _object_labels(pod: PodSpec) -> dict[str, str]:
    return {**pod.site.labels, "app.kubernetes.io/name": "paceline", _INSTANCE_LABEL: pod.name}


def _queued_metadata(pod: PodSpec) -> Manifest:
    """Return metadata with the Kueue queue that holds the job until all its pods fit.

    https://kueue.sigs.k8s.io/docs/tasks/run/jobs/
    """
    metadata = _object_metadata(pod)
    if pod.site.queue:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = pod.site.queue
    return metadata


def _suspend_field(pod: PodSpec) -> Manifest:
    return {"suspend": True} if pod.site.queue else {}


def _build_config_map(pod: PodSpec) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _object_metadata(pod),
        "immutable": True,  # a job that runs must not see its recipe change
        "data": pod.config_data,
    }


def _build_service(pod: PodSpec) -> Manifest:
    """Return the Service that gives pods host names: NAME-0.NAME."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _object_metadata(pod),
        "spec": {
            "clusterIP": "None",  # headless: its DNS names are those of pods
            "publishNotReadyAddresses": True,  # pods rendezvous before they are ready
            "selector": {_INSTANCE_LABEL: pod.name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def _build_job(pod: PodSpec) -> Manifest:
    """Return the indexed Job: https://kubernetes.io/docs/concepts/workloads/controllers/job/."""
    nodes = pod.job.nodes
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _queued_metadata(pod),
        "spec": {
            **_suspend_field(pod),
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": pod.site.retries * nodes,  # counts the failures of all pods together
            "podReplacementPolicy": "Failed",  # a terminating pod may still write its checkpoint
            "podFailurePolicy": {"rules": _failure_rules()},
            **active_deadline(pod.site.time),
            "template": {"metadata": {"labels": _object_labels(pod)}, "spec": _build_pod_spec(pod)},
        },
    }


def _failure_rules() -> list[Manifest]:
    """Return the pod failure policy by exit code (docs/reference/exit-codes.md); the first match decides."""

    def ended_with(codes: list[int]) -> Manifest:
        return {"containerName": _CONTAINER_NAME, "operator": "In", "values": codes}

    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        # A restart would fail in the same way: refused arguments, or a NaN.
        {"action": "FailJob", "onExitCodes": ended_with([2, 3])},
        # Preempted and saved; 143 is torchrun's agent after SIGTERM.
        {"action": "Ignore", "onExitCodes": ended_with([75, 143])},
    ]


def _build_pod_spec(pod: PodSpec) -> Manifest:
    program, arguments = container_command(
        pod,
        [
            f"--nnodes={pod.job.nodes}",
            f"--nproc-per-node={pod.job.ranks_per_node}",
            f"--rdzv-endpoint={pod.name}-0.{pod.name}:{PORT}",
        ],
    )
    has_peers = pod.job.nodes > 1
    return {
        "restartPolicy": "Never",
        **({"subdomain": pod.name} if has_peers else {}),
        "automountServiceAccountToken": False,  # training never calls the cluster's API
        "enableServiceLinks": False,  # else variables for every Service of the namespace
        **pod_placement(pod),
        "containers": [
            {
                "name": _CONTAINER_NAME,
                "image": pod.site.image,
                "command": program,
                "args": arguments,
                "workingDir": pod.site.mount,
                "env": [*container_environ(pod), *([node_rank_variable()] if has_peers else [])],
                "resources": container_resources(pod),
                "securityContext": security_context(),
                "volumeMounts": volume_mounts(pod),
            }
        ],
        "volumes": pod_volumes(pod),
    }


def _build_train_job(pod: PodSpec) -> Manifest:
    """Return the TrainJob: https://github.com/kubeflow/trainer/blob/master/pkg/apis/trainer/v1alpha1/trainjob_types.go"""
    site = pod.site
    # The runtime sets PET_MASTER_ADDR and PET_MASTER_PORT, and the number of nodes.
    program, arguments = container_command(pod, ["--rdzv-endpoint=$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"])
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _queued_metadata(pod),
        "spec": {
            **_suspend_field(pod),
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": site.runtime_kind, "name": site.runtime},
            **active_deadline(site.time),
            "trainer": {
                "image": site.image,
                "command": program,
                "args": arguments,
                "env": container_environ(pod),
                "numNodes": pod.job.nodes,
                "numProcPerNode": pod.job.ranks_per_node,
                "resourcesPerNode": container_resources(pod),
            },
            "runtimePatches": [_build_runtime_patch(pod)],
        },
    }


def _build_runtime_patch(pod: PodSpec) -> Manifest:
    """Return the patch of the runtime's pod template."""
    pods = {
        "metadata": {"labels": _object_labels(pod)},
        "spec": {
            **pod_placement(pod),
            "containers": [
                {"name": _CONTAINER_NAME, "securityContext": security_context(), "volumeMounts": volume_mounts(pod)}
            ],
            "volumes": pod_volumes(pod),
        },
    }
    jobs = [{"name": _CONTAINER_NAME, "template": {"spec": {"template": pods}}}]
    return {
        "manager": "paceline/submit",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}},
    }
