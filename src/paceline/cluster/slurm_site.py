"""What a site's Slurm wants of a job: its queues, its nodes, its environment. `cluster.slurm` writes it down.

Fields are called as the options of sbatch are where there is one (https://slurm.schedmd.com/sbatch.html). `auto` leaves
an option out, so that the cluster's own default holds.
"""

import re
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from paceline.cluster.fields import as_text, variable_name
from paceline.recipe.schema.section import Auto, Off, Section, Switch, TimeDuration

_OURS: Final = {
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
"""Options that a script has anyway, and what says them."""


def _one_line(text: str) -> str:
    if not text.isprintable() or not text:
        raise ValueError(f"{text!r} cannot stand on a line of a script (write what can be printed)")
    return text


def _option(text: str) -> str:
    """Return an option of Slurm's with its value."""
    match = re.fullmatch(r"--([a-z][a-z0-9-]*)(=.*)?", _one_line(text))
    if match is None:
        raise ValueError(f"{text!r} is not an option in its long form (write --name=value)")
    if match[1] in _OURS:
        raise ValueError(f"{text!r} is said by {_OURS[match[1]]} (take it out)")
    return text


Word = Annotated[str, BeforeValidator(as_text), AfterValidator(_one_line)]
Option = Annotated[str, AfterValidator(_option)]
Variable = Annotated[str, AfterValidator(variable_name)]


class Container(Section):
    """The container that the program runs in, if any; the image has paceline in it, as `python -m paceline`."""

    runtime: Literal["none", "pyxis", "apptainer", "shifter"] = "none"
    """What starts it: Slurm's plugin pyxis (https://github.com/NVIDIA/pyxis/wiki/Usage), `apptainer exec`
    (https://apptainer.org/docs/user/latest/) or shifter (https://docs.nersc.gov/development/containers/shifter/)."""
    image: Word = "none"
    """Image, as the runtime names it."""
    mounts: tuple[Word, ...] = ()
    """Folders beside the run's and the one it starts in, as HERE:THERE."""

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
    """A Slurm cluster, as a job sees it."""

    partition: Word = "auto"
    """Queue."""
    account: Word = "auto"
    """Budget that is charged."""
    qos: Word = "auto"
    """Quality of service."""
    reservation: Word = "auto"
    """Nodes that were reserved, such as for a course."""
    constraint: Word = "auto"
    """Features that the nodes must have."""
    time: TimeDuration | Auto = "auto"
    """Longest that a job runs before Slurm ends it."""
    cpus_per_rank: PositiveInt | Auto = "auto"
    """CPUs of each rank, which its loader works on too; often 1 where the cluster decides."""
    cpus_per_node: PositiveInt | Auto = "auto"
    """CPUs of a node that is given whole, which its ranks share evenly; `cpus_per_rank` comes before it."""
    memory: Word = "auto"
    """Memory of a node, such as 64G; 0 is all of it."""
    gpu_option: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """Option by which GPUs are asked for."""
    gpu_type: Word = "auto"
    """Kind of GPU, as the cluster calls it."""
    exclusive: Switch = "off"
    """Share nodes with no other job."""
    lead: TimeDuration | Auto = "auto"
    """How long before the time limit what has not left by itself is asked to; Slurm may ask a minute earlier yet.
    `auto` is as long as `checkpoint.grace`, but half of the time limit at most."""
    requeue: Switch = "on"
    """Queue the job again when it was preempted, has lost a node, or has left at its time limit; it then goes on."""
    restarts: NonNegativeInt = 100
    """How often a job that has left early queues itself again at most: one whose time is too short gets nowhere."""
    output: Word = "auto"
    """File of what the job says, by Slurm's pattern for file names; `auto` is in the run directory, in `job`."""
    options: tuple[Option, ...] = ()
    """More options of sbatch, such as --mail-type=END."""
    srun: tuple[Option, ...] = ()
    """More options of srun, such as --cpu-bind=none."""
    modules: tuple[Word, ...] = ()
    """Modules that are loaded."""
    setup: str = ""
    """Lines of bash, put into the script as they are, after the modules."""
    venv: Word = "off"
    """Virtual environment that is activated, and whose Python runs paceline."""
    python: Word = "auto"
    """Python that runs paceline; `auto` is that of `venv` or of a container, else the one that submits."""
    container: Container = Container()
    """The container that the program runs in."""
    environ: dict[Variable, Word] = Field(default_factory=dict)
    """Variables that are set, to these very values."""
    stage: Off | Word = "off"
    """Folder in memory or on a disk of each node that data is copied to: `data.stage` of recipes that do not say it."""

    @model_validator(mode="after")
    def _asks_in_time(self) -> Self:
        if self.time != "auto" and self.lead != "auto" and self.lead.seconds >= self.time.seconds:
            raise ValueError(f"lead {self.lead} is not before the time limit of {self.time} (lower it)")
        return self
