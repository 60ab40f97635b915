"""Make the gallery: train on this machine, render the reports, take a picture of each, and write the page.

    .venv/bin/python docs/gallery/make.py --data FOLDER              # all of it, about 15 min on two idle cores
    .venv/bin/python docs/gallery/make.py --data FOLDER digits crash # these alone
    .venv/bin/python docs/gallery/make.py --pages                    # render the reports of existing runs again

FOLDER has `cifar10` and `fashion-mnist` as the recipes read them. Runs are in build/gallery and name no place outside
of it. Pictures of CIFAR-10 are not published: its run keeps none (`log.worst=0`).
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_image

ROOT = Path(__file__).parents[2]
GALLERY = ROOT / "docs" / "gallery"
WORK = ROOT / "build" / "gallery"
PACELINE = (sys.executable, "-m", "paceline")
PHOTOGRAPHS = {"flower": "flower.jpg", "temple": "china.jpg"}
"""Photographs that come with scikit-learn (CC BY 2.0), and what they show."""
WIDTH, HEIGHT = 1040, 650
"""The part of a report in its picture, in CSS pixels."""
TINY = (
    "model.name=resnet18_cifar model.width=0.1 data.image_size=64 data.batch_size=32 train.epochs=3 schedule.warmup=0ep"
)
LADDER = "data.source.root=data/cifar10 --steps 12 --repeats 3"


@dataclass(frozen=True)
class Entry:
    """A report of the gallery: its file name, its title, a sentence, and the commands that make it.

    The first folder in `runs/` of the commands is the run whose report is shown, unless the last command writes a page.
    """

    name: str
    title: str
    text: str
    commands: tuple[str, ...]
    run: Callable[[Sequence[str]], None]

    @property
    def is_page(self) -> bool:
        """Whether the last command writes the page itself, from other runs."""
        return "--out" in self.commands[-1]


def run_all(commands: Sequence[str]) -> None:
    """Run the commands one after the other."""
    for command in commands:
        run(command)


def run(command: str) -> None:
    """Run a command of paceline in the folder of the gallery. Raise `CalledProcessError` if it fails."""
    print(f"$ {command}", flush=True)
    subprocess.run([*PACELINE, *shlex.split(command)[1:]], cwd=WORK, check=True)


def run_with_a_kill(commands: Sequence[str]) -> None:
    """Start the first command, kill all its processes at half of its steps, and run the others."""
    first, *others = commands
    print(f"$ {first}", flush=True)
    with subprocess.Popen([*PACELINE, *shlex.split(first)[1:]], cwd=WORK, start_new_session=True) as process:
        log = WORK / "runs" / "crash" / "steps.jsonl"
        while process.poll() is None and (not log.exists() or log.read_text().count("\n") < 12):
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    run_all(others)


def write_photographs() -> None:
    """Write 40 small crops and 240 large ones of two photographs, in class folders."""
    draws = np.random.default_rng(0)
    for folder, (number, size) in {"photos": (20, 128), "large-photos": (120, 400)}.items():
        for name, file in PHOTOGRAPHS.items():
            pixels = load_sample_image(file)
            for split, count in {"train": number, "val": 10}.items():
                place = WORK / folder / split / name
                place.mkdir(parents=True, exist_ok=True)
                for each in range(count):
                    top, left = (int(draws.integers(side - size + 1)) for side in pixels.shape[:2])
                    crop = Image.fromarray(pixels[top : top + size, left : left + size])
                    crop.save(place / f"{each:03}.jpg", quality=92)


ENTRIES = (
    Entry(
        "digits",
        "Handwritten digits",
        "The default recipe on two ranks of a CPU: {top1} of 359 images in {wall}, start-up included.",
        ("paceline train digits --ranks 2 --run-dir runs/digits",),
        run_all,
    ),
    Entry(
        "fashion",
        "Fashion-MNIST on two CPU cores",
        "`fashion-cpu`, shortened from seven epochs to two: {top1} in {wall}.",
        (
            "paceline train fashion-cpu data.source.root=data/fashion-mnist train.epochs=2 train.eval_every=50% "
            "--ranks 1 --run-dir runs/fashion",
        ),
        run_all,
    ),
    Entry(
        "cifar10",
        "CIFAR-10 on two CPU cores",
        "`cifar10-cpu`, shortened from 13 epochs to three: {top1} in {wall}. "
        "The full recipe reaches 91.0 % in 22 minutes.",
        (
            "paceline train cifar10-cpu data.source.root=data/cifar10 train.epochs=3 log.worst=0 --ranks 1 "
            "--run-dir runs/cifar10",
        ),
        run_all,
    ),
    Entry(
        "fine-tune",
        "Fine-tuning on forty photographs",
        "The model of the CIFAR-10 run, fine-tuned on 40 crops of two photographs: {top1} of 20 images in {wall}.",
        (
            "paceline train folder data.source.root=photos model.name=speednet94 model.weights=runs/cifar10 "
            "data.image_size=32 data.batch_size=10 optim.lr=0.01 train.epochs=6 train.eval_every=1ep --ranks 1 "
            "--run-dir runs/fine-tune",
        ),
        run_all,
    ),
    Entry(
        "ladder",
        "A ladder of optimisations",
        "The ladder `cpu`: what threads, channels-last, bfloat16 and a fused optimizer gain, with intervals.",
        (f"paceline ladder cpu {LADDER} --run-dir runs/ladder",),
        run_all,
    ),
    Entry(
        "scale",
        "Scaling from one rank to two",
        "Throughput and efficiency of two ranks against one on the same machine.",
        ("paceline scale digits --ranks 1,2 --repeats 3 --run-dir runs/scale",),
        run_all,
    ),
    Entry(
        "input-bound",
        "An input-bound run",
        "A small model that waits for JPEG decoding: the report names the bottleneck and what to try.",
        (
            f"paceline train folder data.source.root=large-photos {TINY} data.workers=1 parallel.threads=1 "
            "--ranks 1 --run-dir runs/input-bound",
        ),
        run_all,
    ),
    Entry(
        "compare",
        "The same run from a pack",
        "The input-bound run, and the same run after `paceline data pack`, compared.",
        (
            "paceline data pack large-photos photos.pack",
            f"paceline train folder data.source.name=pack data.source.root=photos.pack {TINY} data.workers=1 "
            "parallel.threads=1 --ranks 1 --run-dir runs/packed",
            "paceline compare runs/input-bound runs/packed --out compare.html",
        ),
        run_all,
    ),
    Entry(
        "crash",
        "A run that was killed and resumed",
        "`kill -9` of all processes at half of the run, then `--resume`: the timeline shows both processes.",
        (
            "paceline train digits train.epochs=24 checkpoint.every=2ep log.every=11st --ranks 2 --run-dir runs/crash",
            "paceline train runs/crash --resume --ranks 2",
        ),
        run_with_a_kill,
    ),
    Entry(
        "prediction",
        "A prediction",
        "Images per second on more ranks than were measured, with an interval, from the points of the scaling run.",
        (
            "paceline scale --predict --points runs/scale/points.csv --at 4,8,16 --ranks-per-node 8 --network 100gbe "
            "--run-dir runs/prediction",
        ),
        run_all,
    ),
)


def folder_of(entry: Entry) -> Path:
    """Return the run directory that an entry shows."""
    return WORK / "runs" / entry.name


def make_runs(entries: Sequence[Entry], data: Path | None) -> None:
    """Run the commands of `entries`, in place of their earlier runs."""
    WORK.mkdir(parents=True, exist_ok=True)
    if data is not None:
        (WORK / "data").unlink(missing_ok=True)
        (WORK / "data").symlink_to(data.resolve())
    write_photographs()
    for entry in entries:
        for command in entry.commands:
            words = shlex.split(command)
            if "--run-dir" in words:
                shutil.rmtree(WORK / words[words.index("--run-dir") + 1], ignore_errors=True)
        (WORK / "photos.pack").unlink(missing_ok=True)
        entry.run(entry.commands)


def make_pages(entries: Sequence[Entry]) -> None:
    """Render the report of each entry, and take its pictures."""
    for entry in entries:
        page = GALLERY / f"{entry.name}.html"
        if entry.is_page:
            run(entry.commands[-1])
            shutil.copyfile(WORK / "compare.html", page)
        else:
            run(f"paceline report runs/{entry.name} --out {entry.name}.html")
            shutil.copyfile(WORK / f"{entry.name}.html", page)
        check_neutral(page)
        take_pictures(page)


def check_neutral(page: Path) -> None:
    """Raise `ValueError` if a page names this machine, its user or a folder outside of the gallery's."""
    text = page.read_text(encoding="utf-8")
    for word in (str(ROOT), str(Path.home()) + "/", f"{os.uname().nodename}:", tempfile.gettempdir()):
        if word in text:
            raise ValueError(f"{page.name}: has {word!r}")


