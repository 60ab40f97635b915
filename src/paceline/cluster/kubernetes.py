"""Write a job as Kubernetes manifests: a Kubeflow TrainJob, or an indexed Job with a headless Service."""

import hashlib
import json
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from paceline.cluster.job import ClusterJob
from paceline.cluster.site import KubernetesSite
from paceline.core.errors import RecipeError, WorldError
from paceline.core.templates import text_environment
from paceline.core.units import count, mib

_MAX_LABEL_LENGTH: Final = 40
"""Leaves room in the 63 characters of a label for suffixes: `-node-0-1023-x7k2p` of a TrainJob."""
_DIGEST_LENGTH: Final = 6
_PORT: Final = 29_400
_CONFIG_FOLDER: Final = PurePosixPath("/etc/paceline")
_SIGNALS: Final = "SIGTERM,SIGINT,SIGHUP,SIGUSR1"
_AGENT_GRACE_S: Final = 30
"""Seconds beyond the grace period of the ranks, for torchrun to end the rest and itself."""
_MAX_CONFIG_MAP_BYTES: Final = 1_048_576
"""Size limit of a ConfigMap: https://kubernetes.io/docs/concepts/configuration/configmap/."""
_BLOCK_TEXT: Final = re.compile(r"(?=[!-~])(?:[ -~]*[!-~]\n|\n)*[ -~]*[!-~]\n")
"""Lines of printable ASCII: the first has no leading space, none a trailing one, and the last is not empty."""


def build_manifests(job: ClusterJob, site: KubernetesSite, *, files: Mapping[Path, str] | None = None) -> str:
    """Return the objects of `job` as a YAML stream in creation order; `files` are the texts of its frozen files.

    Raise `RecipeError` for missing site fields, and `WorldError` for a job that pods cannot run.
    """
    _check_job(job, site)
    paths = {path: _file_name(job, path) for path in files or {}}
    config = {paths[path]: text for path, text in (files or {}).items()}
    num_bytes = sum(len(text.encode("utf-8", "surrogateescape")) for text in config.values())
    if num_bytes > _MAX_CONFIG_MAP_BYTES:
        raise RecipeError(
            f"recipe: {mib(num_bytes)} does not fit into a ConfigMap, which holds 1 MiB (name files in it)"
        )
    name, grace_s = _object_name(job), math.ceil(job.grace_s)
    command, args = _container_command(job, site, name, _pod_args(job, site, paths))
    # Equal limits, so that a loader sees exactly the CPUs it has.
    share = {"cpu": str(site.cpus_per_rank * job.ranks_per_node), "memory": site.memory}
    if job.gpus_per_node:
        share[site.gpu_resource] = str(job.gpus_per_node)
    return (
        text_environment("paceline.cluster", json=_to_json, block=_to_block)
        .get_template("kubernetes.yaml.j2")
        .render(
            job=job,
            site=site,
            name=name,
            labels={**site.labels, "app.kubernetes.io/name": "paceline", "app.kubernetes.io/instance": name},
            config=config,
            config_folder=str(_CONFIG_FOLDER),
            command=command,
            args=args,
            environ=_container_environ(job, site, grace_s),
            share=share,
            tolerations=[
                each.model_dump(exclude_defaults=True) | {"operator": each.operator} for each in site.tolerations
            ],
            pod_grace_s=grace_s + _AGENT_GRACE_S,
            port=_PORT,
        )
    )


def kubectl_commands(job: ClusterJob, site: KubernetesSite, file: Path) -> tuple[str, ...]:
    """Return the kubectl commands that create `file`, show the pods, follow their logs, and delete everything."""
    where = f" -n {site.namespace}" if site.namespace else ""
    path = shlex.quote(str(file))
    these = f"{where} -l app.kubernetes.io/instance={_object_name(job)}"
    return (
        f"kubectl create{where} -f {path}",
        f"kubectl get pods{these} --watch",
        f"kubectl logs{these} --follow --prefix --max-log-requests={max(5, job.nodes)}",
        f"kubectl delete{where} -f {path}",
    )


def run_dir_in_pods(job: ClusterJob, site: KubernetesSite) -> PurePosixPath:
    """Return the run directory as pods see it: unchanged below the mount, else a unique folder in `MOUNT/runs`."""
    # This machine need not see the claim, so nothing is looked up.
    mount, requested = PurePosixPath(site.mount), PurePosixPath(job.run_dir)
    if requested.is_relative_to(mount):
        return requested
    return mount / "runs" / f"{requested.name}-{short_digest(str(requested))}"


