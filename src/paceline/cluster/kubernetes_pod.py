"""A pod of a job: what it runs, in which environment, on which volumes, with which rights. Both kinds of job share it.

One node starts its ranks by itself. Several meet through torchrun's rendezvous, whose store the first one holds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from paceline.cluster.job import Job
from paceline.cluster.kubernetes_names import digest, dns_label, file_key, literal, unique_label
from paceline.cluster.kubernetes_site import KubernetesSite

PORT: Final = 29_400
_RECIPES: Final = PurePosixPath("/etc/paceline")
_SCRATCH: Final = "/tmp"  # noqa: S108 - an empty volume of the pod's own
_INDEX: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_SIGNALS: Final = "SIGTERM,SIGINT,SIGHUP,SIGUSR1"
_LEAVING_S: Final = 30
"""Seconds beyond the ranks' own: torchrun ends what is left of them, and itself."""


@dataclass(frozen=True)
class Pod:
    """Say what all pods of a job have in common: `name` is the job's in the cluster.

    `files` are the texts of what the job's words name that is only here: the recipe, and the ladder, by their paths.
    """

    name: str
    job: Job
    site: KubernetesSite
    files: Mapping[Path, str]

    @property
    def run_dir(self) -> PurePosixPath:
        """Return where pods see the run directory: where it was asked for, or below the claim's `runs`."""
        return run_dir_in_pods(self.job, self.site)

    @property
    def data(self) -> dict[str, str]:
        """Return the texts by the names that pods see."""
        return {self.key(path): text for path, text in self.files.items()}

    def key(self, path: Path) -> str:
        """Return what pods see a file as; its stem is what the run calls its recipe, or its ladder."""
        return f"{dns_label(self.job.name) if path == self.job.frozen else file_key(path.stem)}.yaml"

    @property
    def grace(self) -> int:
        """Return the whole seconds that ranks have to save and leave."""
        return math.ceil(self.job.grace_s)


def build_pod(job: Job, site: KubernetesSite, files: Mapping[Path, str]) -> Pod:
    """Return the pod of `job`, whose name differs between run directories."""
    return Pod(unique_label(job.name, str(job.run_dir)), job, site, files)


def run_dir_in_pods(job: Job, site: KubernetesSite) -> PurePosixPath:
    """Return the run directory as pods see it: another for each here. This machine need not see the claim."""
    mount, asked = PurePosixPath(site.mount), PurePosixPath(job.run_dir)
    return asked if asked.is_relative_to(mount) else mount / "runs" / f"{asked.name}-{digest(str(asked))}"


