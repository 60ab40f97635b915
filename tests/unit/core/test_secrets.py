"""Secrets of a command line."""

import pytest

from paceline.core.secrets import mask_secrets


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("train.py --api-key abc --lr 0.1", "train.py --api-key *** --lr 0.1"),
        ("train.py --hftoken=abc wandb.key=abc", "train.py --hftoken=*** wandb.key=***"),
        ("train.py --token -abc --amp", "train.py --token *** --amp"),
        ("train.py --auth --amp", "train.py --auth --amp"),
        ("train.py --tokenizer bpe --keys 3 --author me", "train.py --tokenizer bpe --keys 3 --author me"),
    ],
)
def test_values_of_secrets_are_masked(command, expected):
    assert " ".join(mask_secrets(command.split())) == expected
