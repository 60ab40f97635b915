"""The settings of runs: how they are read, which differ, and what groups are called after them."""

import pytest

from paceline.report.compare.settings import called, differing, read_settings


def test_settings_are_read_by_dotted_path_as_the_recipe_has_them():
    text = "seed: 3\ntrain:\n  compile: off\n  epochs: 1e-1\n  ema: false\naugment:\n- name: flip\nstop: {}\n"
    assert read_settings(text) == (
        {"seed": "3", "train.compile": "off", "train.epochs": "0.1", "train.ema": "false",
         "augment": '[{"name": "flip"}]', "stop": "{}"}, "",
    )  # fmt: skip


def test_what_only_one_group_has_differs():
    assert differing([{"a": "1", "b": "2"}, {"a": "1", "c": "2"}]) == ["b", "c"]


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
        ([{"train.ema": "off"}, {"train.ema.decay": "0.9"}], ["train.ema=off", "no train.ema"]),
        ([{}, {}], ["x", "y"]),
    ],
)
def test_groups_are_called_after_what_tells_them_apart(groups, names):
    assert called(groups, ["x", "y"]) == names


def test_no_more_words_are_said_than_tell_groups_apart():
    groups = [{"data.batch_size": "1", "optim.lr": "0.1", "log.every": "1st"},
              {"data.batch_size": "1", "optim.lr": "0.2", "log.every": "2st"},
              {"data.batch_size": "2", "optim.lr": "0.2", "log.every": "2st"}]  # fmt: skip
    assert called(groups, ["x", "y", "z"]) == ["batch 1, lr 0.1", "batch 1, lr 0.2", "batch 2, lr 0.2"]
