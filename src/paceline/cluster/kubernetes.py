"""A job as manifests for Kubernetes: a TrainJob of Kubeflow Trainer, or a plain indexed Job with a headless Service.

Recipe and ladder travel with them as a ConfigMap, so that no file has to be on the cluster. Nothing is sent from here.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceline.cluster.job import Job
from paceline.cluster.kubernetes_pod import (
    PORT,
    Pod,
    build_pod,
    command,
    deadline,
    environ,
    index_variable,
    mounts,
    placement,
    resources,
    rights,
    volumes,
)
from paceline.cluster.kubernetes_site import KubernetesSite
from paceline.core.errors import RecipeError, WorldError
from paceline.core.units import count, mib

Manifest = dict[str, Any]

_CONTAINER: Final = "node"
"""What Kubeflow's runtimes call the container and the job of the ranks; ours is called the same."""
_LARGEST_BYTES: Final = 1_048_576
"""What a ConfigMap may hold: https://kubernetes.io/docs/concepts/configuration/configmap/."""
_INSTANCE: Final = "app.kubernetes.io/instance"


def manifests(job: Job, site: KubernetesSite, *, kept: Mapping[Path, str] | None = None) -> tuple[Manifest, ...]:
    """Return the objects of `job`, in the order in which they are created.

    `kept` are the texts of the files that are kept for the job in its folder. Raise `RecipeError` for what the site
    lacks, `WorldError` for a job that pods cannot be.
    """
    pod = build_pod(job, site, kept or {})
    _refuse(pod)
    config = (_config_map(pod),) if pod.files else ()
    match site.kind:
        case "trainjob":
            return (*config, _train_job(pod))
        case "job":
            service = (_service(pod),) if job.nodes > 1 else ()
            return (*config, *service, _job(pod))


def next_steps(job: Job, site: KubernetesSite, file: Path) -> tuple[str, ...]:
    """Return the commands that create what is in `file`, show the pods, follow the output, and remove it all."""
    pod = build_pod(job, site, {})
    where = f" -n {site.namespace}" if site.namespace else ""
    path = shlex.quote(str(file))
    these = f"{where} -l {_INSTANCE}={pod.name}"
    return (
        f"kubectl create{where} -f {path}",
        f"kubectl get pods{these} --watch",
        f"kubectl logs{these} --follow --prefix --max-log-requests={max(5, job.nodes)}",
        f"kubectl delete{where} -f {path}",
    )


def _refuse(pod: Pod) -> None:
    job, site = pod.job, pod.site
    if not site.image:
        raise RecipeError(
            "kubernetes.image: is not set (build the Dockerfile, push it, and name it: REGISTRY/NAME:TAG)"
        )
    if not site.claim:
        raise RecipeError("kubernetes.claim: is not set (name the PersistentVolumeClaim with the data and the runs)")
    if job.tasks:
        raise WorldError(
            f"--array: {count(len(job.tasks), 'task')}, but Kubernetes is given one job (leave --array out)"
        )
    if job.nodes > 1 and not job.is_ranks:
        raise WorldError(
            f"--nodes: {job.nodes}, but {job.words[0]} starts its own ranks, and on Kubernetes only in its own pod "
            "(write --nodes 1)"
        )
    num_bytes = sum(len(text.encode("utf-8", "surrogateescape")) for text in pod.data.values())
    if num_bytes > _LARGEST_BYTES:
        raise RecipeError(f"recipe: {mib(num_bytes)} do not fit into a ConfigMap, which holds 1 MiB (name files in it)")


def _metadata(pod: Pod) -> Manifest:
    """Return name, labels and what the job was asked for with."""
    metadata: Manifest = {"name": pod.name}
    if pod.site.namespace:
        metadata["namespace"] = pod.site.namespace
    metadata["labels"] = _labels(pod)
    if pod.job.said:
        metadata["annotations"] = {"paceline/said": "\n".join(pod.job.said) + "\n"}
    return metadata


def _labels(pod: Pod) -> dict[str, str]:
    return {**pod.site.labels, "app.kubernetes.io/name": "paceline", _INSTANCE: pod.name}


