"""Which cores the ranks of a node get, on recorded topologies; and a rank that is bound."""

import json
import os
from pathlib import Path

import pytest

from paceline.core.errors import WorldError
from paceline.core.world import World
from paceline.parallel import binding
from paceline.parallel.binding import Core, bind_rank, format_cpus, is_bound, parse_cpus, plan_cores, read_cores
from paceline.recipe.schema.train import Parallel

ONE_SOCKET = [Core(0, (cpu,)) for cpu in range(8)]
# Two sockets of 32 cores, hyperthreads 64 apart: `lscpu -e` of a DGX-like node.
TWO_SOCKETS = [Core(core // 32, (core, core + 64)) for core in range(64)]
EIGHT_GPUS = [0, 0, 0, 0, 1, 1, 1, 1]


def texts(planned: list[frozenset[int]]) -> list[str]:
    return [format_cpus(each) for each in planned]


def test_one_socket_is_divided_evenly_and_a_rest_stays_free() -> None:
    assert texts(plan_cores(ONE_SOCKET, 2)) == ["0-3", "4-7"]
    assert texts(plan_cores(ONE_SOCKET, 3)) == ["0-1", "2-3", "4-5"]
    assert plan_cores(ONE_SOCKET, 9) == []


def test_hardware_threads_of_a_core_stay_together() -> None:
    assert texts(plan_cores(TWO_SOCKETS, 2)) == ["0-31,64-95", "32-63,96-127"]
    assert texts(plan_cores(TWO_SOCKETS, 4))[1] == "16-31,80-95"


def test_ranks_get_cores_of_the_node_of_their_gpu() -> None:
    assert texts(plan_cores(TWO_SOCKETS, 8, EIGHT_GPUS))[3:5] == ["24-31,88-95", "32-39,96-103"]
    # GPUs in another order, as on machines whose first GPUs are on the second node.
    crossed = plan_cores(TWO_SOCKETS, 4, [1, 1, 0, 0])
    assert texts(crossed) == ["32-47,96-111", "48-63,112-127", "0-15,64-79", "16-31,80-95"]


def test_all_ranks_get_as_many_cores() -> None:
    planned = plan_cores(TWO_SOCKETS, 4, [0, 1, 1, 1])
    assert {len(cpus) for cpus in planned} == {20} and len(frozenset().union(*planned)) == 80
    assert all(cpu % 64 < 32 for cpu in planned[0]) and all(cpu % 64 >= 32 for cpu in frozenset().union(*planned[1:]))


@pytest.mark.parametrize("nodes", [[-1, -1], [0], []], ids=["unknown", "of another number", "none"])
def test_without_known_gpus_cores_are_divided_in_order(nodes: list[int]) -> None:
    assert texts(plan_cores(ONE_SOCKET, 2, nodes)) == ["0-3", "4-7"]


def test_the_cpuset_of_a_job_is_never_left() -> None:
    """A Slurm job with 12 hardware threads, all of them on the first socket, beside GPUs on both."""
    given = parse_cpus("2-7,66-71")
    cores = [Core(node, tuple(cpu for cpu in cpus if cpu in given)) for node, cpus in TWO_SOCKETS if set(cpus) & given]
    planned = plan_cores(cores, 2, [0, 1])
    assert texts(planned) == ["2-4,66-68", "5-7,69-71"] and frozenset().union(*planned) == given


def test_cores_are_read_from_the_kernel_within_the_mask(tmp_path: Path) -> None:
    for node, cpus in enumerate(("0-1,4-5", "2-3,6-7")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    for cpu in range(8):
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    whole = read_cores(frozenset(range(8)), tmp_path)
    assert whole == [Core(0, (0, 4)), Core(0, (1, 5)), Core(1, (2, 6)), Core(1, (3, 7))]
    assert read_cores(frozenset({1, 2, 6}), tmp_path) == [Core(0, (1,)), Core(1, (2, 6))]
    assert read_cores(frozenset({1, 2}), tmp_path / "none") == [Core(0, (1,)), Core(0, (2,))]


@pytest.mark.parametrize("text", ["0", "0-3", "0-3,8", "1,3,5-7"])
def test_lists_of_cpus_are_read_and_written_as_the_kernel_does(text: str) -> None:
    assert format_cpus(parse_cpus(f"{text}\n")) == text


def test_a_rank_with_fewer_cpus_than_its_launcher_or_job_is_bound_already() -> None:
    local = World(0, 4, 0, 4, launcher="local")
    assert is_bound(local, 8, 32) and not is_bound(local, 32, 32)
    task = World(0, 4, 0, 4, launcher="slurm", allocated_cpus=32, local_tasks=4)
    assert is_bound(task, 8, 0) and not is_bound(task, 32, 0)


def test_what_cannot_be_bound_is_a_note_or_an_error(monkeypatch) -> None:
    monkeypatch.setattr(binding, "_launcher_cpus", lambda world: 0)
    many = World(0, 1000, 0, 1000)
    assert bind_rank(Parallel(), many) == binding.Binding()
    note = bind_rank(Parallel(bind="auto", device="cpu"), many).note
    assert note.startswith("parallel.bind: auto") and "for 1,000 ranks" in note
    with pytest.raises(WorldError, match=r"^parallel.bind: cores: .* \(set parallel.bind=off\)$"):
        bind_rank(Parallel(bind="cores", device="cpu"), many)
    monkeypatch.setattr(binding, "_launcher_cpus", lambda world: 10_000)
    with pytest.raises(WorldError, match="local has bound the ranks already"):
        bind_rank(Parallel(bind="cores", device="cpu"), World(0, 2, 0, 2, launcher="local"))


BOUND = """
import json, os, sys, threading
from paceline.core.host import rank_cores
from paceline.core.world import World
from paceline.parallel.binding import bind_rank
from paceline.recipe.schema.train import Parallel

asked, answered, seen = threading.Event(), threading.Event(), []
def look():
    asked.wait()
    seen.extend(os.sched_getaffinity(0))
threading.Thread(target=look).start()
world = World(int(sys.argv[1]), 2, int(sys.argv[1]), 2, launcher="local")
bind_rank(Parallel(bind="cores", device="cpu"), world)
asked.set()
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()
print(json.dumps([sorted(os.sched_getaffinity(0)), sorted(seen), rank_cores(world)]))
"""


@pytest.mark.skipif(len(read_cores(frozenset(os.sched_getaffinity(0)))) < 2, reason="two ranks need two cores")
def test_two_ranks_are_bound_to_cores_of_their_own_with_threads_that_run_already(forking, tmp_path: Path) -> None:
    (tmp_path / "bound.py").write_text(BOUND)
    found = []
    for rank in range(2):
        out, err = forking.start(["bound.py", str(rank)], tmp_path, {}).communicate(120)
        assert not err
        found.append(json.loads(out))
    (first, of_thread, cores), (second, _, _) = found
    assert first == of_thread and cores == len(first) == len(second)
    assert not set(first) & set(second) and {*first, *second} <= os.sched_getaffinity(0)
