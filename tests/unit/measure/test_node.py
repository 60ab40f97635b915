"""Load of a node from its counters: of the cores and devices of the run; unknown values are left out."""

from collections import namedtuple
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from paceline.core.host import CgroupLimits, find_limits
from paceline.measure.telemetry import NodeSampler
from paceline.measure.timer import now_s

Times = namedtuple("Times", "user nice system idle iowait guest guest_nice")
Disk = namedtuple("Disk", "read_bytes write_bytes")
Card = namedtuple("Card", "bytes_sent bytes_recv")


def core(busy_s: float = 0.0, idle_s: float = 0.0, iowait_s: float = 0.0, guest_s: float = 0.0) -> Times:
    """Return the times of a core; the kernel counts those of guests in `user` too."""
    return Times(busy_s, 0.0, 0.0, idle_s, iowait_s, guest_s, 0.0)


@dataclass
class Kernel:
    """Module psutil on a node with four cores, a disk and a network card, of which a test sets the counters."""

    cores: list[Times] = field(default_factory=lambda: [core() for _ in range(4)])
    disks: dict[str, Disk] = field(default_factory=lambda: {"sda": Disk(0, 0)})
    cards: dict[str, Card] = field(default_factory=lambda: {"lo": Card(0, 0), "eth0": Card(0, 0)})
    ranks: dict[int, tuple[int, list[int]]] = field(default_factory=lambda: {7: (1000, [0, 1]), 8: (500, [1, 2])})
    now_s: float = 100.0

    def Process(self, pid: int) -> SimpleNamespace:  # noqa: N802 - psutil's name for it
        resident, cores = self.ranks[pid]
        return SimpleNamespace(
            memory_info=lambda: SimpleNamespace(rss=self.ranks[pid][0]) if resident else None,
            cpu_affinity=lambda: cores,
        )

    def cpu_times(self, *, percpu: bool) -> list[Times]:
        assert percpu
        return self.cores

    def cpu_count(self) -> int:
        return len(self.cores)

    def virtual_memory(self) -> SimpleNamespace:
        return SimpleNamespace(total=10_000, available=4_000)

    def disk_io_counters(self, *, perdisk: bool, nowrap: bool) -> dict[str, Disk]:
        assert perdisk and not nowrap
        return self.disks

    def net_io_counters(self, *, pernic: bool, nowrap: bool) -> dict[str, Card]:
        assert pernic and not nowrap
        return self.cards

    def node(self, sys: Path, ranks: tuple[int, ...] = (7, 8), limits: CgroupLimits | None = None) -> NodeSampler:
        return NodeSampler(self, ranks, limits or CgroupLimits(), lambda: self.now_s, sys)


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def test_the_cpu_is_the_cores_that_the_ranks_may_use(kernel, tmp_path) -> None:
    """Cores 0 to 2: 1 s, 0.5 s and 0 s of 1 s each. The fourth is busy for others."""
    node = kernel.node(tmp_path)
    kernel.cores = [core(1.0, 0.0), core(0.5, 0.5), core(0.0, 0.25, 0.75), core(1.0, 0.0)]
    assert node.sample()["cpu"] == 0.5


def test_the_time_of_guests_counts_once(kernel, tmp_path) -> None:
    node = kernel.node(tmp_path, ranks=(7,))
    kernel.cores = [core(1.0, 1.0, guest_s=1.0)] * 4
    assert node.sample()["cpu"] == 0.5


def test_unnumbered_cores_all_count(kernel, tmp_path) -> None:
    """Core 1 is switched off, and the list of those that are on does not say so."""
    kernel.ranks[7] = (1000, [0, 4])
    node = kernel.node(tmp_path, ranks=(7,))
    kernel.cores = [core(1.0, 0.0), core(0.0, 1.0), core(0.0, 1.0), core(0.0, 1.0)]
    assert node.sample()["cpu"] == 0.25


def test_where_a_quota_is_tighter_than_the_cores_the_cpu_is_the_share_of_that(kernel, tmp_path) -> None:
    stat = tmp_path / "cpu.stat"
    stat.write_text("usage_usec 0\n")
    tight = kernel.node(tmp_path, limits=CgroupLimits(cores=1.5, cores_of=tmp_path))
    loose = kernel.node(tmp_path, limits=CgroupLimits(cores=3.0, cores_of=tmp_path))
    kernel.now_s += 2.0
    kernel.cores = [core(1.0, 1.0)] * 4
    stat.write_text("usage_usec 750000\n")
    assert (tight.sample()["cpu"], loose.sample()["cpu"]) == (0.25, 0.5)


def test_a_share_of_no_time_is_not_known(kernel, tmp_path) -> None:
    assert "cpu" not in kernel.node(tmp_path).sample()


