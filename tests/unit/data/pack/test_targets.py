"""Packs of images with several labels: the same targets as their source, and refused by readers of version 1."""

import base64
import json
import zlib
from dataclasses import replace

import numpy as np
import pytest

from paceline.core.dataset import ArraySource, Datasets, TargetTable
from paceline.core.errors import DataError
from paceline.data.convert.lmdb_writer import write_lmdb
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.convert.unpack import unpack
from paceline.data.convert.verify_pack import compare_pack
from paceline.data.pack.format import PackMeta
from paceline.data.pack.reader import open_pack
from paceline.data.pack.targets import decode_targets, encode_targets
from paceline.data.sources.builtin import load_digits
from paceline.data.sources.fingerprint import digest_datasets

ROWS = np.random.default_rng(0).random((30, 10)).astype(np.float32)


@pytest.fixture
def soft_digits():
    """Digits whose label is one of 30 rows, 20 in the table of the validation split: more rows than classes."""
    digits = load_digits()

    def soft(source, rows):
        labels = np.arange(len(source)) % len(rows)
        return ArraySource(replace(source.info, targets=TargetTable(rows)), source.images, labels)

    return Datasets(soft(digits.train, ROWS), soft(digits.val, ROWS[:20]))


@pytest.mark.parametrize("shard_bytes", [None, 1 << 20])
def test_a_pack_has_the_targets_of_its_source(soft_digits, tmp_path, shard_bytes):
    out = tmp_path / "out.pack"
    write_pack(soft_digits, out, PackOptions(shard_bytes=shard_bytes), lambda done, total: None, 1)
    packed = open_pack(out)
    for one, two in ((soft_digits.train, packed.train), (soft_digits.val, packed.val)):
        assert np.array_equal(one.info.targets.rows, two.info.targets.rows)
        assert np.array_equal(one.labels, two.labels)
    assert digest_datasets(packed) == digest_datasets(soft_digits) != digest_datasets(load_digits())
    assert compare_pack(soft_digits, packed, lambda done, total: None, 1).images == 1797
    index = out / "index.pack" if shard_bytes else out
    assert index.read_bytes()[8:10] == b"\2\0", "version 2, which older readers refuse"
    with pytest.raises(DataError, match=r"class folders cannot hold \(keep the pack\)"):
        unpack(packed, tmp_path / "folder", lambda done, total: None, 1)
    with pytest.raises(DataError, match=f"{tmp_path}/lmdb: .*leave out --format lmdb"):
        write_lmdb(soft_digits, tmp_path / "lmdb", lambda done, total: None)


def test_targets_that_no_pack_holds_are_refused_before_images_are_read(tmp_path):
    digits, done = load_digits(), []
    table = TargetTable(np.random.default_rng(0).random((1 << 18, 10)).astype(np.float32))
    train = ArraySource(replace(digits.train.info, targets=table), digits.train.images, digits.train.labels)
    with pytest.raises(DataError, match=r"targets are .* more than a pack holds .*use the source without packing"):
        write_pack(Datasets(train, digits.val), tmp_path / "out.pack", PackOptions(), lambda *at: done.append(at), 1)
    assert not done and not list(tmp_path.iterdir())


def test_a_pack_of_classes_stays_version_1(tmp_path):
    write_pack(load_digits(), tmp_path / "out.pack", PackOptions(), lambda done, total: None, 1)
    content = (tmp_path / "out.pack").read_bytes()
    assert content[8:10] == b"\1\0" and b'"targets"' not in content


@pytest.mark.parametrize(
    "text",
    [
        "no base64",
        base64.b64encode(b"no zlib").decode(),
        base64.b64encode(zlib.compress(b"")).decode(),
        base64.b64encode(zlib.compress(bytes(44))).decode(),
        encode_targets(TargetTable(ROWS + 1)),
        encode_targets(TargetTable(np.full((1, 10), np.nan, np.float32))),
    ],
)
def test_a_damaged_table_is_refused(text, soft_digits):
    with pytest.raises(ValueError, match="table of targets"):
        decode_targets(text, 10)
    split = {"name": "x", "mean": [0.5], "std": [1], "digest": "0" * 64}
    meta = {"class_names": list("0123456789"), "channels": 1, "made": {"every": 0}, "train": {**split, "targets": text}}
    with pytest.raises(DataError, match="x: the metadata in its index is damaged"):
        PackMeta.from_json(json.dumps({**meta, "val": split}).encode(), "x")
