"""Data of a plugin: the forms of a split, and one-line errors for others."""

import os
import sys
import tracemalloc

import numpy as np
import pytest

from paceline.core.dataset import ArraySource
from paceline.core.errors import DataError, RecipeError
from paceline.core.pixels import PixelFormat
from paceline.data.bad_images import ImageError
from paceline.data.sources.build import build_datasets
from paceline.data.sources.builtin import load_digits
from paceline.data.sources.fingerprint import digest_datasets
from paceline.data.sources.plugin import PluginSamples, _compute_mean_and_std
from paceline.data.staging.inventory import build_inventory
from paceline.recipe.schema.source import OwnSource


@pytest.fixture
def load(monkeypatch):
    """Return a function that loads a dataset from one function or class in a module."""
    module = type(sys)("parts_of_data")
    monkeypatch.setitem(sys.modules, "parts_of_data", module)

    def loaded(maker, channels="auto", skip_bad=False, **args):
        module.Data = maker
        section = OwnSource(name="parts_of_data:Data", args=args, channels=channels)
        return build_datasets(section, may_download=False, skip_bad=skip_bad)

    return loaded


@pytest.fixture
def error_message(load):
    """Return the one-line error of loading, without the name of the plugin."""

    def message(maker, **options) -> str:
        with pytest.raises((RecipeError, ImageError)) as caught:
            load(maker, **options)
        assert len(str(caught.value).splitlines()) == 1
        return str(caught.value).removeprefix("data.source.name: parts_of_data:Data ")

    return message


def pixels(split, images=((4, 6), np.uint8), labels=(0, 1, 1), names=("a", "b")):
    size, dtype = images
    values = np.arange(len(labels) * size[0] * size[1]).reshape(len(labels), *size) % 7
    return values.astype(dtype), np.array(labels), names


class Pictures:
    """Three pictures of different sizes."""

    classes = ("a", "b")

    def __init__(self, split, gives=None, label=1, bad=0):
        self.gives, self.label, self.bad = gives, label, bad

    def __len__(self):
        return 3

    def read(self, index):
        if isinstance(self.gives, str) or index < self.bad:
            raise KeyError("gone")
        content = np.full((5 + index, 7), index, np.uint8) if self.gives is None else self.gives
        return content, self.label


def test_pixels_of_one_size_become_an_array_source_with_their_own_statistics(load) -> None:
    datasets = load(pixels)
    train = datasets.train
    assert isinstance(train, ArraySource) and train.images.shape == (3, 4, 6, 1) and train.labels.tolist() == [0, 1, 1]
    info = train.info
    assert (info.split, info.num_images, info.class_names, info.image_size) == ("train", 3, ("a", "b"), (4, 6))
    # Rounded to four digits; numpy sums in another order.
    assert info.mean[0] == pytest.approx((train.images / 255).mean(), abs=6e-5)
    assert info.std[0] == pytest.approx((train.images / 255).std(), abs=6e-5)
    assert datasets.val.info.split == "val"


def test_a_constant_channel_has_a_deviation_of_1(load) -> None:
    flat = load(lambda split: (np.full((2, 3, 3, 3), 9, np.uint8), [0, 1], ["a", "b"])).train.info
    assert (flat.channels, flat.std) == (3, (1.0, 1.0, 1.0))


def test_images_of_any_size_are_read_on_access(load) -> None:
    train = load(Pictures).train
    assert isinstance(train, PluginSamples) and len(train) == 3
    content, label = train.read(2)
    assert content.shape == (7, 7, 1) and content.dtype == np.uint8 and label == 1
    assert (train.info.image_size, train.info.channels) == (None, 1)
    assert train.name_of(2) == "parts_of_data:Data/train[2]"


@pytest.mark.parametrize(("section_channels", "channels"), [("auto", 3), (1, 1)])
def test_encoded_files_are_decoded_with_the_channels_of_the_section(load, section_channels, channels) -> None:
    train = load(lambda split: Pictures(split, gives=b"a file"), channels=section_channels).train
    assert train.read(0) == (b"a file", 1) and train.info.channels == channels


