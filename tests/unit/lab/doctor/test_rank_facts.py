"""Ranks exchange their facts, also with different versions of paceline."""

import json
import threading

from torch.distributed import HashStore

from paceline.core.world import World
from paceline.lab.doctor.check import DoctorFinding
from paceline.lab.doctor.compare_ranks import RankFacts, collect_facts, identify_machine
from paceline.lab.doctor.network import Interface
from paceline.lab.doctor.ranks import exchange_facts

OWN = (DoctorFinding.ok("memory", "much"), DoctorFinding.warning("cores", "2 of 64", "ask for more"))


def facts(rank: int) -> RankFacts:
    world = World(rank=rank, world_size=3, local_rank=rank, local_world_size=3)
    return collect_facts(world, OWN, {"torch": "2.15", "cpu": "fast", "nccl": ""}, {}, device="cpu")


def test_a_rank_reports_what_it_is_and_reads_as_it_was_written() -> None:
    said = facts(2)
    assert (said.rank, said.local_world_size, said.versions) == (2, 3, {"torch": "2.15"})
    assert said.own == OWN and said.host and said.label == f"rank 2 ({said.host})"
    assert RankFacts.from_json(said.to_json()) == said


def test_ranks_of_one_checkout_at_different_commits_have_different_versions() -> None:
    """An editable install keeps its version; the digest of the files tells them apart."""
    versions = {"paceline": "0.1.1.dev5+g1a2b3c4", "paceline_sha256": "1a2b"}
    world = World(rank=0, world_size=1, local_rank=0, local_world_size=1)
    assert collect_facts(world, (), versions, {}, device="cpu").versions == {"paceline": "0.1.1.dev5+g1a2b3c4 1a2b"}


def test_another_paceline_may_send_more_or_less() -> None:
    values = json.loads(facts(1).to_json())
    values["colour"] = "blue"
    values["own"][0]["mood"] = "good"
    del values["cores"], values["interface"]
    read = RankFacts.from_json(json.dumps(values))
    assert (read.rank, read.cores, read.interface, read.own) == (1, 1, Interface(""), OWN)


def test_rank_0_hears_of_all_and_the_others_know_themselves() -> None:
    store, found = HashStore(), {}
    threads = [
        threading.Thread(target=lambda rank=rank: found.update({rank: exchange_facts(store, facts(rank), 3, 20.0)}))
        for rank in (2, 1, 0)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert [each.rank for each in found[0]] == [0, 1, 2]
    assert [[each.rank for each in found[rank]] for rank in (1, 2)] == [[1], [2]]


def test_ranks_of_one_host_have_the_same_machine_and_without_a_kernel_of_linux_its_name(tmp_path) -> None:
    assert identify_machine() == facts(0).machine
    assert identify_machine(tmp_path) == facts(0).host