def command(pod: Pod, rendezvous: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the program and its arguments; `rendezvous` are the options that say where several nodes meet."""
    words = _words(pod)
    if pod.job.nodes == 1:
        return ["paceline"], [*map(literal, words), *_ranks(pod)]
    # torchrun fills `${local_rank}` into arguments, and makes one `$` of two.
    filled = [literal(word.replace("$", "$$")) for word in words]
    return ["python", "-m", "paceline.parallel.agent"], [*rendezvous, *_agent(pod), "-m", "paceline", *filled]


def environ(pod: Pod) -> list[dict[str, Any]]:
    """Return the variables of the container; the site's come last and win."""
    ours = {
        "HOME": _SCRATCH,
        "USER": "paceline",  # the user need not be in the image's list of users
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",  # a module in the current folder, which may be somebody's data, is not to be imported
    }
    if pod.job.nodes > 1:
        # A rank that is started again may otherwise read addresses of before: https://github.com/pytorch/pytorch/issues/135712
        ours["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        ours["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(pod.grace)
    given = {**ours, **{name: literal(value) for name, value in pod.site.environ.items()}}
    return [{"name": name, "value": value} for name, value in given.items()]


def index_variable() -> dict[str, Any]:
    """Return the variable with a pod's place among those of an indexed Job, as Kubeflow Trainer's torch plugin sets it.

    https://github.com/kubeflow/trainer/blob/master/pkg/runtime/framework/plugins/torch/torch.go
    """
    return {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}


def resources(pod: Pod) -> dict[str, Any]:
    """Return what a node gives: requests equal limits, so that a loader sees the processors it has, and no others."""
    share: dict[str, str] = {"cpu": str(pod.site.cpus_per_rank * pod.job.ranks_per_node), "memory": pod.site.memory}
    if pod.job.gpus_per_node:
        share[pod.site.gpu_resource] = str(pod.job.gpus_per_node)
    return {"requests": share, "limits": dict(share)}


def volumes(pod: Pod) -> list[dict[str, Any]]:
    """Return the volumes: the claim, shared memory, scratch, and the files that travel along, where there are any."""
    ours: list[dict[str, Any]] = [
        {"name": "work", "persistentVolumeClaim": {"claimName": pod.site.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pod.site.shm}},
        {"name": "scratch", "emptyDir": {}},
    ]
    return [*ours, {"name": "recipe", "configMap": {"name": pod.name}}] if pod.files else ours


def mounts(pod: Pod) -> list[dict[str, Any]]:
    """Return where the container sees the volumes."""
    ours: list[dict[str, Any]] = [
        {"name": "work", "mountPath": pod.site.mount},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        {"name": "scratch", "mountPath": _SCRATCH},
    ]
    return [*ours, {"name": "recipe", "mountPath": str(_RECIPES), "readOnly": True}] if pod.files else ours


def placement(pod: Pod) -> dict[str, Any]:
    """Return who a pod runs as, on which nodes, from whose image, and how long it may take to leave.

    The user fits the `restricted` standard of https://kubernetes.io/docs/concepts/security/pod-security-standards/.
    """
    user = pod.site.user
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": pod.grace + _LEAVING_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "fsGroupChangePolicy": "OnRootMismatch",  # else every start walks through all runs
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if pod.site.node_selector:
        spec["nodeSelector"] = dict(pod.site.node_selector)
    if pod.site.tolerations:
        spec["tolerations"] = [
            {name: value for name, value in each.model_dump().items() if value} for each in pod.site.tolerations
        ]
    if pod.site.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in pod.site.pull_secrets]
    return spec


def rights() -> dict[str, Any]:
    """Return what the container may do: nothing but run. It writes to the claim, /dev/shm and /tmp alone."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def deadline(time: Any) -> dict[str, int]:
    """Return the limit of a job's time, where it has one."""
    return {} if time == "off" else {"activeDeadlineSeconds": math.ceil(time.seconds)}


def _words(pod: Pod) -> list[str]:
    """Return the job's words with recipe, ladder and the run directory where pods see them."""
    job = pod.job
    files, here = {str(path): str(_RECIPES / pod.key(path)) for path in pod.files}, str(job.run_dir)
    words = []
    for word in job.words:
        if word in files:
            words.append(files[word])
        elif word == here or word.startswith(f"{here}/"):
            words.append(str(pod.run_dir) + word[len(here) :])
        else:
            words.append(word)
    return words


def _ranks(pod: Pod) -> list[str]:
    """Return the options with which one node starts its own ranks, where the program is ranks."""
    if not pod.job.is_ranks:
        return []
    restarts = [f"--max-restarts={pod.site.max_restarts}"] if pod.job.words[0] == "train" else []
    return [f"--ranks={pod.job.ranks_per_node}", *restarts]


def _agent(pod: Pod) -> list[str]:
    wait_s = math.ceil(pod.site.wait.seconds)
    return [
        "--rdzv-backend=c10d",
        "--node-rank=$(PET_NODE_RANK)",
        f"--rdzv-id={pod.name}",
        f"--rdzv-conf=join_timeout={wait_s},read_timeout={wait_s}",
        f"--max-restarts={pod.site.max_restarts}",
        f"--signals-to-handle={_SIGNALS}",
    ]