def test_a_source_is_used_unchanged(load) -> None:
    digits = load_digits()
    found = load(lambda split: getattr(digits, split))
    assert found.train is digits.train and found.val is digits.val


def test_the_digest_depends_on_the_pixels(load) -> None:
    first, again = digest_datasets(load(pixels)), digest_datasets(load(pixels))
    assert first == again != digest_datasets(load(pixels, labels=[0, 1, 0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"images": ((4, 6), float)},
            "gives train images as float64 [3, 4, 6, 1] (give uint8, uint16 or",
        ),
        ({"labels": [0, 1, 2]}, "gives train label 2, and 2 classes (give 0 to 1)"),
        ({"labels": [0.0, 1.0, 1.0]}, "gives train labels as float64 [3] for 3 images (give one whole number each)"),
        ({"names": ["a"]}, "gives ['a'] as class names (give a list of two or more)"),
        ({"names": "ab"}, "gives 'ab' as class names (give a list of two or more)"),
        ({"names": ["a", "a"]}, "names class 'a' twice (give each class a unique name)"),
        (
            {"channels": 1},
            "data.source.channels: 1 has no effect on parts_of_data:Data, which defines its channels itself",
        ),
        (
            {"data": ([np.zeros((2, 2)), np.zeros((3, 2))], [0, 1], ["a", "b"])},
            "gives train images that numpy cannot convert to an array: setting an array element with a sequence. The "
            "requested array has an inhomogeneous shape",
        ),
    ],
)
def test_invalid_arrays_are_refused(error_message, options, message) -> None:
    def data(split, images=((4, 6), np.uint8), labels=(0, 1, 1), names=("a", "b")):
        return options.get("data") or pixels(split, options.get("images", images), labels, names)

    assert error_message(
        data, **{key: value for key, value in options.items() if key not in ("images", "data")}
    ).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gives": "raise"}, "parts_of_data:Data/train[0]: read raised KeyError: 'gone' at "),
        (
            {"gives": np.zeros((2, 2))},
            "parts_of_data:Data/train[0]: read gives float64 [2, 2, 1]; give bytes, or uint8",
        ),
        ({"label": 2}, "parts_of_data:Data/train[0]: has label 2; give a whole number, 0 to 1, a place in classes"),
        ({"label": 0.7}, "parts_of_data:Data/train[0]: has label 0.7; give a whole number, 0 to 1,"),
        ({"label": "1"}, "parts_of_data:Data/train[0]: has label '1'; give a whole number, 0 to 1,"),
        ({"label": None}, "parts_of_data:Data/train[0]: has label None; give a whole number, 0 to 1,"),
        ({"gives": [[1], [1, 2]]}, "parts_of_data:Data/train[0]: read raised ValueError: setting an array"),
        (
            {"gives": np.zeros((2, 2, 3), np.uint8), "channels": 1},
            "parts_of_data:Data/train[0]: has 3 channels of uint8, and the split 1 channel of uint8; make them agree",
        ),
    ],
)
def test_an_invalid_first_sample_is_refused_before_the_run(error_message, options, message) -> None:
    channels = options.pop("channels", "auto")

    def data(split):
        return Pictures(split, **options)

    assert error_message(data, channels=channels).startswith(message)


def test_incomplete_or_inconsistent_splits_are_refused(error_message) -> None:
    class Half:
        classes = ("a", "b")

        def __len__(self):
            return 1

    assert error_message(lambda split: Half()).startswith(
        "gives train as Half, which has no read (return (images, labels,"
    )
    assert error_message(lambda split: None).startswith("gives train as NoneType, which has no classes")
    assert error_message(lambda split: pixels(split, names=["a", split])) == (
        "names other classes for val than for train (return the same, in the same order)"
    )


