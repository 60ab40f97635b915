"""The inputs that `fuzz.py` starts from, whole ones of every kind that paceline reads, and what reads each kind."""

import csv
import gzip
import hashlib
import io
import json
import pickle
import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from fuzz_packs import packs, read_pack, read_record, records
from PIL import Image
from safetensors.torch import save as safetensors

from paceline.core.dataset import ArraySource, DatasetInfo, Datasets
from paceline.core.errors import DataError, PacelineError
from paceline.core.results import EvalResult, RunResult, StageResult, ThroughputResult, TimeResult
from paceline.core.run_dir import RunDir, read_lines
from paceline.data.convert.lmdb_writer import write_lmdb
from paceline.data.decode import decode
from paceline.data.sources.cifar import read_cifar_batch, read_cifar_class_names
from paceline.data.sources.fashion_mnist import read_idx
from paceline.data.sources.folder import load_folder
from paceline.data.sources.lmdb import open_lmdb
from paceline.data.sources.manifest import load_manifest
from paceline.data.sources.webdataset import load_webdataset
from paceline.models.pretrained import load_weights
from paceline.parallel.environ import world_from_environ
from paceline.parallel.strategy import SingleDevice
from paceline.recipe.load import PRESETS, Patch, load
from paceline.recipe.schema.optim import Adam, Plateau
from paceline.recipe.schema.source import Folder, Manifest, WebDataset
from paceline.recipe.schema.train import Ema
from paceline.training.checkpoint import CheckpointStorage, KeepPolicy, load_model
from paceline.training.ema import build_weight_average
from paceline.training.goodput import read_attempts
from paceline.training.lr_schedule import build_lr_schedule
from paceline.training.optim.build import build_optimizer
from paceline.training.optim.extra_state import ExtraOptimizerState
from paceline.training.precision import build_precision
from paceline.training.saver import TrainingState
from paceline.training.state import TrainState

STEP = "step-00000007"


@dataclass(frozen=True)
class Target:
    """A kind of input: whole examples of each of its files by name, and what reads them from a folder."""

    name: str
    examples: dict[str, list[bytes]]
    read: Callable[[Path], object]


def build_targets(scratch: Path) -> list[Target]:
    """Return every kind of input; examples that only a program can write are written to `scratch` first."""
    checkpoint = _checkpoint(scratch)
    packed = {"a.pack": packs(scratch, _images())}
    weights = torch.nn.Linear(3, 2).state_dict()
    torch.save(weights, scratch / "weights.pth")
    pth = (scratch / "weights.pth").read_bytes()
    recipes = [path.read_bytes() for path in sorted(PRESETS.rglob("*.yaml"))]
    grey = np.arange(3 * 28 * 28, dtype=np.uint64).astype(np.uint8)
    idx = struct.pack(">4I", 0x0803, 3, 28, 28) + grey.tobytes()
    return [
        Target("recipe", {"r.yaml": recipes}, lambda folder: load(str(folder / "r.yaml"))),
        Target("override", {"words": _OVERRIDES}, _override),
        Target("csv manifest", {"train.csv": [_CSV], "val.csv": [_CSV]}, lambda folder: _manifest(folder, "csv")),
        Target("pkl manifest", {"train.pkl": [_PKL], "val.pkl": [_PKL]}, lambda folder: _manifest(folder, "pkl")),
        Target("checkpoint", checkpoint, lambda folder: _resume(folder, repair=False)),
        Target("mended checkpoint", checkpoint, lambda folder: _resume(folder, repair=True)),
        Target("run directory", _run_directory(), _run_files),
        Target("image", {"image": _images()}, _image),
        Target("cifar", {"batch": [_batch(2), _batch(5)], "meta": [_META]}, _cifar),
        Target("idx", {"idx.gz": [gzip.compress(idx, 1)], "idx": [idx]}, _idx),
        Target("weights", {"w.pth": [pth], "w.safetensors": [safetensors(weights)]}, _weights),
        Target("pack", packed, lambda folder: read_pack(folder, _read_all, repair=False)),
        Target("mended pack", packed, lambda folder: read_pack(folder, _read_all, repair=True)),
        Target("record", {"record": records(scratch, packed["a.pack"][0])}, read_record),
        Target("lmdb", {"data.mdb": _lmdbs(scratch)}, _lmdb),
        Target("tar", {"a.tar": _tars()}, lambda folder: _tar(folder, repair=False)),
        Target("mended tar", {"a.tar": _tars()}, lambda folder: _tar(folder, repair=True)),
        Target("environment", {"environ": _ENVIRONS}, _environment),
    ]  # fmt: skip