def take_pictures(page: Path) -> None:
    """Write the first screen of a page as two small pictures, light and dark."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"))
        for theme in ("light", "dark"):
            shown = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=theme)  # type: ignore[arg-type]
            shown.goto(page.as_uri())
            taken = WORK / "picture.png"
            shown.screenshot(path=taken)
            picture = Image.open(taken).convert("RGB").resize((WIDTH * 5 // 8, HEIGHT * 5 // 8))
            picture.save(GALLERY / "images" / f"{page.stem}-{theme}.webp", quality=82, method=6)
        browser.close()


def write_page() -> None:
    """Write the page of the gallery from the results of the runs."""
    cards = "".join(card(entry) for entry in ENTRIES if (GALLERY / f"{entry.name}.html").exists())
    text = f"""# Gallery

Reports of real runs on two CPU cores, each one HTML file that makes no request. Click a picture to open the report.

<div class="gallery">
{cards}</div>

`docs/gallery/make.py` makes this page and its reports. Runs of CIFAR-10 keep no images. The photographs of the flower
and the temple come with scikit-learn: [flower](https://www.flickr.com/photos/vultilion/6056698931/) and
[temple](https://www.flickr.com/photos/danielbuechele/6061409035/), CC BY 2.0, cropped.
"""
    (GALLERY / "README.md").write_text(text, encoding="utf-8")


def card(entry: Entry) -> str:
    """Return the card of an entry: a picture, light or dark, a title and a sentence."""
    result = folder_of(entry) / "result.json"
    values = {}
    if result.exists():
        found = json.loads(result.read_text(encoding="utf-8"))
        values = {"top1": f"{100 * found['eval']['top1']:.1f} %", "wall": duration(found["time"]["wall_s"])}
    sentence = re.sub(r"`([^`]+)`", r"<code>\1</code>", entry.text.format(**values))
    name = entry.name
    return (
        f'<figure><a href="{name}.html"><picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="images/{name}-dark.webp">'
        f'<img src="images/{name}-light.webp" alt="{entry.title}: the top of its report" loading="lazy"></picture></a>'
        f'<figcaption><a href="{name}.html"><strong>{entry.title}</strong></a><br>{sentence}</figcaption></figure>\n'
    )


def duration(seconds: float) -> str:
    """Return a time as `45 s` or `3 min 20 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def main() -> None:
    """Make what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--data", type=Path, help="folder with cifar10/ and fashion-mnist/")
    parser.add_argument("--pages", action="store_true", help="render the reports of existing runs, without training")
    parser.add_argument("names", nargs="*", help="entries (all)", choices=[[], *(each.name for each in ENTRIES)])
    args = parser.parse_args()
    entries = [each for each in ENTRIES if each.name in args.names or not args.names]
    (GALLERY / "images").mkdir(exist_ok=True)
    if not args.pages:
        make_runs(entries, args.data)
    make_pages(entries)
    write_page()


if __name__ == "__main__":
    main()
