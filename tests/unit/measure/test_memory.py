"""Memory that work allocates, and what a rank may allocate."""

import torch

from paceline.measure import memory
from paceline.measure.memory import count_host_bytes, memory_budget


def test_the_peak_and_what_is_kept_are_counted_once_for_all_views() -> None:
    kept = []

    def work() -> None:
        first = torch.ones(1000)
        kept.append(first.view(10, 100).t())
        torch.zeros(3000).add_(1)

    counted = count_host_bytes(work)
    assert counted.kept == 4000
    assert counted.peak == 2 * 16_000


def test_gradients_count_as_kept() -> None:
    model = torch.nn.Linear(10, 10, bias=False)
    counted = count_host_bytes(lambda: model(torch.ones(2, 10)).sum().backward())
    assert counted.kept == model.weight.nbytes


def test_ranks_of_a_node_share_its_memory(monkeypatch) -> None:
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: 1000.0)
    cpu = torch.device("cpu")
    assert (memory_budget(cpu, 1), memory_budget(cpu, 4)) == (800, 200)