_OVERRIDES = [
    b"optim.lr=1e-3", b"data.augment=[flip,{name: pad_crop, padding: 2}]", b"train.stop={top1: 0.5}", b"seed=1",
    b"schedule.milestones=[1ep, 50%]", b"model.name=timm:resnet18", b"checkpoint.every=10min", b"train.ema=on",
]  # fmt: skip
_CSV = b'path,label\na.png,cat\n"b,c.png",dog\nd.png,"cat"\n'
_PKL = pickle.dumps({"a.png": 0, "b,c.png": 1, "d.png": "2"}, protocol=2)
_META = pickle.dumps({"label_names": ["a", "b"]}, protocol=2)
_ENVIRONS = [
    b"RANK=1\nWORLD_SIZE=4\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2\nMASTER_ADDR=127.0.0.1\nMASTER_PORT=29500\n",
    b"SLURM_PROCID=3\nSLURM_STEP_NUM_TASKS=6\nSLURM_STEP_NODELIST=n[01-03,7],login\nSLURM_STEP_TASKS_PER_NODE=2(x2),1\n"
    b"SLURM_JOB_ID=12\nSLURM_LOCALID=1\nSLURM_NODEID=1\nSLURM_RESTART_COUNT=0\n",
]


def _override(folder: Path) -> None:
    arguments = (folder / "words").read_bytes().decode("utf-8", "surrogateescape")
    load("digits", Patch.parse([arguments]))


def _manifest(folder: Path, kind: str) -> None:
    for name in ("a.png", "b,c.png", "d.png"):
        (folder / name).write_bytes(b"x")
    load_manifest(Manifest(train=str(folder / f"train.{kind}"), val=str(folder / f"val.{kind}")))


def _persistent() -> TrainingState:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3))
    precision = build_precision("bf16_master", torch.device("cpu"))
    precision.cast_model(model)
    named = precision.optimized_parameters(model)
    optimizer = build_optimizer(Adam(), named, "cpu")
    plan = SimpleNamespace(peak_lr=0.1, steps=lambda duration: 0)
    average = build_weight_average(Ema(), model, optimizer, named)
    extra_state = ExtraOptimizerState.from_optimizer(optimizer, "adam")
    schedule = build_lr_schedule(Plateau(), plan)
    return TrainingState(model, optimizer, schedule, precision, average, SingleDevice(), extra_state)


def _checkpoint(scratch: Path) -> dict[str, list[bytes]]:
    """Return the files of a checkpoint after one step of a small model with every kind of state."""
    persistent = _persistent()
    for group in persistent.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    persistent.optimizer.step()
    persistent.average.update(0)
    evaluation = EvalResult(images=9, top1=0.5, top5=1.0, loss=1.5)
    state = TrainState(step=7, images_seen=63, best=evaluation, best_step=7)
    saved = CheckpointStorage(scratch / "checkpoints", KeepPolicy(1)).save(
        7, 7, persistent.state_dict(state, {"world_size": 1})
    )
    assert saved.name == STEP
    return {path.name: [path.read_bytes()] for path in saved.iterdir()}


def _resume(folder: Path, *, repair: bool) -> None:
    """Resume from a checkpoint as a run does; with `mend` its digests are corrected first."""
    if repair:
        files = sorted(path.name for path in folder.iterdir() if path.name != "manifest.json")
        digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files}
        (folder / "manifest.json").write_text(json.dumps(digests))
    checkpoints = CheckpointStorage(folder.with_name("checkpoints-read"), KeepPolicy(1))
    checkpoints.folder.mkdir(exist_ok=True)
    link = checkpoints.folder / STEP
    folder.rename(link)
    try:
        newest = checkpoints.newest_intact(lambda warning: _one_line(warning))
        if newest is not None:
            persistent = _persistent()
            load_model(newest, persistent.model)
            persistent.load_state_dict(newest)
    finally:
        link.rename(folder)


def _one_line(warning: str) -> None:
    assert len(warning.splitlines()) == 1, warning


def _run_directory() -> dict[str, list[bytes]]:
    evaluation = EvalResult(images=359, top1=0.98, top5=1.0, loss=0.125)
    result = RunResult(
        status="completed", recipe_hash="0123456789ab", world_size=2, epochs=1.5, steps=33, images_seen=2112,
        eval=evaluation, best=evaluation,
        throughput=ThroughputResult(images_per_s=1000.5, spread=(900.0, 1100.0), n=3, excluded_s=0.5),
        time=TimeResult(wall_s=4.0, startup_s=1.0, train_s=2.0, eval_s=0.5, checkpoint_s=0.25, to_target_s=3.0),
        stages={"forward": StageResult(host_s=1.0, device_s=0.5, share=0.25)}, verdict={"bottleneck": "compute"},
        lr="0.1", weights_sha256="ab" * 32, provenance={"torch": "2.11"},
    )  # fmt: skip
    lines = b"".join(json.dumps({"step": step, "loss": 1.5 / step}).encode() + b"\n" for step in range(1, 9))
    table = io.StringIO()
    csv.writer(table).writerows([("class", "images", "correct", "accuracy"), ("a, b", 3, 2, 0.6), ("c", 0, 0, "")])
    start = {"event": "start", "number": 0, "started_s": 1.5, "startup_s": 2.0, "from_step": 0, "trained_s": 0.0}
    start |= {"world_size": 2, "host": "n1", "pid": 7}
    return {
        "result.json": [result.model_dump_json(indent=2).encode()],
        "steps.jsonl": [lines],
        "classes.csv": [table.getvalue().encode()],
        "recipe.yaml": [(PRESETS / "digits.yaml").read_bytes()],
        "attempts.jsonl": [json.dumps(start).encode() + b"\n"],
    }


