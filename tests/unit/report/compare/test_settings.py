"""The settings of runs: how they are read, which differ, and what groups are called after them."""

import pytest

from paceline.report.settings import find_differing_settings, name_groups, read_settings


def test_settings_are_read_by_dotted_path_as_the_recipe_has_them():
    text = "seed: 3\ntrain:\n  compile: off\n  epochs: 1e-1\n  ema: false\naugment:\n- name: flip\nstop: {}\n"
    assert read_settings(text) == (
        {"seed": "3", "train.compile": "off", "train.epochs": "0.1", "train.ema": "false",
         "augment": '[{"name": "flip"}]', "stop": "{}"}, "",
    )  # fmt: skip


def test_long_names_with_a_common_prefix_are_two_settings():
    text = "".join(f"{'x' * 200}{end}: {end}\n" for end in (1, 2))
    values, _ = read_settings(text)
    assert sorted(values.values()) == ["1", "2"]
    assert all(len(path) < 200 for path in values)


def test_fields_of_a_section_of_a_long_name_take_no_more_room_than_they_do():
    values, _ = read_settings("? " + "x" * 50_000 + "\n:\n" + "".join(f"  f{index}: 0\n" for index in range(1000)))
    assert len(values) == 1000
    assert sum(map(len, values)) < 200 * 1000


def test_a_setting_of_one_group_only_differs():
    assert find_differing_settings([{"a": "1", "b": "2"}, {"a": "1", "c": "2"}]) == ["b", "c"]


@pytest.mark.parametrize(
    "groups, names",
    [
        ([{"data.batch_size": "128"}, {"data.batch_size": "64"}], ["batch 128", "batch 64"]),
        ([{"ranks": "1"}, {"ranks": "4"}], ["1 rank", "4 ranks"]),
        ([{"optim.lr": "0.1"}, {"optim.lr": "0.4"}], ["lr 0.1", "lr 0.4"]),
        ([{"schedule.warmup": "0ep"}, {"schedule.warmup": "5ep"}], ["without warm-up", "with warm-up"]),
        (
            [{"schedule.warmup": "2ep"}, {"schedule.warmup": "5ep"}],
            ["with 2ep of warm-up", "with 5ep of warm-up"],
        ),
        ([{"train.ema": "off"}, {"train.ema.decay": "0.9"}], ["train.ema=off", "train.ema.decay=0.9"]),
        (
            [{"train.epochs": "auto", "train.steps": "14"}, {"train.epochs": "2.0", "train.steps": "auto"}],
            ["train.steps=14", "train.epochs=2.0"],
        ),
        (
            [{"data.workers": "auto", "log.every": "1st"}, {"data.workers": "4", "log.every": "2st"}],
            ["data.workers=auto", "data.workers=4"],
        ),
        (
            [{"checkpoint.every": "1ep", "train.compile": "off"}, {"checkpoint.every": "2ep", "train.compile": "on"}],
            ["train.compile=off", "train.compile=on"],
        ),
        (
            [{"data.workers": "2", "optim.lr": "0.1"}, {"data.workers": "1", "optim.lr": "0.2"}],
            ["lr 0.1, data.workers=2", "lr 0.2, data.workers=1"],
        ),
        (
            [
                {"model.width": "0.25", "train.epochs": "3.0", "ranks": "2"},
                {"model.width": "1.0", "train.epochs": "1.0", "ranks": "1"},
            ],
            ["2 ranks, train.epochs=3.0, model.width=0.25", "1 rank, train.epochs=1.0, model.width=1.0"],
        ),
        ([{"optim.lr": "0.1", "paceline": "1"}, {"optim.lr": "0.2", "paceline": "2"}], ["lr 0.1", "lr 0.2"]),
        ([{"checkpoint.every": "1ep"}, {"checkpoint.every": "2ep"}], ["checkpoint.every=1ep", "checkpoint.every=2ep"]),
        (
            [
                {"data.source.name": "folder", "data.source.root": "photos", "data.source.channels": "3"},
                {"data.source.name": "pack", "data.source.root": "photos.pack", "data.source.cache_gb": "50.0"},
            ],
            ["folder", "pack"],
        ),
        ([{}, {}], ["x", "y"]),
    ],
)
def test_groups_are_named_after_all_settings_that_differ(groups, names):
    assert name_groups(groups, ["x", "y"]) == names


def test_groups_that_differ_late_in_their_values_are_named_by_folder():
    groups = [{"data.source.root": "/data" * 40 + end} for end in "12"]
    names = name_groups(groups, ["x", "y"])
    assert [name[-4:] for name in names] == [" (x)", " (y)"] and all(len(name) == 80 for name in names)


def test_logging_settings_name_groups_only_if_no_other_differs():
    groups = [{"data.batch_size": "1", "optim.lr": "0.1", "log.every": "1st"},
              {"data.batch_size": "1", "optim.lr": "0.2", "log.every": "2st"},
              {"data.batch_size": "2", "optim.lr": "0.2", "log.every": "2st"}]  # fmt: skip
    assert name_groups(groups, ["x", "y", "z"]) == ["batch 1, lr 0.1", "batch 1, lr 0.2", "batch 2, lr 0.2"]


def test_a_group_with_its_length_in_steps_is_named_after_it():
    groups = [{"train.epochs": "2.0", "train.steps": "auto"}, {"train.epochs": "auto", "train.steps": "14"},
              {"train.epochs": "3.0", "train.steps": "auto"}]  # fmt: skip
    assert name_groups(groups, ["x", "y", "z"]) == ["train.epochs=2.0", "train.steps=14", "train.epochs=3.0"]


def test_two_groups_with_lengths_in_steps_are_named_after_them():
    groups = [{"train.epochs": "2.0", "train.steps": "auto"}, {"train.epochs": "auto", "train.steps": "14"},
              {"train.epochs": "auto", "train.steps": "28"}]  # fmt: skip
    assert name_groups(groups, ["x", "y", "z"]) == ["train.epochs=2.0", "train.steps=14", "train.steps=28"]
