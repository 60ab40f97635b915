"""Describe a job independently of its scheduler: command, nodes and ranks."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ClusterJob:
    """Paceline command for a scheduler to run.

    `run_dir` and the working directory `folder` are absolute, on a file system that all nodes share.
    """

    name: str
    args: tuple[str, ...]  # after `paceline`: ("train", "RUN/job/recipe-HASH.yaml", "--run-dir", "RUN", "--resume")
    run_dir: Path
    folder: Path
    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    starts_ranks: bool = True  # the scheduler starts each rank; else one process that starts its own
    tasks: tuple[int, ...] = ()  # of an array, each passed as `--task N`
    comments: tuple[str, ...] = ()  # comment lines: the command as typed, the recipe's hash
    grace_s: float = 60.0  # time to save and exit after a signal
    recipe_hash: str = ""  # of the frozen recipe in its folder; empty for none
    ladder: str = ""  # file name of the frozen ladder; empty for none

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the whole job."""
        return self.nodes * self.ranks_per_node

    @property
    def job_folder(self) -> Path:
        """Folder of the submission: script or manifests, frozen recipe and ladder, output."""
        return self.run_dir / "job"

    @property
    def frozen_recipe(self) -> Path:
        """Path of the frozen recipe, named by its hash so that no other job overwrites it."""
        return self.job_folder / f"recipe-{self.recipe_hash}.yaml"

    @property
    def frozen_ladder(self) -> Path:
        """Path of the frozen ladder."""
        return self.job_folder / self.ladder