def test_rates_are_what_has_moved_since_the_last_look_by_the_seconds_between(kernel, tmp_path) -> None:
    kernel.disks, kernel.cards = {"sda": Disk(1000, 50)}, {"lo": Card(0, 0), "eth0": Card(100, 10)}
    node = kernel.node(tmp_path)
    kernel.now_s += 2.0
    kernel.disks, kernel.cards = {"sda": Disk(5000, 50)}, {"lo": Card(9999, 9999), "eth0": Card(400, 30)}
    row = node.sample()
    assert (row["disk_read_bytes_per_s"], row["disk_written_bytes_per_s"]) == (2000, 0)
    assert (row["net_sent_bytes_per_s"], row["net_received_bytes_per_s"]) == (150, 10)
    kernel.now_s += 1.0
    kernel.disks = {"sda": Disk(5007, 50)}
    assert node.sample()["disk_read_bytes_per_s"] == 7


def test_devices_that_come_go_or_start_anew_move_nothing_by_that(kernel, tmp_path) -> None:
    kernel.disks = {"sda": Disk(900, 0), "sdb": Disk(800, 0), "sdc": Disk(1, 0)}
    node = kernel.node(tmp_path)
    kernel.now_s += 1.0
    kernel.disks = {"sda": Disk(3, 0), "sdc": Disk(6, 0), "sdd": Disk(700, 0)}
    assert node.sample()["disk_read_bytes_per_s"] == 5


def test_bytes_of_a_physical_device_are_not_counted_again_for_what_lies_on_it(kernel, tmp_path) -> None:
    for name in ("block/nvme0n1", "block/cciss!c0d0", "class/net/eth0"):
        (tmp_path / name / "device").mkdir(parents=True)
    kernel.disks = dict.fromkeys(("nvme0n1", "nvme0n1p1", "dm-0", "cciss/c0d0"), Disk(0, 0))
    kernel.cards = dict.fromkeys(("lo", "eth0", "bond0", "docker0"), Card(0, 0))
    node = kernel.node(tmp_path)
    kernel.now_s += 1.0
    kernel.disks, kernel.cards = dict.fromkeys(kernel.disks, Disk(8, 4)), dict.fromkeys(kernel.cards, Card(2, 1))
    row = node.sample()
    assert (row["disk_read_bytes_per_s"], row["disk_written_bytes_per_s"]) == (16, 8)
    assert (row["net_sent_bytes_per_s"], row["net_received_bytes_per_s"]) == (2, 1)


def test_memory_is_what_cannot_be_had_and_what_the_ranks_hold(kernel, tmp_path) -> None:
    row = kernel.node(tmp_path).sample()
    assert (row["memory_bytes"], row["memory_total_bytes"], row["ranks_memory_bytes"]) == (6000, 10_000, 1500)


def test_memory_of_a_container_with_a_limit_is_its_own(kernel, tmp_path) -> None:
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 600\ninactive_file 100\n")
    row = kernel.node(tmp_path, limits=CgroupLimits(memory_bytes=800, memory_of=tmp_path)).sample()
    assert (row["memory_bytes"], row["memory_total_bytes"]) == (600, 800)
    row = kernel.node(tmp_path, limits=CgroupLimits(memory_bytes=80_000, memory_of=tmp_path)).sample()
    assert (row["memory_bytes"], row["memory_total_bytes"]) == (6000, 10_000)


def test_a_rank_that_has_ended_holds_nothing(kernel, tmp_path) -> None:
    node = kernel.node(tmp_path, ranks=(7, 8, 9))  # 9 was never there
    del kernel.ranks[7]
    assert node.sample()["ranks_memory_bytes"] == 500


@pytest.mark.parametrize(
    ("asked", "lost"),
    [
        ("cpu_times", {"cpu"}),
        ("virtual_memory", {"memory_bytes", "memory_total_bytes"}),
        ("disk_io_counters", {"disk_read_bytes_per_s", "disk_written_bytes_per_s"}),
        ("net_io_counters", {"net_sent_bytes_per_s", "net_received_bytes_per_s"}),
    ],
)
@pytest.mark.parametrize("error", [OSError("gone"), NotImplementedError("no /proc/diskstats"), ValueError("'-'")])
def test_values_that_the_kernel_lacks_are_left_out(kernel, tmp_path, asked, lost, error) -> None:
    def look() -> set[str]:
        node = kernel.node(tmp_path)
        kernel.now_s += 1.0
        kernel.cores = [core(kernel.now_s, kernel.now_s)] * 4
        return set(node.sample())

    def refuse(**options: bool) -> None:
        raise error

    whole = look()
    setattr(kernel, asked, refuse)
    assert len(whole) == 8 and look() == whole - lost


def test_psutil_knows_this_machine() -> None:
    own = psutil.Process()
    node = NodeSampler(psutil, [own.pid], find_limits(), now_s)
    row = node.sample()
    assert 0 < row["ranks_memory_bytes"] <= row["memory_total_bytes"] and row["memory_bytes"] > 0
    # Between two calls a test process gains and loses some pages, not a quarter of them.
    assert row["ranks_memory_bytes"] == pytest.approx(own.memory_info().rss, rel=0.25)
    assert all(value >= 0 for value in row.values()) and row["net_sent_bytes_per_s"] >= 0
