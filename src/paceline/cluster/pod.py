"""Pod of a Kubernetes job: names, command, environment, volumes and permissions."""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from paceline.cluster.job import ClusterJob
from paceline.cluster.site import KubernetesSite
from paceline.core.errors import RecipeError

_MAX_LABEL_LENGTH: Final = 40
"""Leaves room in the 63 characters of a label for suffixes: `-node-0-1023-x7k2p` of a TrainJob."""
_DIGEST_LENGTH: Final = 6
PORT: Final = 29_400
_CONFIG_FOLDER: Final = PurePosixPath("/etc/paceline")
_SCRATCH: Final = "/tmp"  # noqa: S108 - an empty volume of the pod's own
_INDEX_FIELD: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_SIGNALS: Final = "SIGTERM,SIGINT,SIGHUP,SIGUSR1"
_AGENT_GRACE_S: Final = 30
"""Seconds beyond the grace period of the ranks, for torchrun to end the rest and itself."""


def dns_label(text: str) -> str:
    """Return `text` as an RFC 1035 label of at most 33 characters, `job` if nothing remains.

    Services and TrainJobs require it.
    """
    # Lower-case letters, digits and single hyphens, a letter first.
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")
    return label[: _MAX_LABEL_LENGTH - _DIGEST_LENGTH - 1].strip("-") or "job"


def file_key(text: str) -> str:
    """Return `text` as a file name in a ConfigMap: letters, digits, `-`, `_` and `.`."""
    return re.sub(r"[^-._A-Za-z0-9]+", "-", text)


def unique_label(text: str, key: str) -> str:
    """Return `text` as a DNS label of at most 40 characters, unique per `key` and deterministic."""
    return f"{dns_label(text)}-{short_digest(text, key)}"


def short_digest(*texts: str) -> str:
    """Return 6 hex digits of the hash of `texts`."""
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogateescape")).hexdigest()[:_DIGEST_LENGTH]


def escape_expansion(text: str) -> str:
    """Return `text` with `$` escaped, so that Kubernetes does not expand `$(NAME)`.

    Raise `RecipeError` for text that neither YAML nor a command line can hold. Rules: `command` in
    https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/.
    """
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise RecipeError(f"{text!r}: is not text, and cannot be part of a manifest (write it as UTF-8)")
    return text.replace("$", "$$")


@dataclass(frozen=True)
class PodSpec:
    """Data that all pods of a job share; `name` is the job's name in the cluster.

    `files` are the texts, by path, of recipe and ladder, which exist only on this machine.
    """

    name: str
    job: ClusterJob
    site: KubernetesSite
    files: Mapping[Path, str]

    @property
    def run_dir(self) -> PurePosixPath:
        """Run directory as pods see it."""
        return run_dir_in_pods(self.job, self.site)

    @property
    def config_data(self) -> dict[str, str]:
        """Texts of the ConfigMap by file name."""
        return {self.file_name(path): text for path, text in self.files.items()}

    def file_name(self, path: Path) -> str:
        """Return the file name in pods; its stem becomes the name of the recipe or ladder."""
        # The stem becomes the recipe's or ladder's name in pods.
        return f"{dns_label(self.job.name) if path == self.job.frozen_recipe else file_key(path.stem)}.yaml"

    @property
    def grace_s(self) -> int:
        """Whole seconds that ranks have to save and exit."""
        return math.ceil(self.job.grace_s)


def build_pod(job: ClusterJob, site: KubernetesSite, files: Mapping[Path, str]) -> PodSpec:
    """Return the pod of `job`; its name is unique per run directory."""
    return PodSpec(unique_label(job.name, str(job.run_dir)), job, site, files)


def run_dir_in_pods(job: ClusterJob, site: KubernetesSite) -> PurePosixPath:
    """Return the run directory as pods see it: unchanged below the mount, else a unique folder in `MOUNT/runs`."""
    # This machine need not see the claim, so nothing is looked up.
    mount, requested = PurePosixPath(site.mount), PurePosixPath(job.run_dir)
    return (
        requested
        if requested.is_relative_to(mount)
        else mount / "runs" / f"{requested.name}-{short_digest(str(requested))}"
    )


