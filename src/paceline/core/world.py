"""Rank, world size and batch job of this process, as `parallel.environ` reads them from the environment."""

from dataclasses import dataclass
from typing import Final, Literal

Launcher = Literal["single", "local", "torchrun", "slurm"]
NEVER: Final = float("inf")


@dataclass(frozen=True)
class World:
    """Rank and world size of this process, and how it was started."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    launcher: Launcher = "single"
    # Listening socket for the rendezvous store, which the local launcher passes to rank 0 (-1: none). If it passed a
    # port number instead, another process could take the port in between.
    store_fd: int = -1
    attempt: int = 0  # earlier starts of the ranks by the launcher
    agent_hosts_store: bool = False  # torchrun's agent, not rank 0, runs the store
    launcher_pid: int = 0  # paceline's own launcher; 0 for others
    allocated_cpus: int = 0  # by a batch system, to all ranks of this node together; 0: unknown
    allocated_gpus: int = 0
    local_tasks: int = 1  # of a batch system on this node, each with its own CPUs; 1: one process started all ranks

    @classmethod
    def single(cls) -> "World":
        """Return the world of a single process."""
        return cls()

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run directory and prints to the user."""
        return self.rank == 0

    @property
    def may_be_restarted(self) -> bool:
        """Whether a launcher may have restarted these ranks."""
        # Each torchrun agent counts only its own restarts.
        return self.attempt > 0 or self.launcher == "torchrun"

    @property
    def is_node_main(self) -> bool:
        """Whether this rank does the work that is done once per node, such as a download."""
        return self.local_rank == 0

    @property
    def num_nodes(self) -> int:
        """Number of nodes, assuming that each has as many ranks as this one."""
        return -(-self.world_size // self.local_world_size)  # rounded up


@dataclass(frozen=True)
class BatchJob:
    """The batch job that this process belongs to."""

    number: str = ""  # empty outside of a job
    restarts: int = 0  # requeues
    end_s: float = NEVER  # time limit in seconds since 1970; infinite: unknown


NO_JOB: Final = BatchJob()