def test_errors_of_the_plugin_are_reported(error_message) -> None:
    class Raises(Pictures):
        @property
        def classes(self):
            raise OSError("no list")

    class Short(Pictures):
        def __len__(self):
            return 1.5

    class Info:
        info = load_digits().train.info

    assert error_message(lambda split: Raises(split)).startswith("raised OSError: no list at ")
    assert error_message(lambda split: Short(split)).startswith(
        "raised TypeError: 'float' object cannot be interpreted"
    )
    assert error_message(lambda split: Info()).startswith("gives train as Info, which has no __len__ (return")


@pytest.mark.parametrize("label", [np.uint8(1), np.array(1), True], ids=repr)
def test_any_integer_type_is_a_label(load, label) -> None:
    assert load(lambda split: Pictures(split, label=label)).train.read(0)[1] == 1


def test_with_skip_bad_the_first_readable_sample_gives_the_channels(load, error_message) -> None:
    assert load(Pictures, bad=2, skip_bad=True).train.info.channels == 1
    assert load(Pictures, bad=3, skip_bad=True).train.info.channels == 3  # the default
    assert "read raised KeyError: 'gone'" in error_message(Pictures, bad=1)


def test_an_empty_validation_split_has_the_channels_of_the_training_split(load) -> None:
    class Empty(Pictures):
        def __len__(self):
            return 0

    found = load(lambda split: (Pictures if split == "train" else Empty)(split))
    assert (found.train.info.channels, found.val.info.channels, len(found.val)) == (1, 1, 0)


def test_the_digest_depends_on_samples_and_not_on_the_plugins_name(load, monkeypatch) -> None:
    pictures = digest_datasets(load(Pictures))
    assert digest_datasets(load(Pictures)) == pictures
    other = [load(Pictures, label=0), load(lambda split: Pictures(split, gives=b"a file"))]
    assert len({pictures, *map(digest_datasets, other)}) == 3
    monkeypatch.setitem(sys.modules, "moved", sys.modules["parts_of_data"])
    load(Pictures)
    assert digest_datasets(build_datasets(OwnSource(name="moved:Data"), may_download=False)) == pictures


def test_the_digest_reads_few_of_many_samples_and_none_twice(load) -> None:
    seen = []

    class Many(Pictures):
        def __len__(self):
            return 1_000_000

        def read(self, index):
            seen.append(index)
            return b"a file", 0

    found = load(Many)
    seen.clear()
    digest_datasets(found)
    assert len(seen) == 2 * 64 and {0, 999_999} <= set(seen) and len(set(seen)) == 64
    digest_datasets(load(Pictures, bad=1, skip_bad=True))  # unreadable samples are no error


def test_pixels_are_counted_in_blocks(load) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 1024, 512, 1), np.uint8)
    info = load(lambda split: (images, np.zeros(5, int), ["a", "b"])).train.info
    assert info.mean[0] == pytest.approx((images / 255).mean(), abs=6e-5)  # rounded to four digits
    tracemalloc.start()
    _compute_mean_and_std(images)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 16 << 20, "all at once take 20 MiB and more, and a block of two takes 8 MiB"


def test_forked_workers_do_not_share_a_file_position(load, tmp_path) -> None:
    """Processes that share an open file share its position."""
    size = 4096
    (tmp_path / "records").write_bytes(b"".join(bytes([number]) * size for number in range(64)))

    class Records:
        classes = tuple(map(str, range(64)))

        def __init__(self, split):
            self.file = None

        def __len__(self):
            return 64

        def read(self, index):
            if self.file is None:
                self.file = (tmp_path / "records").open("rb", buffering=0)
            self.file.seek(index * size)
            return np.frombuffer(self.file.read(size), np.uint8).reshape(64, 64), index

    found = load(Records)
    train, val = found.train, found.val
    train.read(5)
    place = train.plugin.file.tell()
    reading, writing = os.pipe()
    worker = os.fork()
    if worker == 0:
        content, label = train.read(40)
        os.write(writing, bytes([content[0, 0, 0], label]))
        os._exit(0)
    assert os.read(reading, 2) == bytes([40, 40])
    os.waitpid(worker, 0)
    os.close(reading)
    os.close(writing)
    assert train.plugin.file.tell() == place
    for split in (train, val):
        split.plugin.file.close()


