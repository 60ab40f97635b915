"""The arguments of the native core are the same for any number of batches planned at once."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.core.dataset import DatasetInfo, Sample
from paceline.data.augment.geometric import BatchFlip
from paceline.data.loaders.native_plan import BatchPlan, BatchPlanner, PackImages
from paceline.data.order import EvalBatchSchedule, EvalShard, TrainBatchSchedule, TrainOrder
from paceline.data.resize import CenterCropResizer, RandomCropResizer

CROP = RandomCropResizer((0.08, 1.0), (0.75, 4 / 3))
RECORD, FILE = 1, 2


@dataclass(frozen=True)
class FakeShards:
    """Three shards, of which the second is not on disk."""

    requested: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return 3

    def memory(self, shard: int) -> memoryview | None:
        self.requested.append(shard)
        return None if shard == 1 else memoryview(bytes([shard]) * 100)

    def read(self, shard: int, offset: int, length: int) -> bytes:
        raise AssertionError

    def close(self) -> None: ...


class FakePack:
    """A pack of 60 samples: every seventh is a file, every eleventh has an unknown size."""

    info = DatasetInfo("made", "train", 60, ("a", "b"), 3, None, (0.5,) * 3, (0.25,) * 3)

    def __init__(self) -> None:
        index = np.arange(60)
        self.files = FakeShards()
        self.heights = (20 + index).astype(np.uint16)
        self.widths = np.where(index % 11 == 3, 0, 30).astype(np.uint16)
        self.kinds = np.where(index % 7 == 2, FILE, RECORD).astype(np.uint8)
        self.labels = (index % 2).astype(np.int32)

    def __len__(self) -> int:
        return 60

    def read(self, index: int) -> Sample:
        raise AssertionError

    def name_of(self, index: int) -> str:
        return str(index)

    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.uint64], NDArray[np.uint64]]:
        lengths = np.full(len(indices), 5, dtype=np.uint64)
        return (indices // 20).astype(np.int32), (indices % 20 * 5).astype(np.uint64), lengths


def planner(*, flip: bool = True, sizes=lambda step: 16, batch: int = 12) -> BatchPlanner:
    order = TrainOrder(seed=1, num_images=60, batch_size=batch)
    schedule = TrainBatchSchedule(order, sizes, [False] * (CROP.num_draws + 1), 0)
    return BatchPlanner(PackImages(FakePack()), schedule, CROP, BatchFlip(0.5) if flip else None)


def equal(one: BatchPlan, other: BatchPlan) -> bool:
    mine, its = (flat(each) for each in (one, other))
    return all(np.array_equal(this, that) for this, that in zip(mine, its, strict=True))


def flat(plan: BatchPlan) -> list:
    # Shards are numbered among those that the plan needs together.
    located = plan.located
    return [*plan._replace(located=None), located.sizes, located.offsets, located.lengths]


def memory_of(planned: BatchPlan) -> list[bytes]:
    return [bytes(planned.located.shard_buffers[shard])[:1] for shard in planned.located.shard_numbers.tolist()]


def test_a_plan_has_box_flip_and_location_of_every_sample() -> None:
    plan = planner()
    for planned in plan.batches(0, 5):
        draws = plan.schedule.draws(planned.number)
        assert np.array_equal(planned.draws, draws)
        assert np.array_equal(planned.flips, draws[:, CROP.num_draws] < 0.5)
        for row, index in enumerate(planned.indices.tolist()):
            is_known = index % 7 != 2 and index % 11 != 3 and not 20 <= index < 40
            assert planned.located.lengths[row] == (5 if is_known else 0)
            if is_known:
                box = CROP.choose_box(20 + index, 30, draws[row, : CROP.num_draws])
                assert planned.boxes[row].tolist() == list(box)
                assert planned.located.offsets[row] == index % 20 * 5
                assert memory_of(planned)[row] == bytes([index // 20])
        assert planned.is_inside and planned.size == 16


def test_a_plan_does_not_depend_on_where_planning_starts() -> None:
    whole = list(planner().batches(0, 12))
    later = list(planner().batches(7, 12))
    assert [planned.number for planned in later] == [7, 8, 9, 10, 11]
    for one, other in zip(whole[7:], later, strict=True):
        assert memory_of(one) == memory_of(other)
        assert equal(one, other)


def test_a_batch_has_the_size_of_its_step() -> None:
    assert [planned.size for planned in planner(sizes=lambda step: 16 + 8 * (step // 3)).batches(1, 8)] == [
        16,
        16,
        24,
        24,
        24,
        32,
        32,
    ]


def test_without_a_flip_nothing_is_flipped() -> None:
    assert not any(planned.flips.any() for planned in planner(flip=False).batches(0, 5))


def test_only_needed_shards_are_mapped() -> None:
    plan = planner()
    list(plan.batches(0, 1))
    assert plan.source.files.requested == [0, 1, 2]  # type: ignore[attr-defined]
    schedule = EvalBatchSchedule(EvalShard(10, 4), 16)
    facts = FakePack()
    batches = list(BatchPlanner(PackImages(facts), schedule, CenterCropResizer(0.875), None).batches(0, 3))
    assert facts.files.requested == [0]
    assert [len(planned.indices) for planned in batches] == [4, 4, 2]
    assert not any(planned.is_inside for planned in batches) and batches[0].draws.shape == (4, 0)


@pytest.mark.parametrize("batch", [1, 60])
def test_batches_of_any_size_are_planned(batch: int) -> None:
    assert [len(planned.indices) for planned in planner(batch=batch).batches(0, 3)] == [batch] * 3
