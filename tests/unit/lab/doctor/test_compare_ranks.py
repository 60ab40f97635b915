"""Every difference between ranks is reported once, with its ranks."""

from dataclasses import replace

from paceline.lab.doctor.check import DoctorFinding
from paceline.lab.doctor.compare_ranks import RankFacts, compare_ranks, format_ranks, group_by_machine
from paceline.lab.doctor.network import Interface

SHM = DoctorFinding.warning("shared memory", "0.1 GiB free", "start the container with --shm-size=8g")
QUOTA = DoctorFinding.problem("disk", "read-only", "name another folder")


def ranks(hosts: int = 2, each: int = 2, **values) -> list[RankFacts]:
    """Return ranks of healthy hosts a, b, ..., one after another."""
    return [
        RankFacts(
            rank=host * each + local,
            host="abcdefghijklmnopqrst"[host],
            machine=f"machine {host}",
            local_rank=local,
            local_world_size=each,
            versions={"paceline": "1.0", "torch": "2.15.0", "python": "3.11.2"},
            cores=4,
            interface=Interface("eth0", f"10.0.0.{host + 1}", 10e9),
            towards_main="eth0",
            **values,
        )
        for host in range(hosts)
        for local in range(each)
    ]


def amiss(found: list[RankFacts]) -> list[tuple[str, str, str]]:
    """Return name, state and place of what is not as it should be."""
    return [(each.name, each.state, each.where) for each in compare_ranks(found) if each.state != "ok"]


def test_equal_ranks_have_no_problem() -> None:
    (only,) = compare_ranks(ranks())
    assert (only.name, only.state, only.found) == ("ranks", "ok", "4 ranks joined, on 2 hosts: a, b")


def test_one_rank_with_another_torch_is_named() -> None:
    found = ranks()
    found[3] = replace(found[3], versions={**found[3].versions, "torch": "2.14.1"})
    (other,) = [each for each in compare_ranks(found) if each.state != "ok"]
    assert (other.name, other.state) == ("versions of torch", "wrong")
    assert other.found == "2.15.0: ranks 0-2 (a, b); 2.14.1: rank 3 (b)"


def test_another_python_is_worth_a_look_and_a_missing_version_is_none() -> None:
    found = ranks()
    found[1] = replace(found[1], versions={**found[1].versions, "python": "3.12.1"})
    found[2] = replace(found[2], versions={"paceline": "1.0", "torch": "2.15.0"})
    assert amiss(found) == [("versions of python", "look", "")]


def test_ranks_of_one_host_that_count_themselves_otherwise_are_reported() -> None:
    found = ranks()
    found[1] = replace(found[1], local_world_size=4)
    (other,) = [each for each in compare_ranks(found) if each.state != "ok"]
    assert (other.name, other.state) == ("local ranks", "wrong")
    assert other.found == "ranks of one host disagree on their number: 2: rank 0 (a); 4: rank 1 (a)"


def test_a_host_without_a_first_rank_is_reported() -> None:
    """RANK and WORLD_SIZE alone, on two hosts: each takes its rank for its number on its host."""
    found = [replace(rank, local_rank=rank.rank, local_world_size=2) for rank in ranks(hosts=2, each=1)]
    (other,) = [each for each in compare_ranks(found) if each.state != "ok"]
    assert (other.name, other.state) == ("local ranks", "wrong") and other.found.startswith("rank 1 (b): none is local")


def test_hosts_of_other_sizes_are_well() -> None:
    found = [*ranks(hosts=1, each=2), replace(ranks(hosts=2, each=1)[1], rank=2)]
    assert not amiss(found)


def test_two_ranks_on_one_gpu_are_named() -> None:
    found = [replace(rank, device="cuda:0", gpu=f"GPU-{rank.rank // 3}") for rank in ranks(hosts=1, each=4)]
    (other,) = [each for each in compare_ranks(found) if each.state != "ok"]
    assert (other.name, other.state, other.found) == ("GPUs", "wrong", "one GPU is used by ranks 0-2 (a)")