def test_plugin_data_cannot_be_staged() -> None:
    with pytest.raises(DataError, match=r"data\.stage: cannot copy what a:B reads"):
        build_inventory(OwnSource(name="a:B"))


SEVERAL = ({"b", "a"}, [1], (), np.array([0.25, 0.75]), np.array([0, 1]))
ROWS = [[1, 1], [0, 1], [0, 0], [0.25, 0.75], [0, 1]]


def targets_of(source):
    return source.info.targets.rows[source.labels].tolist()


def test_arrays_have_several_labels_or_soft_labels(load):
    for labels in (SEVERAL, np.array(ROWS)):
        data = load(lambda split, labels=labels: (np.zeros((5, 4, 6), np.uint8), labels, ("a", "b")))
        assert targets_of(data.train) == ROWS and len(data.train.info.targets.rows) == 4
    moved = [[1, 0], *ROWS[1:]]
    others = load(lambda split: (np.zeros((5, 4, 6), np.uint8), np.array(moved), ("a", "b")))
    assert digest_datasets(data) != digest_datasets(others)


def test_an_object_gives_targets_in_place_of_labels(load):
    class WithTargets(Pictures):
        targets = SEVERAL[:3]

    data = load(WithTargets, label=None)
    assert targets_of(data.train) == ROWS[:3] and [data.val.read(index)[1] for index in range(3)] == [0, 1, 2]


WRONG = ([2], ["c"], [0.5], [True], [0, 0], [False, True], ["a", 0])
WRONG_SHARES = (np.array([0.5]), np.array([0.5, 1.5]), np.array([0.5, np.nan]))


@pytest.mark.parametrize("wrong", [*WRONG, *WRONG_SHARES], ids=str)
def test_wrong_targets_are_refused(error_message, wrong):
    message = error_message(lambda split: (np.zeros((2, 4, 6), np.uint8), [{0}, wrong], ("a", "b")))
    assert message.startswith("gives train image 1 the labels ") and "(give a list of class names" in message


def test_a_label_of_read_cannot_be_a_set(error_message):
    assert "for several labels set the attribute targets" in error_message(Pictures, label=["a"])


def test_each_image_needs_a_target(error_message):
    class WithTwo(Pictures):
        targets = ((0,), (1,))

    assert error_message(WithTwo) == "gives train 2 targets for 3 images (give one for each)"


@pytest.mark.parametrize("kind", ["uint8", "uint16", "float32"])
def test_arrays_and_samples_may_have_16_channels_of_any_type(load, kind) -> None:
    values = (np.arange(3 * 4 * 6 * 16).reshape(3, 4, 6, 16) % 251).astype(kind)

    class Samples(Pictures):
        def read(self, index):
            return values[index], 0

    arrays = load(lambda split: (values, [0, 1, 1], ["a", "b"])).train
    samples = load(Samples).train
    for source in (arrays, samples):
        assert source.info.pixel_format == PixelFormat(16, kind)
        assert np.array_equal(source.read(2)[0], values[2]) and source.read(2)[0].dtype == kind
        assert bool(source.info.mean) == (kind == "uint8" and source is arrays)  # others are measured


def test_samples_of_another_type_or_with_nan_are_bad_images(load) -> None:
    class Changing(Pictures):
        def read(self, index):
            return np.full((4, 4, 5), np.nan if index == 2 else 1, "float32" if index != 1 else "uint16"), 0

    train = load(Changing).train
    with pytest.raises(ImageError, match=r"5 channels of uint16, and the split 5 channels of float32"):
        train.read(1)
    with pytest.raises(ImageError, match="NaN or infinite"):
        train.read(2)
    with pytest.raises(RecipeError, match="NaN or infinite"):
        load(lambda split: (np.full((2, 4, 4), np.inf, np.float32), [0, 1], ["a", "b"]))


def test_17_channels_are_refused(error_message) -> None:
    message = error_message(lambda split: (np.zeros((2, 4, 4, 17), np.uint8), [0, 1], ["a", "b"]))
    assert "uint8 [2, 4, 4, 17]" in message and "C up to 16" in message
