"""The cost of an all-reduce: by hand, monotonic, and from measurements."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import RecipeError
from paceline.lab.predict.network import (
    INTER_NODE_LINKS,
    INTRA_NODE_LINKS,
    AllReduceMeasurement,
    AllReduceTiming,
    Link,
    all_reduce_time_s,
    build_measured_network,
    build_network,
    fastest_time_s,
    fit_link,
    hierarchical_time_s,
    ring_time_s,
    tree_time_s,
)

SLOW = Link("slow", 1e-3, 1e6, 1e6, 1e6, "made up")
MB = 1_000_000


def times(ranks: int, alpha_s: float, bytes_per_s: float) -> list[AllReduceTiming]:
    """Return what a ring takes."""
    found = []
    for size in (64_000, 512_000, 4_000_000):
        took_s = 2 * (ranks - 1) * alpha_s + 2 * (ranks - 1) / ranks * size / bytes_per_s
        found.append(AllReduceTiming(bytes=size, median_s=took_s, p10_s=took_s, p90_s=took_s, n=5))
    return found


def test_a_ring_of_two_sends_as_many_bytes_as_there_are():
    assert ring_time_s(MB, 2, SLOW) == pytest.approx(2e-3 + 1.0)


def test_a_ring_of_four_sends_half_as_many_bytes_again_in_six_hops():
    assert ring_time_s(MB, 4, SLOW) == pytest.approx(6e-3 + 1.5)


def test_a_tree_has_hops_as_the_logarithm():
    assert tree_time_s(0, 1024, SLOW) == pytest.approx(20e-3)


def test_small_messages_go_over_trees_and_large_ones_over_rings():
    assert fastest_time_s(10, 64, SLOW) == tree_time_s(10, 64, SLOW) < ring_time_s(10, 64, SLOW)
    assert fastest_time_s(100 * MB, 64, SLOW) == ring_time_s(100 * MB, 64, SLOW) < tree_time_s(100 * MB, 64, SLOW)


def test_one_rank_sends_nothing():
    assert all_reduce_time_s(MB, 1, 8, build_network("ndr", ranks_per_node=8)) == 0


def test_nodes_of_one_rank_are_a_ring_or_a_tree_between_nodes():
    assert hierarchical_time_s(MB, 1, 4, INTRA_NODE_LINKS["nvlink4"], SLOW) == fastest_time_s(MB, 4, SLOW)


def test_between_nodes_a_sum_takes_at_least_what_it_takes_within_one():
    network = build_network("25gbe", ranks_per_node=8)
    within, between = (all_reduce_time_s(MB, ranks, 8, network) for ranks in (8, 16))
    assert between > within > 0


def test_a_ring_is_found_again_from_what_it_takes():
    found = fit_link("gloo", 3, 3, times(3, 2e-3, 5e6))
    assert (found.alpha_s, found.bytes_per_s) == (pytest.approx(2e-3), pytest.approx(5e6))
    assert found.low == pytest.approx(5e6)  # there is nothing that the ring does not explain


def test_a_latency_below_none_is_none():
    less = [AllReduceTiming(bytes=size, median_s=s, p10_s=s, p90_s=s, n=5) for size, s in ((1000, 1e-3), (2000, 4e-3))]
    assert fit_link("gloo", 2, 1, less).alpha_s == 0


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (8, 1), (2, 2), (16, 2), (64, 8)])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_what_was_measured_is_predicted_as_it_was(backend, ranks, nodes):
    measured = times(ranks, 1e-3, 1e6)
    network = build_measured_network(fit_link(backend, ranks, nodes, measured))
    for each in measured:
        assert all_reduce_time_s(each.bytes, ranks, ranks // nodes, network) == pytest.approx(each.median_s)
    assert network.spans_nodes == (nodes > 1)


def test_a_measured_network_is_a_ring_over_more_ranks_too():
    network = build_measured_network(fit_link("nccl", 2, 2, times(2, 1e-3, 1e6)))
    assert all_reduce_time_s(MB, 4, 1, network) == pytest.approx(ring_time_s(MB, 4, SLOW))


def test_two_sizes_leave_nothing_over_but_what_they_scatter_by_is_reported():
    exact = times(2, 1e-3, 1e6)[:2]
    wide = [each.model_copy(update={"p10_s": 0.9 * each.median_s, "p90_s": 1.1 * each.median_s}) for each in exact]
    none, some, three = (fit_link("gloo", 2, 1, each) for each in (exact, wide, [*wide, wide[0]]))
    assert none.low == pytest.approx(none.high)
    # 20 % between its tenths is a standard deviation of 7.8 % of each time, which is mostly bytes: 1.96 of them.
    assert some.high / some.bytes_per_s - 1 == pytest.approx(1.96 * 0.078, rel=0.2)
    assert some.low < some.bytes_per_s < some.high
    assert three.high < some.high  # more sizes narrow the interval


def test_few_sizes_that_no_line_explains_are_doubted_more_than_many():
    """Student's quantile of one degree of freedom is 12.7, not 1.96."""
    bent = [each.model_copy(update={"median_s": each.median_s * (1.05 if at == 1 else 1.0)})
            for at, each in enumerate(times(2, 1e-3, 1e6))]  # fmt: skip
    found = fit_link("gloo", 2, 1, bent)
    assert found.high > 1.2 * found.bytes_per_s


