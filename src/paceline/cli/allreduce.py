"""`paceline allreduce`: time all-reduces between ranks."""

from pathlib import Path

from paceline.cli.options import AllReduceOptions
from paceline.cli.ranks import enter_world, ranks_to_start, start_ranks
from paceline.cli.tables import print_table
from paceline.core.errors import WorldError
from paceline.core.files import write_output
from paceline.core.units import count, number, seconds, size
from paceline.core.world import World
from paceline.lab.predict.network import GIGA, AllReduceMeasurement, AllReduceTiming
from paceline.recipe.load import DEFAULT, load
from paceline.recipe.schema.train import Parallel


def time_allreduce(options: AllReduceOptions) -> int:
    """Time all-reduces between the ranks of a job, or ranks started here; return the exit code.

    Raise `WorldError` for a single rank, or for a file that `--network` could not tell from a network's name.
    """
    out = options.out
    if out is not None and (out.suffix != ".json" or "+" in str(out)):
        raise WorldError(f"--out: {out} looks like the name of a network (name a file such as net.json, without +)")
    world = enter_world()
    num_ranks = ranks_to_start(options.ranks, world, load(DEFAULT).recipe.parallel, oversubscribe=options.oversubscribe)
    if num_ranks < 2:
        raise WorldError("--ranks: a single rank sends nothing (set --ranks 2, or more)")
    if world.launcher == "single":
        return start_ranks(num_ranks, 0, [])
    result = measure_allreduce(world)
    if world.is_main:
        if out is not None:
            write_measurement(result, out)
        show_allreduce(result, out, as_json=options.as_json)
    return 0


def measure_allreduce(world: World) -> AllReduceMeasurement:
    """Time all-reduces between the ranks of `world`; a collective call."""
    from paceline.lab.link_timing import measure_all_reduces
    from paceline.parallel.device import choose_device, set_threads
    from paceline.parallel.process_group import process_group, rendezvous

    section = Parallel()
    device = choose_device(section, world)
    set_threads(section, world)
    with rendezvous(world, section) as store, process_group(store, section, device):
        return measure_all_reduces(world, device)


def write_measurement(result: AllReduceMeasurement, path: Path) -> None:
    """Write the measurement as JSON. Raise `WorldError` if that fails."""
    try:
        write_output(path, result.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise WorldError(f"--out: {path}: cannot be written: {error.strerror} (name another file)") from None


def show_allreduce(result: AllReduceMeasurement, out: Path | None, *, as_json: bool) -> None:
    """Print the measurement."""
    if as_json:
        print(result.model_dump_json(indent=2))
        return
    where = f"{count(result.ranks, 'rank')} of {count(result.nodes, 'node')}, {result.backend}"
    headings = ("all-reduce", "median", "p10 to p90", "bus bandwidth", "n")
    print_table(f"all-reduces between {where}", headings, [_allreduce_row(each, result.ranks) for each in result.times])
    low, typical, high = (number(each / GIGA) for each in (result.low, result.bytes_per_s, result.high))
    print(f"fit of a ring: {seconds(result.alpha_s)} per hop and {typical} GB/s ({low} to {high})")
    if out is not None:
        print(f"written: {out} (to predict with it: paceline predict-scaling RUN --network {out})")


def _allreduce_row(each: AllReduceTiming, ranks: int) -> tuple[str, ...]:
    # In a ring each rank sends 2 (n - 1) / n of the bytes: bus bandwidth as in
    # https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
    bandwidth = 2 * (ranks - 1) / ranks * each.bytes / each.median_s / GIGA
    spread = f"{seconds(each.p10_s)} to {seconds(each.p90_s)}"
    return size(each.bytes), seconds(each.median_s), spread, f"{number(bandwidth)} GB/s", str(each.n)
