"""What readers of the documentation have, made once: a home with images, weights and runs, a shell, and the site."""

import fcntl
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ..conftest import clean_environ
from .commands import ROOT
from .typing_shell import TypingShell, open_shell

STAMP = "20261121-101500"
SHORT = ("model.width=0.05", "log.tensorboard=off", "log.every=1st", "measure.warmup_steps=1", "data.workers=0")
FOLDER = (
    *("folder", "model.name=resnet18_cifar", *SHORT, "data.image_size=16", "data.batch_size=4", "train.steps=4"),
    *("schedule.warmup=0ep", "checkpoint.every=2st"),
)
CLASSES = ("cat", "dog", "fish")
IMAGES_PER_CLASS = {"train": 90, "val": 4}
"""Images per class; a batch of the recipe `folder` has 256."""
LADDER = """\
# Two ways.
recipe: digits
steps: 2
warmup_steps: 1
repeats: 1
rungs:
  - {name: as it is, set: {log.every: 1st, log.tensorboard: "off", data.workers: 0}}
  - {name: loop, set: {optim.implementation: loop}}
"""
NETS = """\
from torch import nn


def Mixer(num_classes, in_channels, width=8):
    return nn.Sequential(nn.Conv2d(in_channels, width, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(width, num_classes))
"""
POINTS = "ranks,nodes,rank_batch,images,time_s\n1,1,128,353.2,1\n2,1,128,637.4,1\n4,1,128,1207.5,1\n"
"""Points as `paceline scale` writes them, with images per second."""
TIMES = "ranks,nodes,rank_batch,images,time_s\n4,1,128,1281167,1180\n8,2,128,1281167,601\n16,4,128,1281167,310\n"
BUILD_S = 20
"""Seconds that a build of the site may take, so that it stays acceptable."""
COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = f"""\
from pathlib import Path
import safetensors.torch, timm, torch, torchvision
for name, number in (("resnet18", "f37072fd"), ("resnet50", "11ad3fa6")):
    torch.save(getattr(torchvision.models, name)().state_dict(), f"{{name}}-{{number}}.pth")
for name in ("tf_efficientnet_lite0", "resnet18"):
    model = timm.create_model(name)
    repository = "models--" + model.pretrained_cfg["hf_hub_id"].replace("/", "--")
    fetched = Path.home() / ".cache" / "huggingface" / "hub" / repository
    for path in (fetched / "refs", fetched / "snapshots" / "{COMMIT}"):
        path.mkdir(parents=True)
    (fetched / "refs" / "main").write_text("{COMMIT}")
    safetensors.torch.save_file(model.state_dict(), path / "model.safetensors")
safetensors.torch.save_file(model.state_dict(), "resnet18.safetensors")
"""
"""A script that writes random weights: files of torchvision's, and those that timm would download from the Hub."""
LEFT = {
    "<run>": (f"runs/folder-{STAMP}", f"runs/folder-{STAMP}-2", f"runs/folder-{STAMP}-3"),
    "<profile>": (f"runs/profile-digits-{STAMP}",),
    "<ladder>": (f"runs/ladder-two-{STAMP}",),
    "<study>": (f"runs/scale-digits-{STAMP}",),
}
"""Values of the placeholders in a line, in order; folders relative to a page's own."""
DISKS = {"/shared/": "~/", "/data/": "~/", "/slow/": "./"}
"""Disks of a reader's machine, and their replacements."""


@pytest.fixture(scope="session")
def shell(forking) -> Iterator[TypingShell]:
    """Return a shell that types commands as a reader does."""
    with tempfile.TemporaryDirectory(prefix="docs") as folder, open_shell(forking, Path(folder)) as shell:
        yield shell