def test_a_bandwidth_that_is_given_links_nodes_of_a_network_that_is_within_one():
    network = build_network("nvlink3", ranks_per_node=8, gigabytes_per_s=3)
    assert network.spans_nodes
    assert network.intra_node == INTRA_NODE_LINKS["nvlink3"]
    assert network.inter_node.bytes_per_s == 3e9
    assert network.inter_node.alpha_s == build_network(None, ranks_per_node=8, gigabytes_per_s=3).inter_node.alpha_s
    with pytest.raises(RecipeError, match=r"^--alpha-us: 5 has no effect on .* within a node \(add --gigabytes-per-s"):
        build_network("nvlink3", ranks_per_node=8, alpha_us=5)


def test_a_measured_network_is_read_from_its_file(tmp_path: Path):
    file = tmp_path / "wire.json"
    found = fit_link("gloo", 2, 2, times(2, 1e-3, 1e6))
    file.write_text(found.model_dump_json())
    assert AllReduceMeasurement.model_validate_json(file.read_text()) == found
    assert build_network(str(file), ranks_per_node=1) == replace(build_measured_network(found), name=str(file))
    assert build_network(f"{file}+ndr", ranks_per_node=1).intra_node == build_measured_network(found).intra_node


def test_a_node_has_an_adapter_a_gpu_of_infiniband_and_one_of_ethernet():
    assert build_network("ndr", ranks_per_node=4).inter_node.bytes_per_s == 4 * INTER_NODE_LINKS["ndr"].bytes_per_s
    assert build_network("1xndr", ranks_per_node=4).inter_node.bytes_per_s == INTER_NODE_LINKS["ndr"].bytes_per_s
    assert build_network("25gbe", ranks_per_node=4).inter_node == INTER_NODE_LINKS["25gbe"]
    assert (
        build_network("2x25gbe", ranks_per_node=4).inter_node.bytes_per_s == 2 * INTER_NODE_LINKS["25gbe"].bytes_per_s
    )


def test_what_is_within_nodes_can_be_named_too():
    assert build_network("nvlink2+ndr", ranks_per_node=4).intra_node == INTRA_NODE_LINKS["nvlink2"]
    assert build_network("hdr", ranks_per_node=4).intra_node == INTRA_NODE_LINKS["nvlink3"]
    assert build_network("nvlink4", ranks_per_node=8).intra_node == INTRA_NODE_LINKS["nvlink4"]


def test_users_give_latency_and_bandwidth_of_their_own():
    network = build_network(None, ranks_per_node=8, alpha_us=5, gigabytes_per_s=20)
    assert (network.inter_node.alpha_s, network.inter_node.bytes_per_s) == (pytest.approx(5e-6), pytest.approx(20e9))
    assert build_network("ndr", ranks_per_node=8, alpha_us=0).inter_node.alpha_s == 0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ndrr", "did you mean 'ndr'?"),
        ("0xndr", "is unknown"),
        ("nvlnk4+ndr", "did you mean 'nvlink4'?"),
        (None, "is not set"),
        ("missing.json", "cannot be read"),
    ],
)
def test_a_network_that_no_one_knows_is_an_error_in_one_line(name, says):
    with pytest.raises(RecipeError, match="--network") as raised:
        build_network(name, ranks_per_node=8)
    assert says in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_that_is_no_collective_is_an_error_in_one_line(tmp_path: Path):
    (file := tmp_path / "other.json").write_text("{}")
    with pytest.raises(RecipeError, match="is not a measured collective") as raised:
        build_network(str(file), ranks_per_node=8)
    assert "\n" not in str(raised.value)


def test_every_network_states_where_its_numbers_are_from():
    links = [*INTRA_NODE_LINKS.values(), *INTER_NODE_LINKS.values()]
    assert len(links) > 8
    assert all(link.source and 0 < link.low <= link.bytes_per_s <= link.high for link in links)
