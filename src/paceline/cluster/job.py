"""A job: a program of paceline's that a scheduler is to run, on how many nodes, with how many ranks a node.

It does not know which scheduler: `cluster.slurm` writes a batch script of it, `cluster.kubernetes` manifests. What a
site wants besides (a partition, a queue, an image) is in `cluster.site`.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """Say what a scheduler is to run.

    `words` come after `paceline`, such as ("train", "RUN/job/recipe-HASH.yaml", "--run-dir", "RUN", "--resume").
    `run_dir` and `folder` (where the program starts) are absolute and on a file system that all nodes see.
    """

    name: str
    words: tuple[str, ...]
    run_dir: Path
    folder: Path
    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    is_ranks: bool = True  # each rank a process of the scheduler's; else one process that starts what it needs
    tasks: tuple[int, ...] = ()  # of an array: each is given to the program as `--task N`
    said: tuple[str, ...] = ()  # lines of comment: the command as typed, the recipe's hash
    grace_s: float = 60.0  # how long the program may take to leave once it was asked to
    recipe_hash: str = ""  # of the recipe that is kept for it in its folder; empty where none is
    ladder: str = ""  # what the ladder's file is called that is kept for it there; empty where none is

    @property
    def num_ranks(self) -> int:
        """Count the ranks of the whole job."""
        return self.nodes * self.ranks_per_node

    @property
    def job_folder(self) -> Path:
        """Name the folder of what was submitted: the script or manifests, recipe and ladder as frozen, the output."""
        return self.run_dir / "job"

    @property
    def frozen(self) -> Path:
        """Name the file of the recipe that was kept, by what is in it: no other job's recipe takes its place."""
        return self.job_folder / f"recipe-{self.recipe_hash}.yaml"

    @property
    def frozen_ladder(self) -> Path:
        """Name the file of the ladder that was kept, likewise; it goes by its own name."""
        return self.job_folder / self.ladder
