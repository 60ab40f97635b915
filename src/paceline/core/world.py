"""Who this process is among the processes of a run, and in which batch job. `parallel.environ` finds it out."""

from dataclasses import dataclass
from typing import Final, Literal

Launcher = Literal["single", "local", "torchrun", "slurm"]
NEVER: Final = float("inf")


@dataclass(frozen=True)
class World:
    """This process's place: `rank` of `world_size`, `local_rank` of `local_world_size` on its node.

    `launcher` says who started the ranks, `launcher_pid` is its process where that is ours (0 elsewhere). `store_fd`
    is an open listening socket for the rendezvous store, handed to rank 0 by the local launcher so that no port is
    ever chosen twice (-1 when there is none). `attempt` counts how often the launcher has started the ranks before, and
    `agent_hosts_store` says that torchrun's agent, not rank 0, runs the store. `given_cpus` and `given_gpus` are what a
    batch system has given to all ranks of this node together (0: it does not say), and `local_tasks` how many of its
    tasks they are, each with CPUs of its own (1: one process has started them all).
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
        """Return the world of one process."""
        return cls()

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run directory and speaks to the user."""
        return self.rank == 0

    @property
    def may_be_again(self) -> bool:
        """Whether a launcher may have started these ranks before; torchrun's agents count their own starts alone."""
        return self.attempt > 0 or self.launcher == "torchrun"

    @property
    def is_node_main(self) -> bool:
        """Whether this rank does what is done once a node, such as a download."""
        return self.local_rank == 0

    @property
    def num_nodes(self) -> int:
        """How many nodes the ranks are on, when every node has as many ranks as this one."""
        return -(-self.world_size // self.local_world_size)


@dataclass(frozen=True)
class BatchJob:
    """The job of a batch system that this process is in: its `number`, empty outside of one.

    `restarts` is how often it was queued again and started anew, `end_s` when the system will end it, in seconds since
    1970 (infinite where that is not known).
    """

    number: str = ""
    restarts: int = 0
    end_s: float = NEVER


NO_JOB: Final = BatchJob()
