"""Kubernetes section of a site: image, claim, queue, and resources per pod.

Nothing is read from a cluster. Empty fields are left out of the manifests.
"""

import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from paceline.cluster.fields import as_text, check_variable_name
from paceline.recipe.schema.section import Off, Section, TimeDuration

# https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and .../labels/
_DNS_PATTERN: Final = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
_LABEL_PATTERN: Final = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
# Narrower than https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
_QUANTITY_PATTERN: Final = r"[1-9][0-9]*(\.[0-9]{1,3})?(k|M|G|T|Ki|Mi|Gi|Ti)?"
_RESERVED_FOLDERS: Final = ("/", "/dev", "/etc", "/opt", "/proc", "/sys", "/tmp", "/usr")  # noqa: S108


def _build_pattern_check(pattern: str, what: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(f"{text!r} is not {what}")
        return text

    return check


def _check_pod_variable(name: str) -> str:
    check_variable_name(name)
    if name.startswith("PET_"):
        raise ValueError(f"{name!r} is set by torchrun for each pod (leave it out)")
    return name


def _check_mount(path: str) -> str:
    taken = (
        any(path == each or path.startswith(f"{each}/") for each in _RESERVED_FOLDERS[1:])
        or path == _RESERVED_FOLDERS[0]
    )
    if not re.fullmatch(r"/[^\s:]*", path) or ".." in path.split("/"):
        raise ValueError(f"{path!r} is not an absolute path without spaces and colons (write /claim)")
    if taken or str(PurePosixPath(path)) != path:
        raise ValueError(f"{path!r} is a system folder, or not a plain path (write /claim)")
    return path


_check_dns_name = _build_pattern_check(_DNS_PATTERN, "a name (write lower-case letters, digits, - and .)")
DnsName = Annotated[str, BeforeValidator(as_text), AfterValidator(_check_dns_name)]
DnsNameOrEmpty = Annotated[str, BeforeValidator(as_text), AfterValidator(lambda text: text and _check_dns_name(text))]
LabelKey = Annotated[
    str,
    AfterValidator(
        _build_pattern_check(rf"({_DNS_PATTERN}/)?{_LABEL_PATTERN}", "a label's key (write it as example.org/name)")
    ),
]
LabelValue = Annotated[
    str,
    BeforeValidator(as_text),
    AfterValidator(
        _build_pattern_check(rf"({_LABEL_PATTERN})?", "a label's value (write up to 63 letters, digits, -, _ and .)")
    ),
]
Quantity = Annotated[
    str, BeforeValidator(as_text), AfterValidator(_build_pattern_check(_QUANTITY_PATTERN, "an amount (write 32Gi)"))
]
PodVariableName = Annotated[str, AfterValidator(_check_pod_variable)]
VariableValue = Annotated[str, BeforeValidator(as_text)]
ImageName = Annotated[str, AfterValidator(_build_pattern_check(r"[!-~]{0,500}", "an image (write REGISTRY/NAME:TAG)"))]
MountFolder = Annotated[str, AfterValidator(_check_mount)]


class Toleration(Section):
    """Toleration of a node taint."""

    key: LabelKey
    """Key of the taint, such as nvidia.com/gpu."""
    operator: Literal["Exists", "Equal"] = "Exists"
    """Exists matches any value, Equal the given one."""
    value: LabelValue = ""
    """Value of the taint, with operator Equal."""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    """Effect of the taint; empty matches all."""

    @model_validator(mode="after")
    def _value_has_effect(self) -> Self:
        if self.value and self.operator == "Exists":
            raise ValueError(f"value {self.value!r} has no effect with operator Exists (set operator: Equal)")
        return self


class KubernetesSite(Section):
    """Kubernetes cluster, and the resources of a job."""

    kind: Literal["trainjob", "job"] = "trainjob"
    """TrainJob of Kubeflow Trainer (2.3 or later), or a plain indexed Job with a headless Service."""
    image: ImageName = ""
    """Container image, such as registry.example.org/me/paceline:1. Required."""
    pull_secrets: tuple[DnsName, ...] = ()
    """Secrets for pulling the image."""
    namespace: DnsNameOrEmpty = ""
    """Namespace of all objects; empty for kubectl's current one."""
    runtime: DnsName = "torch-distributed"
    """Runtime of a TrainJob."""
    runtime_kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] = "ClusterTrainingRuntime"
    """Scope of the runtime: the cluster or the namespace."""
    claim: DnsNameOrEmpty = ""
    """PersistentVolumeClaim with data and runs, writable from all nodes. Required."""
    mount: MountFolder = "/claim"
    """Mount path of the claim. Runs are written below MOUNT/runs, unless --run-dir is below MOUNT."""
    shm: Quantity = "8Gi"
    """Size of /dev/shm, through which loader workers pass batches. It counts as memory of the pod."""
    cpus_per_rank: PositiveInt = 4
    """CPUs per rank, request and limit."""
    memory: Quantity = "32Gi"
    """Memory per pod, request and limit."""
    gpu_resource: LabelKey = "nvidia.com/gpu"
    """Resource name of GPUs."""
    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: tuple[Toleration, ...] = ()
    """Tolerated node taints."""
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    """Additional labels of all objects and pods."""
    queue: DnsNameOrEmpty = ""
    """Kueue queue. The job is created suspended, and Kueue starts it."""
    environ: dict[PodVariableName, VariableValue] = Field(default_factory=dict)
    """Additional environment variables."""
    user: PositiveInt = 1000
    """User and group ID of the program; files on the claim belong to the group."""
    time: TimeDuration | Off = "off"
    """Time limit of the job, restarts included; beyond it the job fails."""
    wait: TimeDuration = "10min"
    """Time that a pod waits for the others, at the start and after losing one."""
    max_restarts: NonNegativeInt = 3
    """How often ranks are restarted within running pods."""
    retries: NonNegativeInt = 3
    """How often each pod may fail before the Job fails; evictions do not count. Only for kind job."""
