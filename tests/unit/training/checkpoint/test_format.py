"""The files of a checkpoint: damage found and named, nothing unpickled, no link or pipe followed."""

import hashlib
import json
import os
import pickle
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from paceline.core.errors import CheckpointError
from paceline.training.checkpoint import (
    CheckpointStorage,
    KeepPolicy,
    Snapshot,
    load_model,
    load_tensor_group,
    read_state,
    verify_checkpoint,
)
from paceline.training.checkpoint.format import CHUNK_BYTES, find_damage, safetensors_chunks, write_hashed_file

FILES = ["model.safetensors", "optimizer.safetensors", "average.safetensors", "state.json", "manifest.json"]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a checkpoint of all kinds of files."""
    parts = {
        "model": net().state_dict(),
        "optimizer": {"0.m": torch.randn(4, 3, 3, 3)},
        "average": {"a": torch.ones(3)},
    }
    return CheckpointStorage(tmp_path / "run", KeepPolicy(3)).save(1, 1, Snapshot(parts, {"train": {"hits": 1}}))


def sign(path: Path) -> None:
    """Make the manifest vouch for the files that are there, as somebody who means harm would."""
    names = [each.name for each in path.iterdir() if each.name != "manifest.json"]
    digests = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in names}
    (path / "manifest.json").write_text(json.dumps(digests))


def odd_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    tensors = {str(dtype): torch.randn(3, 5).to(dtype) for dtype in floats}
    tensors |= {str(dtype): torch.arange(7).to(dtype) for dtype in (torch.int64, torch.int32, torch.int16, torch.int8)}
    return tensors | {
        "bytes": torch.arange(5, dtype=torch.uint8),
        "truths": torch.tensor([True, False, True]),
        "one number": torch.tensor(7),
        "nothing": torch.empty(0, 3),
        'a "quoted" näme\n': torch.ones(1),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "every other": torch.randn(10)[::2],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "several chunks": torch.randn(2 * CHUNK_BYTES // 4 + 3),
        "trained": nn.Parameter(torch.randn(2)),
    }


def test_the_library_reads_every_type_and_layout_back(tmp_path: Path) -> None:
    tensors = odd_tensors()
    digest = write_hashed_file(tmp_path / "x", safetensors_chunks(tensors))
    loaded = load_file(tmp_path / "x")
    assert loaded.keys() == tensors.keys()
    assert [name for name in tensors if not torch.equal(loaded[name], tensors[name])] == []
    assert [name for name in tensors if loaded[name].dtype != tensors[name].dtype] == []
    assert digest == hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest()


def test_no_tensors_are_a_file_too(tmp_path: Path) -> None:
    write_hashed_file(tmp_path / "x", safetensors_chunks({}))
    assert load_file(tmp_path / "x") == {}


def test_a_type_that_cannot_be_saved_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"^a: torch.complex64 cannot be saved \(convert it to float64, "):
        list(safetensors_chunks({"a": torch.ones(1, dtype=torch.complex64)}))


def test_what_is_there_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    for name in ("victim", "link"):
        with pytest.raises(FileExistsError):
            write_hashed_file(tmp_path / name, [b"yours"])
    assert (tmp_path / "victim").read_text() == "mine"


def test_values_and_further_parts_come_back(path: Path) -> None:
    assert read_state(path) == {"format_version": 2, "train": {"hits": 1}}
    assert torch.equal(load_tensor_group(path, "average")["a"], torch.ones(3))
    assert load_tensor_group(path, "precision") == {}
    verify_checkpoint(path)


# matrix: 34
def test_what_a_checkpoint_holds_is_plain_text_and_numbers(path: Path) -> None:
    """No file of it is a pickle or an archive of one: each is JSON, or safetensors, whose header is JSON."""
    assert sorted(each.name for each in path.iterdir()) == sorted(FILES)
    for each in path.iterdir():
        content = each.read_bytes()
        if each.suffix == ".safetensors":
            length = int.from_bytes(content[:8], "little")
            ends = [value["data_offsets"][1] for value in json.loads(content[8 : 8 + length]).values()]
            assert 8 + length + max(ends) == len(content)
        else:
            json.loads(content)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "gone"])
def test_damage_to_any_file_is_found_and_named(path: Path, name: str, damage: str) -> None:
    file = path / name
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "gone":
        file.unlink()
    else:
        file.write_bytes(content[:-1] if damage == "cut" and name != "manifest.json" else b"")
    with pytest.raises(CheckpointError) as caught:
        load_model(path, net())
    # A flipped manifest blames the file whose digest it has wrong; either way it is this checkpoint that is refused.
    assert (name in str(caught.value) or name == "manifest.json") and path.name in str(caught.value)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 4


# matrix: 28
def test_one_flipped_bit_anywhere_is_found(path: Path) -> None:
    files = sorted(path.iterdir())
    whole = {file: file.read_bytes() for file in files}
    missed = []
    for seed in range(200):
        draw = random.Random(seed)
        file = draw.choice(files)
        content = bytearray(whole[file])
        place, bit = draw.randrange(len(content)), draw.randrange(8)
        content[place] ^= 1 << bit
        file.write_bytes(content)
        if not find_damage(path):
            missed.append((seed, file.name, place, bit))
        file.write_bytes(whole[file])
    assert missed == [] and find_damage(path) == ""


# matrix: 28
@pytest.mark.parametrize("part", ["model", "optimizer", "average"])
def test_a_page_of_zeros_is_found(tmp_path: Path, part: str) -> None:
    tensors = {name: {"a": torch.randn(5000)} for name in ("model", "optimizer", "average")}
    path = CheckpointStorage(tmp_path, KeepPolicy(1)).save(1, 1, Snapshot(tensors, {}))
    file = path / f"{part}.safetensors"
    content = bytearray(file.read_bytes())
    content[8192 : 8192 + 4096] = bytes(4096)
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{part}.safetensors: is damaged"):
        verify_checkpoint(path)


def test_a_manifest_that_lists_nothing_vouches_for_nothing(path: Path) -> None:
    for text in ("{}", "[]", "null", '"model.safetensors"'):
        (path / "manifest.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"manifest.json does not list"):
            verify_checkpoint(path)


def test_tensors_that_the_manifest_does_not_list_are_refused(path: Path) -> None:
    (path / "precision.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"does not list precision.safetensors"):
        verify_checkpoint(path)


@pytest.mark.parametrize("name", ["../../secret", "/dev/zero", "sub/model.safetensors", "manifest.json", "a\nb"])
def test_a_manifest_reaches_no_file_outside_the_checkpoint(path: Path, name: str) -> None:
    digests = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**digests, name: "0" * 64}))
    with pytest.raises(CheckpointError, match=r"which is no file of a checkpoint") as caught:
        verify_checkpoint(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["link", "dangling link", "link to a device", "pipe", "folder"])
def test_only_plain_files_are_read(path: Path, tmp_path: Path, name: str, kind: str) -> None:
    """A pipe nobody writes to would be waited for, and a device read, for ever."""
    file, elsewhere = path / name, tmp_path / "elsewhere"
    if kind == "link":
        elsewhere.write_bytes(file.read_bytes())
    file.unlink()
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "link to a device":
            file.symlink_to("/dev/zero")
        case _:
            file.symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        verify_checkpoint(path)
    assert name in str(caught.value) and "\n" not in str(caught.value)
    if file.suffix == ".safetensors":
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_tensor_group(path, file.stem)
    elif name == "state.json":
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_state(path)


class Evil:
    """What runs a command when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.canary,)


