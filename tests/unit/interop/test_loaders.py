"""Loaders for other trainers: the batches of `paceline train`, bit for bit, whoever asks for them and from where."""

import itertools
import sys

import pytest
import torch

from paceline.core.errors import CheckpointError, DataError, RecipeError, WorldError
from paceline.interop import loaders
from paceline.interop.samplers import even_batch
from paceline.recipe.load import load

DIGITS = ("digits", "data.batch_size=256")  # 5 steps of the 1,438 images, 359 in evaluation
MIXED = ("digits", "data.batch_size=256", "data.augment=[{name: pad_crop, padding: 2}, mixup, cutmix]")
STEPS = 5


def made(args, **options):
    return loaders(*args, device="cpu", **options)


def equal(found, wanted) -> bool:
    pairs = list(zip(found, wanted, strict=True))
    assert pairs
    return all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in pairs)


def together(batches):
    """Return the batches of ranks put together, step by step."""
    return [tuple(torch.cat(part) for part in zip(*step, strict=True)) for step in zip(*batches, strict=True)]


@pytest.mark.parametrize("args", [DIGITS, MIXED], ids=["labels", "mixed"])
def test_each_iteration_is_the_next_epoch_of_the_trainer(args, trained_on) -> None:
    train, _ = made(args)
    assert len(train) == STEPS
    wanted = trained_on(args, 0, 2 * STEPS)
    assert equal(train, wanted[:STEPS])
    assert equal(train, wanted[STEPS:])


def test_workers_that_work_ahead_over_the_end_of_an_epoch_make_the_same(trained_on) -> None:
    args = (*DIGITS, "data.loader=threads", "data.workers=2")
    with made(args) as (train, _):
        assert equal([*train, *train], trained_on(args, 0, 2 * STEPS))


@pytest.mark.parametrize("args", [DIGITS, MIXED], ids=["labels", "mixed"])
def test_two_ranks_together_have_the_batches_of_one(args, trained_on) -> None:
    ranks = [made(args, rank=rank, world_size=2).train for rank in range(2)]
    assert [rank.batch_size for rank in ranks] == [128, 128]
    parts = [list(rank) for rank in ranks]
    for rank in range(2):
        assert equal(parts[rank], trained_on(args, 0, STEPS, rank, 2))
    assert equal(together(parts), trained_on(args, 0, STEPS))