@pytest.fixture(scope="session")
def home(shell: TypingShell, tmp_path_factory) -> Path:
    """Return a home directory with images and weights, and in `work/` the files that pages expect in their folder."""
    home = tmp_path_factory.mktemp("home")
    draws = np.random.default_rng(0)
    for name in ("photos", "other-photos"):
        write_images(home / name, draws)
    write_cifar(home / ".cache" / "paceline" / "data", draws)
    write_fashion(home / ".cache" / "paceline" / "data", draws)
    for name in ("cifar10", "data"):
        (home / name).symlink_to(home / ".cache" / "paceline" / "data")
    cat = home / "photos" / "val" / "cat" / "0.jpg"
    (home / "photos" / "holidays").mkdir()
    shutil.copy(cat, home / "photos" / "holidays" / "beach.jpg")
    work = home / "work"
    (work / "mypkg").mkdir(parents=True)
    for name, text in {"mypkg/nets.py": NETS, "times.csv": TIMES, "two.yaml": LADDER, "last-week": ""}.items():
        (work / name).write_text(text)
    os.utime(work / "last-week", (0, 0))
    (study,) = LEFT["<study>"]
    (work / study).mkdir(parents=True)
    (work / study / "points.csv").write_text(POINTS)
    for name in ("benchmarks", "examples"):
        (work / name).symlink_to(ROOT / name)
    shutil.copy(cat, work / "cat.jpg")
    write_list(work / "train_data.pkl", home / "photos" / "train")
    write_archive(work / "ILSVRC2012_img_train.tar", home / "photos" / "train")
    Image.new("L", (8, 8)).save(work / "seven.png")
    (home / "weights.py").write_text(WEIGHTS)
    first, *_ = setup_commands()
    type_each(shell, home, ["python ../weights.py", first])
    for weights in work.glob("*.pth"):
        (work / weights.name).replace(home / weights.name)
        (work / weights.name).symlink_to(home / weights.name)
    return home


@pytest.fixture(scope="session")
def home_with_all(shell: TypingShell, home: Path) -> Path:
    """Return the home directory after it got what only pages of `make test-long` name: experiments and more runs."""
    _, *others = setup_commands()
    type_each(shell, home, others)
    return home


def type_each(shell: TypingShell, home: Path, commands: Sequence[str]) -> None:
    """Type commands in `work/`, each with the shell's time limit."""
    for command in commands:
        completed = shell.types(command, home / "work", environ_of(home))
        assert completed.returncode == 0, f"{command}\n{completed.stdout}"


def setup_commands() -> Iterator[str]:
    """Yield the commands that create the values of the placeholders, the first `<run>` first."""
    folder, digits = " ".join(FOLDER), " ".join(("digits", *SHORT))
    for number, run in enumerate(LEFT["<run>"], 1):
        yield f"paceline train {folder} data.source.root=~/photos optim.lr=0.0{number} --run-dir {run}"
    yield f"paceline train {digits} train.steps=2 --run-dir runs/digits-{STAMP}"
    yield f"paceline profile {digits} --no-probes --steps 4 --run-dir {LEFT['<profile>'][0]}"
    yield f"paceline ladder two.yaml model.width=0.05 --run-dir {LEFT['<ladder>'][0]}"


@pytest.fixture
def folder(request: pytest.FixtureRequest, home: Path, tmp_path: Path) -> Path:
    """Return a folder for one page, as of a reader who has trained before."""
    if request.node.get_closest_marker("long"):
        request.getfixturevalue("home_with_all")
    return Path(shutil.copytree(home / "work", tmp_path / "work", symlinks=True))


@pytest.fixture
def environ(home: Path) -> Iterator[dict[str, str]]:
    """Return the variables of a reader's shell; what a page writes to ~/.config is removed afterwards."""
    yield environ_of(home)
    shutil.rmtree(home / ".config", ignore_errors=True)