def _queued(pod: Pod) -> Manifest:
    """Return the metadata of what a queue holds back until there is room for all its pods.

    https://kueue.sigs.k8s.io/docs/tasks/run/jobs/
    """
    metadata = _metadata(pod)
    if pod.site.queue:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = pod.site.queue
    return metadata


def _suspended(pod: Pod) -> Manifest:
    return {"suspend": True} if pod.site.queue else {}


def _config_map(pod: Pod) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(pod),
        "immutable": True,
        "data": pod.data,
    }


def _service(pod: Pod) -> Manifest:
    """Return the Service that gives pods host names: NAME-0.NAME, also before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(pod),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {_INSTANCE: pod.name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def _job(pod: Pod) -> Manifest:
    """Return the indexed Job: https://kubernetes.io/docs/concepts/workloads/controllers/job/."""
    nodes = pod.job.nodes
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _queued(pod),
        "spec": {
            **_suspended(pod),
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": pod.site.retries * nodes,
            "podReplacementPolicy": "Failed",  # a pod that is still leaving may be writing its checkpoint
            "podFailurePolicy": {"rules": _failure_rules()},
            **deadline(pod.site.time),
            "template": {"metadata": {"labels": _labels(pod)}, "spec": _pod_spec(pod)},
        },
    }


def _failure_rules() -> list[Manifest]:
    """Return what a pod's end means, by `docs/reference/exit-codes.md`; the first rule that fits decides.

    143 is an agent that was asked to leave.
    """

    def ended_with(codes: list[int]) -> Manifest:
        return {"containerName": _CONTAINER, "operator": "In", "values": codes}

    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": ended_with([2, 3])},
        {"action": "Ignore", "onExitCodes": ended_with([75, 143])},
    ]


def _pod_spec(pod: Pod) -> Manifest:
    program, arguments = command(
        pod,
        [
            f"--nnodes={pod.job.nodes}",
            f"--nproc-per-node={pod.job.ranks_per_node}",
            f"--rdzv-endpoint={pod.name}-0.{pod.name}:{PORT}",
        ],
    )
    is_met = pod.job.nodes > 1
    return {
        "restartPolicy": "Never",
        **({"subdomain": pod.name} if is_met else {}),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **placement(pod),
        "containers": [
            {
                "name": _CONTAINER,
                "image": pod.site.image,
                "command": program,
                "args": arguments,
                "workingDir": pod.site.mount,
                "env": [*environ(pod), *([index_variable()] if is_met else [])],
                "resources": resources(pod),
                "securityContext": rights(),
                "volumeMounts": mounts(pod),
            }
        ],
        "volumes": volumes(pod),
    }


def _train_job(pod: Pod) -> Manifest:
    """Return the TrainJob; its runtime says in variables how many nodes there are and where the first one is.

    https://github.com/kubeflow/trainer/blob/master/pkg/apis/trainer/v1alpha1/trainjob_types.go
    """
    site = pod.site
    program, arguments = command(pod, ["--rdzv-endpoint=$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"])
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _queued(pod),
        "spec": {
            **_suspended(pod),
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": site.runtime_kind, "name": site.runtime},
            **deadline(site.time),
            "trainer": {
                "image": site.image,
                "command": program,
                "args": arguments,
                "env": environ(pod),
                "numNodes": pod.job.nodes,
                "numProcPerNode": pod.job.ranks_per_node,
                "resourcesPerNode": resources(pod),
            },
            "runtimePatches": [_runtime_patch(pod)],
        },
    }


def _runtime_patch(pod: Pod) -> Manifest:
    """Return what a TrainJob may change of its runtime's pods, laid into the place where they stand."""
    pods = {
        "metadata": {"labels": _labels(pod)},
        "spec": {
            **placement(pod),
            "containers": [{"name": _CONTAINER, "securityContext": rights(), "volumeMounts": mounts(pod)}],
            "volumes": volumes(pod),
        },
    }
    jobs = [{"name": _CONTAINER, "template": {"spec": {"template": pods}}}]
    return {
        "manager": "paceline/submit",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}},
    }
