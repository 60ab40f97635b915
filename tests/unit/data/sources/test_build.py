"""Each kind of source in a recipe gives two splits that agree, without torch."""

import io
import subprocess
import sys
import tarfile

import numpy as np
import pytest
from pydantic import TypeAdapter

from paceline.data.convert.lmdb_writer import write_lmdb
from paceline.data.sources.build import build_datasets, build_validation
from paceline.recipe.schema.source import SourceSection


def section(**fields):
    return TypeAdapter(SourceSection).validate_python(fields)


@pytest.fixture
def sections(make_images, tmp_path):
    root = make_images({"train/cat": 2, "train/dog": 2, "val/cat": 1})
    for name, row in (("train", "train/cat/0.png,cat"), ("val", "val/cat/0.png,cat")):
        (tmp_path / f"{name}.csv").write_text(f"path,label\n{row}\n")
    return [
        section(name="digits"),
        section(name="synthetic", num_images=10, num_val_images=5),
        section(name="folder", root=str(root)),
        section(name="manifest", train=f"{root}/train.csv", val=f"{root}/val.csv"),
    ]


def test_both_splits_agree_with_their_info(sections):
    for chosen in sections:
        data = build_datasets(chosen, may_download=False)
        for split in ("train", "val"):
            source = getattr(data, split)
            assert (source.info.name, source.info.split, source.info.num_images) == (chosen.name, split, len(source))
            assert len(source.info.mean) == len(source.info.std) == source.info.channels
            assert 0 <= source.read(0)[1] < source.info.num_classes
            assert source.name_of(0)
        assert data.train.info.class_names == data.val.info.class_names


def test_the_validation_split_alone_is_the_same_images(sections, make_images, tmp_path):
    split = section(
        name="folder", root=str(make_images({"cat": 4, "dog": 4}, top=tmp_path / "split")), val_fraction=0.5
    )
    for chosen in (*sections, split):
        whole, alone = build_datasets(chosen, may_download=False).val, build_validation(chosen)
        assert (len(alone), alone.info.split, alone.info.channels) == (len(whole), "val", whole.info.channels)
        assert len(whole) > 0
        for index in range(len(whole)):
            assert np.array_equal(alone.read(index)[0], whole.read(index)[0])


def test_the_validation_split_needs_no_scan_of_training_images(make_images):
    root = make_images({"val/cat": 2})
    found = build_validation(section(name="folder", train_root=f"{root}/gone", val_root=f"{root}/val"))
    assert len(found) == 2


def test_a_pack_section_opens_a_pack(sections, tmp_path):
    folder = build_datasets(sections[2], may_download=False)
    pytest.importorskip("lmdb", reason="an LMDB is written by the package lmdb: pip install lmdb")
    write_lmdb(folder, tmp_path / "kept", lambda done, total: None)
    lmdb = build_datasets(section(name="lmdb", root=str(tmp_path / "kept")), may_download=False)
    tar = tmp_path / "t.tar"
    with tarfile.open(tar, "w") as file:
        for index in range(len(folder.train)):
            content, label = folder.train.read(index)
            for extension, data in (("cls", b"%d" % label), ("png", content)):
                member = tarfile.TarInfo(f"{index}.{extension}")
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))
    tars = build_datasets(section(name="webdataset", train=str(tar), val=str(tar)), may_download=False)
    for source in (lmdb.train, tars.train):
        samples = [source.read(index) for index in range(len(source))]
        assert samples == [folder.train.read(index) for index in range(len(folder.train))]


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fashion_mnist"])
def test_nothing_is_downloaded_without_permission(name, tmp_path, error_message):
    message = error_message(build_datasets, section(name=name, root=str(tmp_path)), may_download=False)
    assert message.startswith(f"data.source.root: {tmp_path} has no ")
    assert list(tmp_path.iterdir()) == []


def test_no_source_needs_torch_before_it_downloads():
    program = (
        "import sys; import paceline.data.sources.build, paceline.data.decode;"
        "print(sorted({'torch', 'torchvision', 'sklearn', 'scipy', 'lmdb', 'datasets', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