def environ_of(home: Path) -> dict[str, str]:
    own = {
        "HOME": str(home),
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "120",
        "WANDB_MODE": "offline",
        "HF_HOME": str(home / ".cache" / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    paths = [os.curdir, *filter(None, [os.environ.get("PYTHONPATH")])]
    return clean_environ({**own, "PYTHONPATH": os.pathsep.join(paths)})


@pytest.fixture
def filled(home: Path) -> Callable[[str], str]:
    """Return a function from text of a page to what its reader types."""

    def fill(text: str) -> str:
        lines = text.splitlines(keepends=True)
        return "".join(map(fill_line, lines))

    def fill_line(line: str) -> str:
        for placeholder, folders in LEFT.items():
            for each in folders:
                line = line.replace(placeholder, each, 1)
            line = line.replace(placeholder, folders[-1])
        for disk, place in DISKS.items():
            line = re.sub(rf"(?<=[= ]){disk}", place.replace("~", str(home)), line)
        return line

    return fill


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """Return the folder of the site, as by `make docs`, built once for all workers of pytest-xdist."""
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason=f"{package} is not installed (pip install 'paceline[docs]')")
    top = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        top = top.parent
    folder, marker = top / "site", top / "site.complete"
    with (top / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not marker.exists():
            build_site(folder)
            marker.touch()
    return folder


def build_site(folder: Path) -> None:
    # Not with --quiet, which would not count warnings; each warning is an error.
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # a notice of the theme about the next version of MkDocs
    completed = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=10 * BUILD_S)
    assert completed.returncode == 0, completed.stderr
    assert "WARNING" not in completed.stderr, completed.stderr


class Quiet(SimpleHTTPRequestHandler):
    """A file server without log messages."""

    def log_message(self, *words: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    """Return the address of a local server of the site."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
    thread.join(timeout=10)


def write_images(root: Path, draws: np.random.Generator) -> None:
    """Write a few small noise images per class, for training and for validation."""
    for split, number in IMAGES_PER_CLASS.items():
        for place, name in enumerate(CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for each in range(number):
                pixels = draws.integers(0, 128, (40, 48, 3)) + 60 * place
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{each}.jpg")


def write_list(path: Path, folder: Path) -> None:
    """Write the images of each class of `folder` as JSC's course lists them: a pickled dict from path to label."""
    classes = sorted(folder.iterdir())
    path.write_bytes(pickle.dumps({str(each): label for label, of in enumerate(classes) for each in of.iterdir()}))


def write_archive(path: Path, folder: Path) -> None:
    """Write a few images per class of `folder` like ImageNet's training set: a tar with one tar per class."""
    with tarfile.open(path, "w") as archive:
        for each in sorted(folder.iterdir()):
            of_class = path.with_name(f"{each.name}.tar")
            with tarfile.open(of_class, "w") as inner:
                for number in range(4):
                    inner.add(each / f"{number}.jpg", f"{each.name}_{number}.JPEG")
            archive.add(of_class, of_class.name)
            of_class.unlink()


def write_cifar(root: Path, draws: np.random.Generator) -> None:
    """Write a hundredth of CIFAR-10 and CIFAR-100 in their original formats."""

    def write(path: str, **values: object) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(pickle.dumps(values, protocol=2))

    def images(number: int) -> np.ndarray:
        return draws.integers(0, 256, (number, 3072), dtype=np.uint8)

    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        write(f"cifar-10-batches-py/{name}", data=images(100), labels=[*range(10)] * 10)
    write("cifar-10-batches-py/batches.meta", label_names=[f"class {number}" for number in range(10)])
    for name, number in {"train": 500, "test": 100}.items():
        write(f"cifar-100-python/{name}", data=images(number), fine_labels=[*range(100)] * (number // 100))
    write("cifar-100-python/meta", fine_label_names=[f"class {number}" for number in range(100)])


def write_fashion(root: Path, draws: np.random.Generator) -> None:
    """Write a hundredth of Fashion-MNIST in its original format, but uncompressed."""
    for split, number in {"train": 600, "t10k": 100}.items():
        pixels = draws.integers(0, 256, (number, 28, 28), dtype=np.uint8)
        for kind, values in {"images": pixels, "labels": np.arange(number, dtype=np.uint8) % 10}.items():
            header = struct.pack(f">{1 + values.ndim}I", 0x800 | values.ndim, *values.shape)
            (root / f"{split}-{kind}-idx{values.ndim}-ubyte").write_bytes(header + values.tobytes())