def dns_label(text: str) -> str:
    """Return `text` as an RFC 1035 label of at most 33 characters, `job` if nothing remains.

    Services and TrainJobs require it.
    """
    # Lower-case letters, digits and single hyphens, a letter first.
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")
    return label[: _MAX_LABEL_LENGTH - _DIGEST_LENGTH - 1].strip("-") or "job"


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


def _object_name(job: ClusterJob) -> str:
    return unique_label(job.name, str(job.run_dir))


def _file_name(job: ClusterJob, path: Path) -> str:
    # The stem becomes the recipe's or ladder's name in pods: letters, digits, `-`, `_` and `.`.
    return f"{dns_label(job.name) if path == job.frozen_recipe else re.sub(r'[^-._A-Za-z0-9]+', '-', path.stem)}.yaml"


def _check_job(job: ClusterJob, site: KubernetesSite) -> None:
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


def _pod_args(job: ClusterJob, site: KubernetesSite, files: Mapping[Path, str]) -> list[str]:
    """Return the job's arguments with paths as pods see them; `files` has the file names of frozen files."""
    run_dir, pod_run_dir = str(job.run_dir), str(run_dir_in_pods(job, site))
    moved = {str(path): str(_CONFIG_FOLDER / name) for path, name in files.items()}
    return [
        moved.get(word) or (pod_run_dir + word[len(run_dir) :] if f"{word}/".startswith(f"{run_dir}/") else word)
        for word in job.args
    ]


def _container_command(
    job: ClusterJob, site: KubernetesSite, name: str, args: list[str]
) -> tuple[list[str], list[str]]:
    """Return the program and its arguments: paceline on one node, torchrun's agent on several."""
    if job.nodes == 1:
        restarts = [f"--max-restarts={site.max_restarts}"] if job.args[0] == "train" else []
        ranks = [f"--ranks={job.ranks_per_node}", *restarts] if job.starts_ranks else []
        return ["paceline"], [*map(escape_expansion, args), *ranks]
    if site.kind == "job":
        rendezvous = [f"--nnodes={job.nodes}", f"--nproc-per-node={job.ranks_per_node}"]
        rendezvous.append(f"--rdzv-endpoint={name}-0.{name}:{_PORT}")
    else:  # the runtime sets PET_MASTER_ADDR and PET_MASTER_PORT, and the number of nodes
        rendezvous = ["--rdzv-endpoint=$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"]
    wait_s = math.ceil(site.wait.seconds)
    agent = [
        *rendezvous,
        "--rdzv-backend=c10d",
        "--node-rank=$(PET_NODE_RANK)",
        f"--rdzv-id={name}",
        f"--rdzv-conf=join_timeout={wait_s},read_timeout={wait_s}",
        f"--max-restarts={site.max_restarts}",
        f"--signals-to-handle={_SIGNALS}",
        *("-m", "paceline"),
    ]
    # torchrun expands `${local_rank}` in arguments, and `$$` to `$`.
    filled = [escape_expansion(word.replace("$", "$$")) for word in args]
    return ["python", "-m", "paceline.parallel.torchrun_agent"], [*agent, *filled]


def _container_environ(job: ClusterJob, site: KubernetesSite, grace_s: int) -> dict[str, str]:
    """Return the container's environment variables; the site's override paceline's."""
    ours = {
        "HOME": "/tmp",  # noqa: S108 - an empty volume of the pod's own
        "USER": "paceline",  # the user ID may have no name in the image
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",  # do not import modules from the current folder, which may hold data
    }
    if job.nodes > 1:
        # Otherwise a restarted rank may read stale addresses: https://github.com/pytorch/pytorch/issues/135712
        ours["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        ours["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(grace_s)
    return {**ours, **{name: escape_expansion(value) for name, value in site.environ.items()}}


def _to_json(value: Any) -> str:
    """Return plain values as JSON, which is YAML 1.1 and 1.2 too, on one line."""
    # YAML has an escape of its own for characters that it does not allow, and for JSON's pairs of surrogates.
    text = json.dumps(value, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in text)


def _to_block(text: str, indent: int) -> str:
    """Return `text` as a YAML block whose lines are indented; as JSON if it has more than printable lines."""
    if not _BLOCK_TEXT.fullmatch(text):
        return _to_json(text)
    return "|\n" + "\n".join(f"{'':{indent}}{line}".rstrip() for line in text.splitlines())