def _run_files(folder: Path) -> None:
    """Read each file by itself, and raise the first refusal only when all have been read."""
    rundir, refused = RunDir(folder), []
    for read in (
        rundir.read_result,
        rundir.read_classes,
        lambda: list(read_lines(rundir.steps)),
        lambda: read_attempts(rundir.attempts),
        lambda: load(str(folder)),
    ):
        try:
            read()
        except PacelineError as error:
            refused.append(error)
    if refused:
        raise refused[0]


def _images() -> list[bytes]:
    """Return a small picture in every format and mode that is read."""
    made = []
    kinds = [
        ("JPEG", "RGB"),
        ("JPEG", "CMYK"),
        ("JPEG", "L"),
        ("PNG", "RGBA"),
        ("PNG", "P"),
        ("PNG", "I;16"),
        ("GIF", "P"),
    ]
    kinds += [
        ("BMP", "RGB"),
        ("TIFF", "RGB"),
        ("TIFF", "L"),
        ("WEBP", "RGB"),
        ("PPM", "RGB"),
        ("PPM", "L"),
        ("PPM", "1"),
    ]
    for kind, mode in kinds:
        file = io.BytesIO()
        grey = Image.effect_noise((24, 17), 60)
        image = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257) if mode == "I;16" else grey.convert(mode)
        options = {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0"} if kind in ("JPEG", "WEBP") else {}
        image.save(file, kind, **options)
        made.append(file.getvalue())
    return made


def _image(folder: Path) -> None:
    decode((folder / "image").read_bytes(), channels=3, name="x")


def _lmdbs(scratch: Path) -> list[bytes]:
    """Return an LMDB of the files that packs are made of, and one of pixels."""
    info = DatasetInfo("digits", "train", 3, ("a", "b"), 1, (4, 3), (0.5,), (0.25,))
    digits = ArraySource(info, np.arange(36, dtype=np.uint8).reshape(3, 4, 3, 1), np.array([0, 1, 0]))
    sets = (
        load_folder(Folder(root=str(scratch / "photos"))),
        Datasets(digits, replace(digits, info=replace(info, split="val"))),
    )
    made = []
    for number, datasets in enumerate(sets):
        write_lmdb(datasets, scratch / f"lmdb{number}", lambda done, total: None)
        made.append((scratch / f"lmdb{number}" / "data.mdb").read_bytes())
    return made


def _lmdb(folder: Path) -> None:
    _read_all(open_lmdb(folder / "data.mdb"))


def _tars() -> list[bytes]:
    """Return tars of three samples in each form."""
    made = []
    for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=kind) as tar:
            for stem in ("a", "d/b", "e" * 70 + "/" + "f" * (80 if kind == tarfile.USTAR_FORMAT else 200)):
                for name, content in ((f"{stem}.cls", b"1"), (f"{stem}.jpg", b"x" * 600)):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        made.append(file.getvalue().rstrip(b"\0") + bytes(1536))
    return made


def _tar(folder: Path, *, repair: bool) -> None:
    """List and read a tar; with `mend` the checksum of each block that could be a header is made to fit first."""
    path = folder / "a.tar"
    if repair:
        content = bytearray(path.read_bytes())
        for at in range(0, len(content) - 511, 512):
            if b"ustar" in content[at + 250 : at + 270]:
                content[at + 148 : at + 156] = b" " * 8
                content[at + 148 : at + 156] = b"%06o\0 " % sum(content[at : at + 512])
        path.write_bytes(content)
    _read_all(load_webdataset(WebDataset(train=str(path), val=str(path))))


def _read_all(found: Datasets) -> None:
    """Read all samples; those that are refused are refused in one line."""
    for source in (found.train, found.val):
        for index in range(len(source)):
            try:
                content, label = source.read(index)
                assert 0 <= label < source.info.num_classes and len(content) and source.name_of(index).isprintable()
            except DataError as error:
                _one_line(str(error))


def _batch(num_images: int) -> bytes:
    data = np.arange(num_images * 3072, dtype=np.uint64).astype(np.uint8).reshape(num_images, 3072)
    return pickle.dumps({"data": data, "labels": [number % 2 for number in range(num_images)]}, protocol=2)


def _cifar(folder: Path) -> None:
    read_cifar_batch(folder / "batch", labels_key="labels", num_classes=2)
    read_cifar_class_names(folder / "meta", key="label_names", num_classes=2)


def _idx(folder: Path) -> None:
    for name in ("idx.gz", "idx"):
        read_idx(folder / name, (None, 28, 28))


def _weights(folder: Path) -> None:
    for name in ("w.pth", "w.safetensors"):
        load_weights(torch.nn.Linear(3, 2), str(folder / name), "x")


def _environment(folder: Path) -> None:
    text = (folder / "environ").read_bytes().decode("utf-8", "surrogateescape")
    world_from_environ(dict(line.partition("=")[::2] for line in text.split("\n") if "=" in line))
