"""`parallel.environ`: the world from the environment variables of each launcher."""

from pathlib import Path

import pytest

from paceline.core.errors import WorldError
from paceline.core.world import NEVER, BatchJob, World
from paceline.parallel.environ import (
    batch_job,
    count_gpus,
    ends_with_parent,
    first_host,
    is_one_node,
    rank_environ,
    world_from_environ,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n01",
    "MASTER_PORT": "12345",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "jwb[0097-0098]",
    "SLURM_NTASKS": "7",
}


def test_no_launcher_is_a_world_of_one() -> None:
    assert world_from_environ({}) == World.single()


def test_torchruns_variables_are_read() -> None:
    world = world_from_environ(TORCHRUN)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (5, 8, 1, 4)
    assert (world.master_addr, world.master_port, world.launcher) == ("n01", 12345, "torchrun")
    assert world.attempt == 2 and world.agent_hosts_store and world.num_nodes == 2
    assert not world.is_main and not world.is_node_main


def test_sruns_variables_are_read_and_the_port_comes_from_the_job() -> None:
    world = world_from_environ(SRUN)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (5, 7, 1, 3)
    assert (world.master_addr, world.master_port, world.launcher) == ("jwb0097", 20_000 + 4567, "slurm")


def test_steps_and_neighbouring_jobs_have_different_ports() -> None:
    ports = {
        world_from_environ({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).master_port
        for job in range(1_234_000, 1_234_900)
        for step in range(10)
    }
    assert len(ports) == 9000 and ports <= set(range(20_000, 30_000))
    assert world_from_environ({**SRUN, "SLURM_STEP_ID": "0"}).master_port == world_from_environ(SRUN).master_port


def test_the_interactive_step_of_a_job_has_a_port() -> None:
    assert 20_000 <= world_from_environ({**SRUN, "SLURM_STEP_ID": "4294967290"}).master_port < 30_000


def test_master_addr_overrides_the_first_host() -> None:
    assert world_from_environ({**SRUN, "MASTER_ADDR": "jwb0097i"}).master_addr == "jwb0097i"
    assert world_from_environ({**SRUN, "MASTER_ADDR": ""}).master_addr == "jwb0097"


def test_each_of_1024_ranks_has_its_own_rank_and_node() -> None:
    step = {**SRUN, "SLURM_STEP_NUM_TASKS": "1024", "SLURM_STEP_TASKS_PER_NODE": "4(x256)"}
    step |= {"SLURM_STEP_NODELIST": "n[0001-0256]", "SLURM_CPUS_ON_NODE": "48", "SLURM_GPUS_ON_NODE": "4"}
    worlds = [
        world_from_environ(
            {**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 4), "SLURM_NODEID": str(rank // 4)}
        )
        for rank in range(1024)
    ]
    assert [world.rank for world in worlds] == list(range(1024))
    assert {(world.world_size, world.local_world_size, world.num_nodes) for world in worlds} == {(1024, 4, 256)}
    assert {(world.master_addr, world.master_port) for world in worlds} == {("n0001", 24_567)}
    assert sum(world.is_node_main for world in worlds) == 256
    assert {(world.allocated_cpus, world.allocated_gpus, world.local_tasks) for world in worlds} == {(48, 4, 4)}


def test_cpus_and_gpus_of_a_node_are_those_of_its_slurm_step() -> None:
    for given, expected in [
        ({"SLURM_CPUS_ON_NODE": "24"}, (24, 3)),
        ({"SLURM_CPUS_ON_NODE": "24", "SLURM_CPUS_PER_TASK": "32"}, (24, 3)),  # as sbatch was asked for
        ({"SLURM_CPUS_PER_TASK": "8"}, (24, 3)),
        ({}, (0, 1)),
    ]:
        world = world_from_environ({**SRUN, **given})
        assert (world.allocated_cpus, world.local_tasks) == expected, given


def test_cpus_and_gpus_of_a_job_apply_to_ranks_that_its_script_starts() -> None:
    batch = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_CPUS_ON_NODE": "24", "SLURM_CPUS_PER_TASK": "8"}
    assert world_from_environ(batch) == World(allocated_cpus=24)
    ours = World(1, 3, 1, 3, master_port=4242, launcher="local", launcher_pid=99)
    assert world_from_environ(rank_environ(batch, ours)).allocated_cpus == 24
    assert world_from_environ(rank_environ(batch, ours)).local_tasks == 1


def test_ranks_that_a_script_in_a_step_has_numbered_are_its_tasks() -> None:
    by_script = {"RANK": "5", "WORLD_SIZE": "7", "MASTER_ADDR": "jwb0097i"}
    world = world_from_environ({**SRUN, **by_script, "SLURM_CPUS_ON_NODE": "24"})
    assert (world.local_rank, world.local_world_size, world.local_tasks, world.launcher) == (1, 3, 3, "torchrun")
    assert world_from_environ(by_script).local_world_size == 7


def test_a_batch_job_has_a_number_restarts_and_an_end() -> None:
    assert batch_job({}) == BatchJob("", 0, NEVER)
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURM_JOB_END_TIME": "1795312800"}
    assert batch_job(job) == BatchJob("7", 2, 1_795_312_800.0)
    assert batch_job({**job, "PACELINE_END_TIME": "1795316400"}).end_s == 1_795_316_400.0
    assert batch_job({**job, "PACELINE_END_TIME": ""}).end_s == NEVER
    with pytest.raises(WorldError, match=r"^PACELINE_END_TIME: 'noon' is not a time \(set it to seconds since 1970"):
        batch_job({"PACELINE_END_TIME": "noon"})


def test_torchrun_inside_srun_is_torchrun() -> None:
    assert world_from_environ({**SRUN, **TORCHRUN}).launcher == "torchrun"


def test_a_batch_script_is_no_task_of_a_step() -> None:
    batch = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    assert world_from_environ(batch) == World.single()


def test_a_local_rank_reads_back_the_world_it_was_given() -> None:
    given = World(1, 4, 1, 4, "127.0.0.1", 4242, "local", store_fd=7, launcher_pid=99, attempt=3)
    assert world_from_environ(rank_environ({"PATH": "/bin"}, given)) == given
    assert world_from_environ(rank_environ(TORCHRUN, given)) == given


# matrix: 15
def test_ranks_of_a_launcher_end_with_their_parent_and_those_of_a_shell_do_not() -> None:
    by_hand = {"RANK": "0", "WORLD_SIZE": "2"}
    ours = rank_environ({}, World(1, 2, 1, 2, launcher="local", launcher_pid=99, master_port=4242))
    for environ, expected in [
        (ours, True),
        (SRUN, True),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, True),
        (by_hand, False),
        ({}, False),
    ]:
        assert ends_with_parent(environ, world_from_environ(environ)) is expected, environ


# matrix: 47
def test_one_node_is_assumed_only_if_known() -> None:
    by_hand = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n01"}
    for environ, expected in [
        (rank_environ({}, World(1, 2, 1, 2, launcher="local", launcher_pid=99, master_port=4242)), True),
        (by_hand, False),
        ({**by_hand, "LOCAL_WORLD_SIZE": "2"}, True),
        ({**by_hand, "MASTER_ADDR": "127.0.0.1"}, True),
        ({**by_hand, "MASTER_ADDR": "localhost"}, True),
        ({**by_hand, "MASTER_ADDR": "::1"}, True),
        (TORCHRUN, False),
        (SRUN, False),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_NODEID": "0"}, True),
    ]:
        assert is_one_node(environ, world_from_environ(environ)) is expected, environ


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("login", "login"),
        ("a,b", "a"),
        ("n[01-03,7],login", "n01"),
        ("r[1-2]n[09-10]", "r1n09"),
        ("nid[001-002].cluster", "nid001.cluster"),
    ],
)
def test_the_first_host_of_slurms_list_is_found(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "0"},
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"},
        {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "four"},
        {**SRUN, "SLURM_STEP_NODELIST": ""},
        {**SRUN, "SLURM_STEP_NODELIST": "n[1-x]"},
    ],
)
def test_contradictions_are_one_line(environ: dict[str, str]) -> None:
    with pytest.raises(WorldError) as caught:
        world_from_environ(environ)
    assert "\n" not in str(caught.value) and "(" in str(caught.value)


def test_gpus_are_counted_from_device_files_within_what_is_visible(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert count_gpus({}, tmp_path) == 3
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "1,2"}, tmp_path) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == 0
    assert count_gpus({}, tmp_path / "none") == 0
