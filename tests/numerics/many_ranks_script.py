"""Many ranks of one process that meet at a real store: each a thread, with connections of its own.

python meeting.py RANKS [GONE ...]     GONE do not come; prints what rank 0 sees of each, or what the ranks refuse
"""

import json
import socket
import sys
import threading
from collections import Counter
from dataclasses import replace
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from paceline.core.errors import WorldError
from paceline.core.world import World
from paceline.parallel.heartbeat import StoreHeartbeats
from paceline.parallel.rendezvous import open_store, wait_for_all_ranks

TIMEOUT = timedelta(seconds=60)
SOON = timedelta(seconds=2)


class Ranks:
    """So many ranks but those that are `gone`, and what came of each."""

    def __init__(self, num_ranks: int, gone: set[int]) -> None:
        self.gone = gone
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        port = self.listener.getsockname()[1]
        self.place = World(world_size=num_ranks, local_world_size=num_ranks, master_port=port, launcher="local")
        self.are_there = threading.Barrier(num_ranks - len(gone))
        self.stores: list[Store] = []  # rank 0's ends with the last who holds it
        self.beats: dict[int, StoreHeartbeats] = {}
        self.refusals: Counter[str] = Counter()

    def meet(self) -> None:
        """Let all come, and go on or be refused."""
        threads = [threading.Thread(target=self.come, args=(rank,)) for rank in range(self.place.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def come(self, rank: int) -> None:
        """Be one rank."""
        if rank in self.gone:
            return
        fd = self.listener.detach() if rank == 0 else -1
        world = replace(self.place, rank=rank, local_rank=rank, store_fd=fd)
        store = open_store(world, TIMEOUT)
        own = store.clone()
        self.stores += [store, own]
        self.are_there.wait(TIMEOUT.total_seconds())  # how long it takes to get there is not what is asked
        try:
            place = wait_for_all_ranks(world, store, SOON if self.gone else TIMEOUT)
        except WorldError as error:
            self.refusals[str(error).partition(" (")[0]] += 1
            return
        self.beats[rank] = StoreHeartbeats(world, PrefixStore("beats", PrefixStore(place, own)))


if __name__ == "__main__":
    ranks = Ranks(int(sys.argv[1]), {int(word) for word in sys.argv[2:]})
    ranks.meet()
    statuses = ranks.beats[0].statuses(timed_out=True) if ranks.beats else []
    seen = [[status.rank, status.condition] for status in statuses]
    for rank in sorted(ranks.beats, reverse=True):  # rank 0 hosts the store
        ranks.beats[rank].close()
    print(json.dumps({"seen": seen, "refusals": ranks.refusals}))
