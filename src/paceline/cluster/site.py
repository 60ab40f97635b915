"""Site configuration: settings of a Slurm or Kubernetes cluster, from a file and from KEY=VALUE arguments."""

import re
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Annotated, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from paceline.core.errors import RecipeError, suggest_similar
from paceline.recipe.errors import explain
from paceline.recipe.load import Layer, Patch, merge_layers, read_chain
from paceline.recipe.schema.base import Auto, Off, Section, Switch, TimeDuration

_MANAGED_OPTIONS: Final = {
    "array": "--array",
    "chdir": "the folder that you submit from",
    "cpus-per-task": "slurm.cpus_per_rank",
    "job-name": "the recipe's name",
    "nodes": "--nodes",
    "ntasks": "--ranks-per-node",
    "ntasks-per-node": "--ranks-per-node",
    "output": "slurm.output",
    "requeue": "slurm.requeue",
    "signal": "slurm.lead",
    "time": "slurm.time",
}
"""Options that every script sets, and the setting that controls each."""
# https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and .../labels/
_DNS_PATTERN: Final = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
_LABEL_PATTERN: Final = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
# Narrower than https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
_QUANTITY_PATTERN: Final = r"[1-9][0-9]*(\.[0-9]{1,3})?(k|M|G|T|Ki|Mi|Gi|Ti)?"
_RESERVED_FOLDERS: Final = ("/", "/dev", "/etc", "/opt", "/proc", "/sys", "/tmp", "/usr")  # noqa: S108
SITES: Final = Path(str(resources.files("paceline.cluster") / "sites"))
_SUFFIXES: Final = (".yaml", ".yml")


def as_text(value: object) -> object:
    """Convert a number or bool to text, such as an account or label that YAML parsed as a number."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def check_variable_name(name: str) -> str:
    """Return the name of an environment variable. Raise `ValueError` if it is invalid."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{name!r} is not a variable's name (write letters, digits and _)")
    return name


def _check_line(text: str) -> str:
    if not text.isprintable() or not text:
        raise ValueError(f"{text!r} cannot be on a line of a script (write printable characters)")
    return text


def _check_option(text: str) -> str:
    match = re.fullmatch(r"--([a-z][a-z0-9-]*)(=.*)?", _check_line(text))
    if match is None:
        raise ValueError(f"{text!r} is not an option in its long form (write --name=value)")
    if match[1] in _MANAGED_OPTIONS:
        raise ValueError(f"{text!r} is set by {_MANAGED_OPTIONS[match[1]]} (leave it out)")
    return text


SlurmText = Annotated[str, BeforeValidator(as_text), AfterValidator(_check_line)]
SlurmOption = Annotated[str, AfterValidator(_check_option)]
VariableName = Annotated[str, AfterValidator(check_variable_name)]


class Container(Section):
    """Container of the program; its image must provide `python -m paceline`."""

    runtime: Literal["none", "pyxis", "apptainer", "shifter"] = "none"
    """Container runtime: Slurm's plugin pyxis (https://github.com/NVIDIA/pyxis/wiki/Usage), `apptainer exec`
    (https://apptainer.org/docs/user/latest/) or shifter (https://docs.nersc.gov/development/containers/shifter/).
    """
    image: SlurmText = "none"
    """Image, as the runtime names it."""
    mounts: tuple[SlurmText, ...] = ()
    """Additional bind mounts as HERE:THERE; the run directory and the working directory are mounted anyway."""

    @model_validator(mode="after")
    def _has_an_image(self) -> Self:
        if self.runtime == "none" and (self.image != "none" or self.mounts):
            raise ValueError("image and mounts have no effect with runtime none (set runtime: apptainer)")
        if self.runtime != "none" and self.image == "none":
            raise ValueError(f"{self.runtime} needs an image (set image: ...)")
        return self

    @model_validator(mode="after")
    def _mounts_are_pairs(self) -> Self:
        wrong = next((mount for mount in self.mounts if not re.fullmatch(r"/[^:,]*:/[^:,]*(:[^,]*)?", mount)), None)
        if wrong is not None:
            raise ValueError(f"mounts: {wrong!r} is not HERE:THERE (write two absolute paths)")
        return self