def container_command(pod: PodSpec, rendezvous: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the program and its arguments; `rendezvous` are torchrun's options for several nodes."""
    args = _pod_args(pod)
    if pod.job.nodes == 1:
        return ["paceline"], [*map(escape_expansion, args), *_rank_options(pod)]
    # torchrun expands `${local_rank}` in arguments, and `$$` to `$`.
    filled = [escape_expansion(word.replace("$", "$$")) for word in args]
    return ["python", "-m", "paceline.parallel.torchrun_agent"], [
        *rendezvous,
        *_agent_options(pod),
        "-m",
        "paceline",
        *filled,
    ]


def container_environ(pod: PodSpec) -> list[dict[str, Any]]:
    """Return the container's environment variables; the site's override paceline's."""
    ours = {
        "HOME": _SCRATCH,
        "USER": "paceline",  # the user ID may have no name in the image
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",  # do not import modules from the current folder, which may hold data
    }
    if pod.job.nodes > 1:
        # Otherwise a restarted rank may read stale addresses: https://github.com/pytorch/pytorch/issues/135712
        ours["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        ours["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(pod.grace_s)
    # Later entries win: the site overrides paceline.
    given = {**ours, **{name: escape_expansion(value) for name, value in pod.site.environ.items()}}
    return [{"name": name, "value": value} for name, value in given.items()]


def node_rank_variable() -> dict[str, Any]:
    """Return the node rank of an indexed Job, as Kubeflow Trainer's torch plugin sets it.

    https://github.com/kubeflow/trainer/blob/master/pkg/runtime/framework/plugins/torch/torch.go
    """
    return {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX_FIELD}}}


def container_resources(pod: PodSpec) -> dict[str, Any]:
    """Return requests and equal limits."""
    # Equal limits, so that a loader sees exactly the CPUs it has.
    share: dict[str, str] = {"cpu": str(pod.site.cpus_per_rank * pod.job.ranks_per_node), "memory": pod.site.memory}
    if pod.job.gpus_per_node:
        share[pod.site.gpu_resource] = str(pod.job.gpus_per_node)
    return {"requests": share, "limits": dict(share)}


def pod_volumes(pod: PodSpec) -> list[dict[str, Any]]:
    """Return the volumes: claim, shared memory, scratch, and the ConfigMap if there are files."""
    ours: list[dict[str, Any]] = [
        {"name": "work", "persistentVolumeClaim": {"claimName": pod.site.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pod.site.shm}},
        {"name": "scratch", "emptyDir": {}},
    ]
    return [*ours, {"name": "recipe", "configMap": {"name": pod.name}}] if pod.files else ours


def volume_mounts(pod: PodSpec) -> list[dict[str, Any]]:
    """Return the volume mounts of the container."""
    ours: list[dict[str, Any]] = [
        {"name": "work", "mountPath": pod.site.mount},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        {"name": "scratch", "mountPath": _SCRATCH},
    ]
    return [*ours, {"name": "recipe", "mountPath": str(_CONFIG_FOLDER), "readOnly": True}] if pod.files else ours


def pod_placement(pod: PodSpec) -> dict[str, Any]:
    """Return the pod's security context, node selection, pull secrets and grace period.

    The user satisfies the `restricted` standard: https://kubernetes.io/docs/concepts/security/pod-security-standards/.
    """
    user = pod.site.user
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": pod.grace_s + _AGENT_GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "fsGroupChangePolicy": "OnRootMismatch",  # else every start changes the owner of all files
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


def security_context() -> dict[str, Any]:
    """Return the container's security context: no privileges; only the claim, /dev/shm and /tmp are writable."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def active_deadline(time: Any) -> dict[str, int]:
    """Return the time limit of the job, if it has one."""
    return {} if time == "off" else {"activeDeadlineSeconds": math.ceil(time.seconds)}


def _pod_args(pod: PodSpec) -> list[str]:
    """Return the job's arguments with paths as pods see them."""
    job = pod.job
    files, run_dir = {str(path): str(_CONFIG_FOLDER / pod.file_name(path)) for path in pod.files}, str(job.run_dir)
    args = []
    for word in job.args:
        if word in files:
            args.append(files[word])
        elif word == run_dir or word.startswith(f"{run_dir}/"):
            args.append(str(pod.run_dir) + word[len(run_dir) :])
        else:
            args.append(word)
    return args


def _rank_options(pod: PodSpec) -> list[str]:
    if not pod.job.starts_ranks:
        return []
    restarts = [f"--max-restarts={pod.site.max_restarts}"] if pod.job.args[0] == "train" else []
    return [f"--ranks={pod.job.ranks_per_node}", *restarts]


def _agent_options(pod: PodSpec) -> list[str]:
    wait_s = math.ceil(pod.site.wait.seconds)
    return [
        "--rdzv-backend=c10d",
        "--node-rank=$(PET_NODE_RANK)",
        f"--rdzv-id={pod.name}",
        f"--rdzv-conf=join_timeout={wait_s},read_timeout={wait_s}",
        f"--max-restarts={pod.site.max_restarts}",
        f"--signals-to-handle={_SIGNALS}",
    ]
