"""Slurm section of a site: queues, nodes and environment.

Fields are named after options of sbatch (https://slurm.schedmd.com/sbatch.html). `auto` omits the option, so that the
cluster's default applies.
"""

import re
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from paceline.cluster.fields import as_text, check_variable_name
from paceline.recipe.schema.section import Auto, Off, Section, Switch, TimeDuration

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


def _check_line(text: str) -> str:
    if not text.isprintable() or not text:
        raise ValueError(f"{text!r} cannot be on a line of a script (write printable characters)")
    return text


def _check_option(text: str) -> str:
    """Return a long option with its value. Raise `ValueError` for one that the script already sets."""
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
    """How long before the time limit a running program is signalled; Slurm may signal up to a minute earlier. `auto` is
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
    def _asks_in_time(self) -> Self:
        if self.time != "auto" and self.lead != "auto" and self.lead.seconds >= self.time.seconds:
            raise ValueError(f"lead {self.lead} is not before the time limit of {self.time} (lower it)")
        return self
