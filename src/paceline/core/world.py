"""Who this process is among the processes of a run, and in which batch job. `parallel.environ` finds it out."""

from dataclasses import dataclass
from typing import Final, Literal

Launcher = Literal["single", "local", "torchrun", "slurm"]
NEVER: Final = float("inf")


@dataclass(frozen=True)
class World:
    """The position of this process: `rank` of `world_size`, `local_rank` of `local_world_size` on its node.

    `launcher` started the ranks; `launcher_pid` is its process if paceline started it (else 0). `store_fd` is an open
    listening socket for the rendezvous store, which the local launcher passes to rank 0 so that no port is chosen twice
    (-1: none). `attempt` counts earlier starts of the ranks by the launcher. `agent_hosts_store`: torchrun's agent, not
    rank 0, runs the store. `given_cpus` and `given_gpus` are the resources that a batch system allocated to all ranks
    of this node together (0: unknown). `local_tasks` is the number of its tasks on this node, each with its own CPUs
    (1: one process started all ranks).
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    launcher: Launcher = "single"
    store_fd: int = -1
    attempt: int = 0
    agent_hosts_store: bool = False
    launcher_pid: int = 0
    given_cpus: int = 0
    given_gpus: int = 0
    local_tasks: int = 1

    @classmethod
    def single(cls) -> "World":
        """Return the world of a single process."""
        return cls()

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run directory and prints to the user."""
        return self.rank == 0

    @property
    def may_be_again(self) -> bool:
        """Whether a launcher may have restarted these ranks; torchrun's agents count only their own starts."""
        return self.attempt > 0 or self.launcher == "torchrun"

    @property
    def is_node_main(self) -> bool:
        """Whether this rank does the work that is done once per node, such as a download."""
        return self.local_rank == 0

    @property
    def num_nodes(self) -> int:
        """Number of nodes, assuming that each has as many ranks as this one."""
        return -(-self.world_size // self.local_world_size)


@dataclass(frozen=True)
class BatchJob:
    """The job of a batch system that this process belongs to; its `number` is empty outside of one.

    `restarts` counts requeues. `end_s` is the time at which the system ends it, in seconds since 1970 (infinite:
    unknown).
    """

    number: str = ""
    restarts: int = 0
    end_s: float = NEVER


NO_JOB: Final = BatchJob()
