"""What a Kubernetes cluster wants to know besides the job: an image, a claim, a queue, a pod's share of a node.

Nothing here is read from a cluster. What is left empty is left out of the manifests.
"""

import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from paceline.cluster.fields import as_text, variable_name
from paceline.recipe.schema.section import Off, Section, TimeDuration

# https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and .../labels/
_DNS: Final = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
_LABEL: Final = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
# Narrower than https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
_QUANTITY: Final = r"[1-9][0-9]*(\.[0-9]{1,3})?(k|M|G|T|Ki|Mi|Gi|Ti)?"
_TAKEN: Final = ("/", "/dev", "/etc", "/opt", "/proc", "/sys", "/tmp", "/usr")  # noqa: S108


def _matches(pattern: str, what: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(f"{text!r} is not {what}")
        return text

    return check


def _variable(name: str) -> str:
    variable_name(name)
    if name.startswith("PET_"):
        raise ValueError(f"{name!r} is torchrun's, and set for each pod (leave it out)")
    return name


def _folder(path: str) -> str:
    taken = any(path == each or path.startswith(f"{each}/") for each in _TAKEN[1:]) or path == _TAKEN[0]
    if not re.fullmatch(r"/[^\s:]*", path) or ".." in path.split("/"):
        raise ValueError(f"{path!r} is not an absolute path without spaces and colons (write /claim)")
    if taken or str(PurePosixPath(path)) != path:
        raise ValueError(f"{path!r} is not a folder that is free in a container (write /claim)")
    return path


_dns_name = _matches(_DNS, "a name (write small letters, digits, - and .)")
Name = Annotated[str, BeforeValidator(as_text), AfterValidator(_dns_name)]
NameOrNone = Annotated[str, BeforeValidator(as_text), AfterValidator(lambda text: text and _dns_name(text))]
LabelKey = Annotated[
    str, AfterValidator(_matches(rf"({_DNS}/)?{_LABEL}", "a label's key (write it as example.org/name)"))
]
LabelValue = Annotated[
    str,
    BeforeValidator(as_text),
    AfterValidator(_matches(rf"({_LABEL})?", "a label's value (write up to 63 letters, digits, -, _ and .)")),
]
Quantity = Annotated[str, BeforeValidator(as_text), AfterValidator(_matches(_QUANTITY, "an amount (write 32Gi)"))]
Variable = Annotated[str, AfterValidator(_variable)]
Value = Annotated[str, BeforeValidator(as_text)]
Image = Annotated[str, AfterValidator(_matches(r"[!-~]{0,500}", "an image (write REGISTRY/NAME:TAG)"))]
Folder = Annotated[str, AfterValidator(_folder)]


class Toleration(Section):
    """A taint of nodes that pods may run on all the same."""

    key: LabelKey
    """Key of the taint, such as nvidia.com/gpu."""
    operator: Literal["Exists", "Equal"] = "Exists"
    """Whether any value of it will do."""
    value: LabelValue = ""
    """The value, with operator Equal."""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    """Which effect of it; empty for all."""

    @model_validator(mode="after")
    def _value_has_effect(self) -> Self:
        if self.value and self.operator == "Exists":
            raise ValueError(f"value {self.value!r} has no effect with operator Exists (set operator: Equal)")
        return self


class KubernetesSite(Section):
    """A Kubernetes cluster, and what of it a job is to have."""

    kind: Literal["trainjob", "job"] = "trainjob"
    """A TrainJob of Kubeflow Trainer (2.3 or later), or a plain indexed Job with a headless Service."""
    image: Image = ""
    """Image of the containers, such as registry.example.org/me/paceline:1. It has to be named."""
    pull_secrets: tuple[Name, ...] = ()
    """Secrets with which the image is fetched."""
    namespace: NameOrNone = ""
    """Namespace of all objects; empty for the one that kubectl is set to."""
    runtime: Name = "torch-distributed"
    """Runtime that a TrainJob stands on."""
    runtime_kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] = "ClusterTrainingRuntime"
    """Whether that is one of the whole cluster or of the namespace."""
    claim: NameOrNone = ""
    """PersistentVolumeClaim with the data and the runs, which all nodes can write to. It has to be named."""
    mount: Folder = "/claim"
    """Where pods see the claim. A run is written below MOUNT/runs, unless --run-dir is below MOUNT."""
    shm: Quantity = "8Gi"
    """Size of /dev/shm, through which the workers of a loader hand over batches. It is part of the memory."""
    cpus_per_rank: PositiveInt = 4
    """Processors a rank, request and limit."""
    memory: Quantity = "32Gi"
    """Memory of a pod, request and limit."""
    gpu_resource: LabelKey = "nvidia.com/gpu"
    """What the cluster calls a GPU."""
    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    """Labels that a node has to have."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that a node may have."""
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    """Labels of all objects and pods besides paceline's own."""
    queue: NameOrNone = ""
    """Queue of Kueue. The job is handed over suspended, and Kueue starts it."""
    environ: dict[Variable, Value] = Field(default_factory=dict)
    """More environment variables."""
    user: PositiveInt = 1000
    """Number of the user and the group that the program runs as; files on the claim are the group's."""
    time: TimeDuration | Off = "off"
    """How long the job may run, starting again included; then it has failed."""
    wait: TimeDuration = "10min"
    """How long a pod waits for the others, at the start and after one was lost."""
    max_restarts: NonNegativeInt = 3
    """How often the ranks are started again in pods that are still there."""
    retries: NonNegativeInt = 3
    """How often each pod may fail before the Job has. Pods that had to leave are not counted. Of a Job alone."""