def test_a_rank_without_a_device_is_reported_as_its_refusal() -> None:
    found = ranks()
    found[2] = replace(found[2], refusal="parallel.device: auto: 2 ranks on a node with 1 GPU (start 1)")
    (other,) = [each for each in compare_ranks(found) if each.state != "ok"]
    assert other == DoctorFinding(
        "device", "wrong", "parallel.device: auto: 2 ranks on a node with 1 GPU", "start 1", "rank 2 (b)"
    )


def test_ranks_on_other_kinds_of_devices_are_reported() -> None:
    found = [replace(rank, device="cpu" if rank.host == "a" else f"cuda:{rank.local_rank}") for rank in ranks()]
    assert amiss(found) == [("device", "wrong", "")]


def test_a_host_that_listens_where_no_other_can_call_is_reported_with_the_interface_to_name() -> None:
    found = ranks()
    found[2:] = [replace(rank, interface=Interface("lo", "127.0.1.1")) for rank in found[2:]]
    (other,) = [each for each in compare_ranks(found) if each.state != "ok"]
    assert (other.name, other.state, other.where) == ("addresses", "wrong", "ranks 2-3 (b)")
    assert "127.0.1.1" in other.found and "GLOO_SOCKET_IFNAME=eth0" in other.advice


def test_the_loopback_is_good_enough_for_one_host() -> None:
    assert not amiss([replace(rank, interface=Interface("lo", "127.0.0.1")) for rank in ranks(hosts=1)])


def test_hosts_that_give_the_same_address_are_reported() -> None:
    found = [replace(rank, interface=Interface("docker0", "172.17.0.1")) for rank in ranks()]
    assert amiss(found) == [("addresses", "wrong", "ranks 0-3 (a, b)")]


def test_what_is_amiss_on_one_host_is_reported_once_with_its_ranks() -> None:
    found = ranks(hosts=3)
    found[2:4] = [replace(rank, own=(SHM,)) for rank in found[2:4]]
    assert amiss(found) == [("shared memory", "look", "ranks 2-3 (b)")]


def test_what_is_amiss_with_rank_0_too_is_not_reported_again() -> None:
    assert not amiss(ranks(own=(SHM, DoctorFinding.ok("memory", "much"))))


def test_what_is_amiss_with_rank_0_otherwise_is_reported_of_the_others() -> None:
    found = ranks()
    found[0] = replace(found[0], own=(DoctorFinding.warning("shared memory", "none", "mount it"),))
    found[2] = replace(found[2], own=(SHM,))
    assert amiss(found) == [("shared memory", "look", "rank 2 (b)")]


def test_many_findings_of_one_name_are_reported_by_the_worst() -> None:
    found = ranks(hosts=6, each=1)
    found[1:] = [
        replace(r, own=(DoctorFinding.warning("host name", "none", f"add {r.host} to /etc/hosts"),)) for r in found[1:]
    ]
    assert amiss(found[:5]) == [("host name", "look", f"rank {n} ({host})") for n, host in enumerate("bcde", start=1)]
    found[4] = replace(found[4], own=(DoctorFinding.problem("host name", "another's", "correct it"),))
    (other,) = [each for each in compare_ranks(found) if each.state != "ok"]
    assert (other.state, other.where) == ("wrong", "ranks 1-5 (b, c, d, e, ...)")
    assert other.found == "rank 4 (e): another's; and 4 more like it" and other.advice == "correct it"


def test_a_rank_that_is_wrong_already_is_not_blamed_for_its_address() -> None:
    found = ranks()
    found[2:] = [replace(rank, interface=Interface("lo", "127.0.1.1"), own=(QUOTA,)) for rank in found[2:]]
    assert amiss(found) == [("disk", "wrong", "ranks 2-3 (b)")]


def test_ranks_with_few_cores_are_worth_a_look() -> None:
    found = ranks()
    found[3] = replace(found[3], cores=1)
    assert amiss(found) == [("cores", "look", "rank 3 (b)")]


def test_many_ranks_are_listed_in_runs_and_few_hosts_by_name() -> None:
    many = ranks(hosts=8, each=4)
    assert format_ranks(many[4:]) == "ranks 4-31 (b, c, d, e, ...)"
    assert format_ranks(many[::4]) == "ranks 0, 4, 8, 12, ... (a, b, c, d, ...)"
    assert [len(here) for here in group_by_machine(many)] == [4] * 8