def put_evil(file: Path, kind: str, canary: Path) -> None:
    if kind == "pickle":
        file.write_bytes(pickle.dumps(Evil(canary)))
    else:
        torch.save({"a": Evil(canary)}, file)


def test_the_evil_pickle_would_run(tmp_path: Path) -> None:
    put_evil(tmp_path / "file", "pickle", tmp_path / "canary")
    pickle.loads((tmp_path / "file").read_bytes())
    assert (tmp_path / "canary").exists()


# matrix: 33
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["pickle", "torch.save"])
def test_a_pickle_in_place_of_any_file_is_refused_and_not_run(path: Path, tmp_path: Path, name: str, kind: str) -> None:
    put_evil(path / name, kind, tmp_path / "canary")
    with pytest.raises(CheckpointError, match=r"cannot be read|is damaged") as caught:
        load_model(path, net())
    assert "\n" not in str(caught.value) and not (tmp_path / "canary").exists()


# matrix: 33
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "average.safetensors", "state.json"])
@pytest.mark.parametrize("kind", ["pickle", "torch.save"])
def test_a_pickle_that_the_manifest_vouches_for_is_refused_and_not_run(
    path: Path, tmp_path: Path, name: str, kind: str
) -> None:
    put_evil(path / name, kind, tmp_path / "canary")
    sign(path)
    verify_checkpoint(path)
    with pytest.raises(CheckpointError, match=f"{name}: cannot be read") as caught:
        read_state(path) if name == "state.json" else load_tensor_group(path, Path(name).stem)
    assert "\n" not in str(caught.value) and not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"\xff\xfe", "not JSON"),
        (b"[" * 1_000_000, "not JSON: it is nested too deeply"),
        (b'{"format_version": 2', "not JSON"),
        (b"", "not JSON"),
    ],
    ids=["no utf-8", "deep", "cut", "empty"],
)
def test_what_is_no_json_is_refused_in_one_line(path: Path, text: bytes, why: str) -> None:
    (path / "state.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=rf"state.json: cannot be read: state.json is {why}") as caught:
        read_state(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("version", "fix"), [(99, "update paceline"), (1, "train it again"), (None, "train it again")])
def test_another_format_is_refused(path: Path, version: int | None, fix: str) -> None:
    (path / "state.json").write_text(json.dumps({"format_version": version}))
    with pytest.raises(CheckpointError, match=rf"has format {version}, this paceline reads 2 \({fix}\)"):
        read_state(path)
