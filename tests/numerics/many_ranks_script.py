"""Many ranks of one process that connect to a real store: each a thread, with its own connections.

python many_ranks_script.py RANKS [MISSING ...]     MISSING do not connect; prints what rank 0 sees of each, or errors
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
from paceline.parallel.heartbeat import Heartbeats
from paceline.parallel.rendezvous import open_store, wait_for_all_ranks

TIMEOUT = timedelta(seconds=60)
SOON = timedelta(seconds=2)


class Ranks:
    """`num_ranks` ranks except those `missing`, with their heartbeats or errors."""

    def __init__(self, num_ranks: int, missing: set[int]) -> None:
        self.missing = missing
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        port = self.listener.getsockname()[1]
        self.place = World(world_size=num_ranks, local_world_size=num_ranks, master_port=port, launcher="local")
        self.connected = threading.Barrier(num_ranks - len(missing))
        self.stores: list[Store] = []  # rank 0's store ends with its last reference
        self.beats: dict[int, Heartbeats] = {}
        self.refusals: Counter[str] = Counter()

    def connect_all(self) -> None:
        """Connect all ranks, and wait for the result of each."""
        threads = [threading.Thread(target=self.connect, args=(rank,)) for rank in range(self.place.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def connect(self, rank: int) -> None:
        """Run as one rank."""
        if rank in self.missing:
            return
        fd = self.listener.detach() if rank == 0 else -1
        world = replace(self.place, rank=rank, local_rank=rank, store_fd=fd)
        store = open_store(world, TIMEOUT)
        own = store.clone()
        self.stores += [store, own]
        self.connected.wait(TIMEOUT.total_seconds())  # the time to get here is not measured
        try:
            place = wait_for_all_ranks(world, store, SOON if self.missing else TIMEOUT)
        except WorldError as error:
            self.refusals[str(error).partition(" (")[0]] += 1
            return
        self.beats[rank] = Heartbeats(world, PrefixStore("beats", PrefixStore(place, own)))


if __name__ == "__main__":
    ranks = Ranks(int(sys.argv[1]), {int(word) for word in sys.argv[2:]})
    ranks.connect_all()
    statuses = ranks.beats[0].statuses(timed_out=True) if ranks.beats else []
    seen = [[status.rank, status.condition] for status in statuses]
    for rank in sorted(ranks.beats, reverse=True):  # rank 0 hosts the store
        ranks.beats[rank].close()
    print(json.dumps({"seen": seen, "refusals": ranks.refusals}))