class SlurmSite(Section):
    """Slurm cluster, as a job sees it."""

    partition: SlurmText = "auto"
    """Partition (queue)."""
    account: SlurmText = "auto"
    """Account to charge."""
    qos: SlurmText = "auto"
    """Quality of service."""
    reservation: SlurmText = "auto"
    """Reservation, such as for a course."""
    constraint: SlurmText = "auto"
    """Node features to require."""
    time: TimeDuration | Auto = "auto"
    """Time limit of a job."""
    cpus_per_rank: PositiveInt | Auto = "auto"
    """CPUs per rank, loader workers included; often 1 by the cluster's default."""
    cpus_per_node: PositiveInt | Auto = "auto"
    """CPUs of a node that is allocated as a whole, shared evenly by its ranks; `cpus_per_rank` takes precedence."""
    memory: SlurmText = "auto"
    """Memory per node, such as 64G; 0 for all of it."""
    gpu_option: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """Option that requests GPUs."""
    gpu_type: SlurmText = "auto"
    """GPU type, as the cluster names it."""
    exclusive: Switch = "off"
    """Do not share nodes with other jobs."""
    lead: TimeDuration | Auto = "auto"
    """How long before the time limit a running program is signaled; Slurm may signal up to a minute earlier. `auto` is
    `checkpoint.grace`, at most half of the time limit.
    """
    requeue: Switch = "on"
    """Requeue a job that was preempted, lost a node, or stopped at its time limit; it then resumes."""
    restarts: NonNegativeInt = 100
    """Limit of requeues after early stops: a job whose time limit is too short makes no progress."""
    output: SlurmText = "auto"
    """Output file, as a Slurm file name pattern; `auto` is in the run directory, in `job`."""
    options: tuple[SlurmOption, ...] = ()
    """Additional options of sbatch, such as --mail-type=END."""
    srun: tuple[SlurmOption, ...] = ()
    """Additional options of srun, such as --cpu-bind=none."""
    modules: tuple[SlurmText, ...] = ()
    """Environment modules to load."""
    setup: str = ""
    """Lines of bash to insert verbatim after the modules."""
    venv: SlurmText = "off"
    """Virtual environment to activate; its Python runs paceline."""
    python: SlurmText = "auto"
    """Python that runs paceline; `auto` is that of `venv` or the container, else the submitting one."""
    container: Container = Container()
    """Container of the program."""
    environ: dict[VariableName, SlurmText] = Field(default_factory=dict)
    """Environment variables, set verbatim."""
    stage: Off | SlurmText = "off"
    """Folder in memory or on a local disk of each node to copy data to: `data.stage` of recipes that do not set it."""

    @model_validator(mode="after")
    def _lead_is_within_time(self) -> Self:
        if self.time != "auto" and self.lead != "auto" and self.lead.seconds >= self.time.seconds:
            raise ValueError(f"lead {self.lead} is not before the time limit of {self.time} (lower it)")
        return self


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
    """Total number of pods that may fail before the Job fails; evictions do not count. Only for kind job."""


class Site(Section):
    """Cluster, with one section per scheduler."""

    slurm: SlurmSite = SlurmSite()
    """Settings for Slurm."""
    kubernetes: KubernetesSite = KubernetesSite()
    """Settings for Kubernetes."""


def site_names() -> list[str]:
    """Return the names of the shipped sites, sorted."""
    return sorted(path.stem for path in SITES.glob("*.yaml"))


def load_site(
    name: str | None, overrides: Sequence[str], default_file: Path | None = None, origin: str = "--site"
) -> Site:
    """Return the site `name`, else that of `default_file`, with overrides such as `slurm.time=2h`.

    `origin` names the origin of `name` in errors. Raise `RecipeError` as `file:line: field: problem`.
    """
    path = default_file if name is None else _find_site_file(name, Path(), f"{origin}:")
    layers = [] if path is None else read_chain(path, _find_site_file, _layer_origin)
    stack = merge_layers([*layers, Layer(Patch.parse(list(overrides)).values(), "command line")])
    try:
        return Site.model_validate(stack.values)
    except ValidationError as error:
        path_in_site, message = explain(error, stack.values, Site)
        below = (place for field, place in stack.origins.items() if field.startswith(f"{path_in_site}."))
        place = next(below, stack.origin(path_in_site))  # an error of a whole section points to its first field
        prefix = "" if place in ("default", "command line") else f"{place}: "
        raise RecipeError(f"{prefix}{path_in_site or 'site'}: {message}") from None


def _find_site_file(name: object, folder: Path, where: str) -> Path:
    """Return the file of a shipped site, or a path relative to `folder`."""
    if isinstance(name, str) and name in site_names():
        return SITES / f"{name}.yaml"
    if not isinstance(name, str) or not name.endswith(_SUFFIXES):
        hint = suggest_similar(str(name), site_names()) or f" (write {', '.join(site_names())} or a .yaml file)"
        raise RecipeError(f"{where} {name!r} is not a site{hint}")
    path = folder / Path(name).expanduser()
    if not path.is_file():
        raise RecipeError(f"{where} {name!r}: there is no such file (write {', '.join(site_names())} or a .yaml file)")
    return path


def _layer_origin(path: Path) -> str:
    return path.stem if path.is_relative_to(SITES) else str(path)