def test_a_loaded_state_resumes_within_its_epoch_and_on_other_ranks(trained_on) -> None:
    train, _ = made(DIGITS)
    list(train)
    list(itertools.islice(train, 2))
    state = train.state_dict()
    assert all(isinstance(value, int) for value in state.values())  # nothing that a checkpoint would have to unpickle
    wanted = trained_on(DIGITS, STEPS + 2, 3 * STEPS)
    again, _ = made(DIGITS)
    again.load_state_dict(state)
    assert again.epoch == 1 and len(again) == STEPS
    assert equal(again, wanted[:3])
    assert again.epoch == 2 and equal(again, wanted[3:])
    ranks = [made(DIGITS, rank=rank, world_size=2).train for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    assert equal(together([list(rank) for rank in ranks]), wanted[:3])


def test_a_state_behind_an_epoch_begins_the_next() -> None:
    train, _ = made(DIGITS)
    list(train)
    again, _ = made(DIGITS)
    again.load_state_dict(train.state_dict())
    assert again.epoch == 1 and equal(again, train)


def test_an_epoch_that_is_set_is_the_next_and_a_loaded_state_in_it_stays(trained_on) -> None:
    train, _ = made(DIGITS)
    train.set_epoch(2)
    list(itertools.islice(train, 2))
    state = train.state_dict()
    wanted = trained_on(DIGITS, 2 * STEPS, 3 * STEPS)
    train.set_epoch(2)  # left in its midst, and asked for anew
    assert equal(train, wanted)
    again, _ = made(DIGITS)
    again.load_state_dict(state)
    again.sampler.set_epoch(2)
    assert equal(again, wanted[2:])
    again.load_state_dict(state)
    again.set_epoch(0)
    assert equal(itertools.islice(again, 1), trained_on(DIGITS, 0, 1))
    assert again.state_dict()["step"] == 1


def test_asking_for_an_iterator_alone_changes_nothing(trained_on) -> None:
    train, _ = made(DIGITS)
    iter(train)
    iter(train)
    assert train.epoch == 0 and train.state_dict()["step"] == 0
    assert equal(train, trained_on(DIGITS, 0, STEPS))


def test_an_epoch_that_is_left_early_is_over(trained_on) -> None:
    train, _ = made(DIGITS)
    list(itertools.islice(train, 2))
    assert equal(train, trained_on(DIGITS, STEPS, 2 * STEPS))


def test_a_state_within_an_epoch_resumes_there_or_after_set_epoch(trained_on) -> None:
    train, _ = made(DIGITS)
    list(itertools.islice(train, 2))
    stopped = train.state_dict()
    train.set_epoch(train.epoch)
    ended = train.state_dict()
    for state, first in ((stopped, 2), (ended, STEPS)):
        again, _ = made(DIGITS)
        again.load_state_dict(state)
        assert equal(itertools.islice(again, 1), trained_on(DIGITS, first, first + 1))


def test_iterations_side_by_side_are_two_epochs(trained_on) -> None:
    train, _ = made(DIGITS)
    one, other = iter(train), iter(train)
    found = [(next(one), next(other)) for _ in range(STEPS)]
    wanted = trained_on(DIGITS, 0, 2 * STEPS)
    assert equal([each[0] for each in found], wanted[:STEPS]) and equal([each[1] for each in found], wanted[STEPS:])


def test_what_does_not_fill_a_batch_is_left_out_of_an_epoch_and_other_images_of_the_next() -> None:
    train, _ = made(DIGITS)
    assert sum(len(labels) for _, labels in train) == STEPS * 256 < len(train.dataset)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_evaluation_image_is_in_one_batch_of_one_rank(world_size: int, evaluated_on) -> None:
    args = (*DIGITS[:1], "data.batch_size=252")
    ranks = [made(args, rank=rank, world_size=world_size).val for rank in range(world_size)]
    assert len({len(rank) for rank in ranks}) == 1
    images, labels = (torch.cat(part) for part in zip(*itertools.chain(*ranks), strict=True))
    wanted = evaluated_on(args)
    assert len(labels) == 359 == len(ranks[0].dataset)
    assert torch.equal(images, torch.cat([each for each, _ in wanted]))
    assert torch.equal(labels, torch.cat([each for _, each in wanted]))
    assert max(len(each) for rank in ranks for _, each in rank) <= ranks[0].batch_size
    assert [len(list(rank)) for rank in ranks] == [len(rank) for rank in ranks]  # the same again


def test_ranks_have_as_many_batches_wherever_a_size_allows_that() -> None:
    def counts(num_images: int, world_size: int, size: int) -> set[int]:
        fewest, rest = divmod(num_images, world_size)
        return {-(-fewest // size), -(-(fewest + bool(rest)) // size)}

    cases = list(itertools.product(range(1, 60), range(1, 6), range(1, 9)))
    for num_images, world_size, batch_size in cases:
        size = even_batch(num_images, batch_size, world_size)
        assert 1 <= size <= batch_size
        possible = [each for each in range(1, batch_size + 1) if len(counts(num_images, world_size, each)) == 1]
        assert size == (max(possible) if possible else batch_size)
    assert even_batch(129, 64, 2) == 63  # shares of 64 and 65


def test_uint8_images_are_not_normalised() -> None:
    floats, pixels = made(DIGITS), made(DIGITS, dtype=torch.uint8)
    for (normalised, labels), (raw, same) in (
        (next(iter(a)), next(iter(b))) for a, b in zip(floats, pixels, strict=True)
    ):
        assert raw.dtype == torch.uint8 and torch.equal(labels, same)
        mean, std = floats.train.dataset.mean[0], floats.train.dataset.std[0]
        # Two orders of operations in float32, on numbers up to 3.
        torch.testing.assert_close((raw / 255 - mean) / std, normalised, atol=1e-5, rtol=0)


def test_other_floats_are_rounded_once() -> None:
    train, _ = made(DIGITS)
    half, _ = made(DIGITS, dtype=torch.bfloat16)
    assert torch.equal(next(iter(half))[0], next(iter(train))[0].bfloat16())


def test_images_are_contiguous_unless_the_recipe_sets_channels_last() -> None:
    """Networks of other trainers may call `view`, which a channels-last image refuses."""
    args = ("synthetic", "data.source.num_images=64", "data.source.num_val_images=8")
    train, val = made(args)
    assert next(iter(train))[0].is_contiguous() and next(iter(val))[0].is_contiguous()
    last, _ = made((*args, "model.memory_format=channels_last"))
    assert next(iter(last))[0].is_contiguous(memory_format=torch.channels_last)


def test_what_only_the_trainer_does_neither_refuses_nor_changes_batches(trained_on) -> None:
    args = ("digits", "data.batch_size=250")
    others = ("train.accumulate=4", "checkpoint.every=2st", "checkpoint.keep_every=3st")
    train, val = made((*args, *others))
    assert equal(train, trained_on(args, 0, len(train)))
    assert val.batch_size == made(args).val.batch_size


OWN = """
import sys

import numpy as np

print("imported", file=sys.stderr)


def pixels(split):
    low, high = {"train": (40, 70), "val": (200, 230)}[split]
    images = np.random.default_rng(0).integers(low, high, (8, 4, 4, 1), dtype=np.uint8)
    return images, np.arange(8) % 2, ("a", "b")
"""


@pytest.fixture
def own_source(tmp_path, monkeypatch):
    """Return a recipe's file that names a source in a module `made_of_pixels`."""
    (tmp_path / "made_of_pixels.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "r.yaml"
    file.write_text("data: {source: {name: 'made_of_pixels:pixels'}, batch_size: 4}\ntrain: {epochs: 1}\n")
    yield file
    sys.modules.pop("made_of_pixels", None)


def test_both_splits_have_mean_and_std(own_source) -> None:
    for loader, raw in zip(
        made((own_source,), trust_code=True), made((own_source,), dtype=torch.uint8, trust_code=True), strict=True
    ):
        facts = loader.dataset
        (images, _), (pixels, _) = next(iter(loader)), next(iter(raw))
        # Two orders of operations in float32, on numbers up to 1.
        torch.testing.assert_close(images * facts.std[0] + facts.mean[0], pixels / 255, atol=1e-5, rtol=0)


def test_code_that_a_file_names_for_its_data_runs_only_with_trust_code(own_source, capsys) -> None:
    with pytest.raises(RecipeError, match=r"data.source.name: made_of_pixels:pixels is custom code.*trust_code=True"):
        made((own_source,))
    assert "made_of_pixels" not in sys.modules
    made((own_source,), trust_code=True)
    assert capsys.readouterr().err == "imported\n"
    made((own_source,), rank=1, world_size=2, trust_code=True)
    made(("digits", "data.source.name=made_of_pixels:pixels", "data.batch_size=4", "model.name=simple_cnn"))
    assert capsys.readouterr().err == ""


def test_a_recipe_is_a_name_a_mapping_or_a_recipe() -> None:
    wanted = list(itertools.islice(made(DIGITS).train, 1))
    values = {"extends": "digits", "data": {"batch_size": 256}}
    recipe = load("digits").recipe
    assert equal(itertools.islice(made((values,)).train, 1), wanted)
    assert equal(itertools.islice(made((recipe, "data.batch_size=256")).train, 1), wanted)


def test_a_loader_has_the_metadata_of_its_split() -> None:
    train, val = made(MIXED)
    assert train.dataset.classes == tuple("0123456789") and train.dataset.class_to_idx["7"] == 7
    assert (train.dataset.num_images, val.dataset.num_images) == (1438, 359)
    assert (train.dataset.num_classes, train.dataset.channels, train.dataset.image_size) == (10, 1, 16)
    assert train.mixup_enabled and not made(DIGITS).train.mixup_enabled
    assert train.batch_sampler is train.sampler is train
    next(iter(train))
    assert train.stats().images == 256


def test_invalid_arguments_are_one_line_with_the_fix() -> None:
    for error, args, options, message in [
        (RecipeError, MIXED, {"dtype": torch.uint8}, "use a float dtype"),
        (RecipeError, DIGITS, {"dtype": torch.int64}, "not a dtype of images"),
        (RecipeError, (7,), {}, "not a recipe"),
        (WorldError, DIGITS, {"rank": 2, "world_size": 2}, "rank 2 of 2"),
        (WorldError, DIGITS, {"rank": 0}, "give both"),
        (RecipeError, DIGITS, {"rank": 0, "world_size": 3}, "does not divide evenly over 3 ranks"),
    ]:
        with pytest.raises(error, match=message) as raised:
            made(args, **options)
        assert "\n" not in str(raised.value)
    for device, message in [("gpu", "is not a device"), ("meta", "cpu or cuda")]:
        with pytest.raises(WorldError, match=message):
            loaders("digits", device=device)


def test_ranks_that_a_launcher_has_started_are_not_taken_for_one(monkeypatch) -> None:
    """Else each would train on all images, without an error."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError, match="2 ranks were started"):
        made(DIGITS)
    assert len(made(DIGITS, rank=0, world_size=1).train) == STEPS


def test_a_state_of_another_order_is_refused() -> None:
    state = made(DIGITS).train.state_dict()
    for args, message in [((*DIGITS, "seed=1"), "seed 0"), (("digits", "data.batch_size=128"), "batch_size 256")]:
        with pytest.raises(CheckpointError, match=message):
            made(args).train.load_state_dict(state)
    for step in ({}, {"step": "2"}, {"step": -1}):
        del state["step"]
        state |= step
        with pytest.raises(CheckpointError, match="return value of a loader's state_dict"):
            made(DIGITS).train.load_state_dict(state)
        state["step"] = 0


def test_a_closed_loader_has_let_go_of_a_staged_copy(tmp_path, folder_of_photographs) -> None:
    args = ("folder", f"data.source.root={folder_of_photographs}", f"data.stage={tmp_path}", "data.batch_size=4")
    args += ("data.image_size=16", "data.workers=0")
    train, val = made(args)
    assert list(tmp_path.glob("paceline-stage-*"))
    train.close()
    assert len(list(val)) == len(val) and list(tmp_path.glob("paceline-stage-*"))
    val.close()
    assert not list(tmp_path.glob("paceline-stage-*"))


def test_bad_images_are_warned_of_and_too_many_are_an_error(folder_of_photographs) -> None:
    files = sorted((folder_of_photographs / "train").rglob("*.png"))
    files[0].write_bytes(files[0].read_bytes()[:60])
    args = ["folder", f"data.source.root={folder_of_photographs}", "data.batch_size=4", "data.image_size=16"]
    args += ["data.workers=0", "data.order=stored", "data.on_bad_image=skip"]
    train, _ = made(args)
    with pytest.warns(UserWarning, match=str(files[0])) as warned:
        assert [len(labels) for _, labels in itertools.chain(train, train)] == [4] * 4
    assert len(warned) == 1  # each image once
    files[4].write_bytes(files[4].read_bytes()[:60])
    batches = iter(made([*args, "data.max_bad_images=1"]).train)
    with pytest.warns(UserWarning, match=str(files[0])):
        next(batches)
    with pytest.warns(UserWarning), pytest.raises(DataError, match="max_bad_images: 2 images"):
        next(batches)


def test_bad_images_are_left_out_of_an_evaluation(folder_of_photographs) -> None:
    file = sorted((folder_of_photographs / "val").rglob("*.png"))[0]
    file.write_bytes(file.read_bytes()[:60])
    args = ["folder", f"data.source.root={folder_of_photographs}", "data.batch_size=4", "data.image_size=16"]
    _, val = made([*args, "data.eval_batch_size=1", "data.workers=0", "data.on_bad_image=skip"])
    with pytest.warns(UserWarning, match=str(file)):
        assert [len(labels) for _, labels in val] == [1] * 5
    assert len(val) == len(val.dataset) == 6


def test_several_labels_are_targets_whatever_the_recipes_loss(tmp_path):
    from PIL import Image

    for number in range(4):
        Image.new("L", (8, 8), 60 * number).save(tmp_path / f"{number}.png")
    (tmp_path / "list.csv").write_text("path,label\n0.png,a;b\n1.png,b\n2.png,\n3.png,a\n")
    source = {"name": "manifest", "train": str(tmp_path / "list.csv"), "val": str(tmp_path / "list.csv")}
    data = {"source": {**source, "separator": ";", "channels": 1}, "image_size": 8, "batch_size": 4}
    with pytest.warns(UserWarning, match="are training images too"):
        made_loaders = made([{"data": data, "train": {"epochs": 1, "stop": {"top1": 0.9}}}])
    ((_, targets),) = made_loaders.val
    assert targets.tolist() == [[1, 1], [0, 1], [0, 0], [1, 0]] and targets.dtype == torch.float32
    ((_, targets),) = made_loaders.train
    assert sorted(targets.tolist()) == [[0, 0], [0, 1], [1, 0], [1, 1]]
