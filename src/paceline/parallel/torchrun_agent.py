"""Run torchrun with the exit code of the ranks, by which schedulers decide on a restart; torchrun's own is always 1.

Usage: `python -m paceline.parallel.torchrun_agent --nnodes 2 ... -m paceline train ...`, with torchrun's options.
`--node-rank`, which c10d ignores, selects the node that hosts the store.
"""

import sys
from collections.abc import Sequence
from typing import Any

from paceline.parallel.launch import PREEMPTED

_SIGTERM_EXIT_CODE = 128 + 15


def main(arguments: Sequence[str]) -> int:
    """Run ranks as `torchrun` with `arguments` would; return the exit code of this node."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    options = parse_args(list(arguments))  # type: ignore[no-untyped-call]
    if any(each.startswith(("--node-rank", "--node_rank")) for each in arguments):
        host_store_on_first_node(options)
    try:
        run(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        return exit_code([failure.exitcode for failure in error.failures.values()])
    except SignalException as error:
        return 128 + int(error.sigval)
    except RendezvousError as error:
        print(f"error: the other nodes were not found: {error} (have all of them started?)", file=sys.stderr)
        return 1
    return 0


def host_store_on_first_node(options: Any) -> None:
    """Let node 0 host the rendezvous store, unless the options say which node does."""
    # torchrun would compare the endpoint's host name with its own, which fails until that name resolves.
    if options.rdzv_backend == "c10d" and "is_host=" not in options.rdzv_conf:
        is_host = f"is_host={int(int(options.node_rank) == 0)}"
        options.rdzv_conf = ",".join(filter(None, [options.rdzv_conf, is_host]))


def exit_code(codes: Sequence[int]) -> int:
    """Return the exit code of a node whose ranks ended with `codes`, -n for signal n."""
    # A rank that reported its error has a code above 1. torchrun ends the others by SIGTERM, which explains nothing.
    explained = [code for code in codes if code > 1 and code != PREEMPTED]
    killed = [128 - code for code in codes if code < 0 and 128 - code != _SIGTERM_EXIT_CODE]
    for each in (*explained, *killed):
        return each
    return next((code for code in (1, PREEMPTED) if code in codes), _SIGTERM_EXIT_CODE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
