"""Make the gallery: train on this machine, render the reports, take their pictures, and write the page.

    .venv/bin/python docs/gallery/make.py --data FOLDER              # all of it, about 20 min on two idle cores
    .venv/bin/python docs/gallery/make.py --data FOLDER digits crash # these alone
    .venv/bin/python docs/gallery/make.py --pages                    # after a change of the report, without training

FOLDER has `cifar10` and `fashion-mnist` as the recipes read them. Runs are made in build/gallery. Their records, from
which reports are rendered, are stored in docs/gallery/runs, and name no place outside of build/gallery. The reports of
CIFAR-10 and Fashion-MNIST include no images of these datasets (`log.worst=0`). Also writes the pictures of reports in
the README and the tutorial. Needs playwright and chromium.
"""

import argparse
import contextlib
import html
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_image

if TYPE_CHECKING:
    from playwright.sync_api import Page, ViewportSize

ROOT: Final = Path(__file__).parents[2]
GALLERY: Final = ROOT / "docs" / "gallery"
RUNS: Final = GALLERY / "runs"
"""The records of each run, from which its report is rendered."""
REPORTS: Final = ROOT / "docs" / "images" / "reports"
"""Pictures of reports on other pages."""
WORK: Final = ROOT / "build" / "gallery"
NOT_STORED: Final = {"checkpoints", "tensorboard", "trace", ".lock"}
PACELINE: Final = (sys.executable, "-m", "paceline")
PHOTOGRAPHS: Final = {"flower": "flower.jpg", "temple": "china.jpg"}
"""Photographs that scikit-learn ships (CC BY 2.0), by class."""
TIMES: Final = "ranks,nodes,rank_batch,images,time_s\n1,1,256,12811670,20532\n4,1,256,12811670,5356\n" + (
    "16,4,128,12811670,1488\n32,8,128,12811670,791\n"
)
"""Published times of ResNet-50 on ImageNet, as in docs/tutorial/5-sixteen-nodes.md."""
SMALL: Final = (
    "model.name=resnet18_cifar model.width=0.1 data.image_size=32 data.batch_size=32 data.workers=1 "
    "parallel.threads=1 train.epochs=8 schedule.warmup=0ep --ranks 1"
)
Theme = Literal["light", "dark"]
THEMES: Final[tuple[Theme, ...]] = ("light", "dark")
WIDTH, HEIGHT, PHONE, MARGIN = 1040, 650, 390, 16
"""Of windows and pictures, in CSS pixels; a picture of a part of a report begins `MARGIN` above it."""


@dataclass(frozen=True)
class Entry:
    """A report of the gallery: its file name, its title, a sentence, and the commands that make it.

    The report is of the run directory `runs/NAME`, unless the last command writes a page.
    """

    name: str
    title: str
    text: str
    commands: tuple[str, ...]
    run: Callable[[Sequence[str]], None]
    is_listed: bool = True

    @property
    def is_page(self) -> bool:
        """Whether the last command writes the page itself, from other runs."""
        return "--out" in self.commands[-1]


@dataclass(frozen=True)
class Picture:
    """A picture of a report for another page: the part from the first match of `selector`, or from the top.

    Heights are in CSS pixels.
    """

    name: str
    entry: str
    selector: str
    height: int
    phone_height: int


def run_all(commands: Sequence[str]) -> None:
    """Run the commands one after the other."""
    for command in commands:
        run(command)


def run(command: str) -> None:
    """Run a command of paceline in the folder of the gallery. Raise `CalledProcessError` if it fails."""
    print(f"$ {command}", flush=True)
    subprocess.run([*PACELINE, *shlex.split(command)[1:]], cwd=WORK, check=True)


def run_with_a_kill(commands: Sequence[str]) -> None:
    """Start the first command, kill all its processes halfway through its steps, and run the others."""
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
    """Write 40 small crops of two photographs, and 240 large ones of 1000 pixels a side, in class folders."""
    draws = np.random.default_rng(0)
    for folder, (number, size, side) in {"photos": (20, 128, 128), "large-photos": (120, 400, 1000)}.items():
        for name, file in PHOTOGRAPHS.items():
            pixels = load_sample_image(file)
            for split, count in {"train": number, "val": 10}.items():
                place = WORK / folder / split / name
                place.mkdir(parents=True, exist_ok=True)
                for each in range(count):
                    top, left = (int(draws.integers(length - size + 1)) for length in pixels.shape[:2])
                    crop = Image.fromarray(pixels[top : top + size, left : left + size])
                    crop.resize((side, side), Image.Resampling.BICUBIC).save(place / f"{each:03}.jpg", quality=92)


ENTRIES: Final = (
    Entry(
        "digits",
        "Handwritten digits",
        "The default recipe on two CPU ranks: {top1} accuracy on 359 validation images after {wall}, with start-up.",
        ("paceline train digits --ranks 2 --run-dir runs/digits",),
        run_all,
    ),
    Entry(
        "first",
        "The first run of the tutorial",
        "",
        ("paceline train train.epochs=4 train.eval_every=1ep --ranks 1 --run-dir runs/first",),
        run_all,
        is_listed=False,
    ),
    Entry(
        "input-bound",
        "An input-bound run",
        "A small model waits for JPEG decoding: the report names the bottleneck and the setting to try.",
        (f"paceline train folder data.source.root=large-photos {SMALL} --run-dir runs/input-bound",),
        run_all,
    ),
    Entry(
        "compare",
        "The same run from a pack",
        "The input-bound run, and the same run after `paceline data pack`, compared.",
        (
            "paceline data pack large-photos photos.pack",
            f"paceline train folder data.source.name=pack data.source.root=photos.pack {SMALL} --run-dir runs/packed",
            "paceline compare runs/input-bound runs/packed --out compare.html",
        ),
        run_all,
    ),
    Entry(
        "crash",
        "A run that was killed and resumed",
        "All processes killed with `kill -9` halfway through the run, then `--resume`: the timeline shows both starts.",
        (
            "paceline train digits train.epochs=24 checkpoint.every=2ep log.every=11st --ranks 2 --run-dir runs/crash",
            "paceline train runs/crash --resume --ranks 2",
        ),
        run_with_a_kill,
    ),
    Entry(
        "scale",
        "From one rank to two",
        "Throughput and efficiency of two ranks against one, each on a core of its own.",
        ("paceline scale digits parallel.threads=1 --ranks 1,2 --repeats 3 --run-dir runs/scale",),
        run_all,
    ),
    Entry(
        "prediction",
        "A prediction",
        "ResNet-50 on 64 and 128 GPUs, predicted with an interval from published times on 1 to 32.",
        ("paceline predict-scaling --points times.csv --at 64,128 --ranks-per-node 4 --run-dir runs/prediction",),
        run_all,
    ),
    Entry(
        "fashion",
        "Fashion-MNIST on two CPU cores",
        "`fashion-cpu`, shortened from seven epochs to two: {top1} in {wall}.",
        (
            "paceline train fashion-cpu data.source.root=data/fashion-mnist train.epochs=2 train.eval_every=50% "
            "log.worst=0 --ranks 1 --run-dir runs/fashion",
        ),
        run_all,
    ),
    Entry(
        "cifar10",
        "CIFAR-10 on two CPU cores",
        "`cifar10-cpu`, shortened from 13 epochs to three: {top1} in {wall}.",
        (
            "paceline train cifar10-cpu data.source.root=data/cifar10 train.epochs=3 train.eval_every=1ep log.worst=0 "
            "--ranks 1 --run-dir runs/cifar10",
        ),
        run_all,
    ),
    Entry(
        "fine-tune",
        "Fine-tuning on forty images",
        "The model of the CIFAR-10 run, fine-tuned on 40 crops of two photographs: {top1} accuracy on 20 validation "
        "images after {wall}.",
        (
            "paceline train folder data.source.root=photos model.name=speednet94 model.weights=runs/cifar10 "
            "data.image_size=32 data.batch_size=10 optim.lr=0.02 optim.lr_scaling=none optim.base_batch_size=auto "
            "schedule.warmup=1ep train.epochs=8 train.eval_every=1ep --ranks 1 --run-dir runs/fine-tune",
        ),
        run_all,
    ),
    Entry(
        "ladder",
        "A ladder of optimizations",
        "The ladder `cpu`: the gain of threads, channels-last, bfloat16 and resident data, each with an interval.",
        ("paceline ladder cpu data.source.root=data/cifar10 --steps 8 --repeats 3 --run-dir runs/ladder",),
        run_all,
    ),
)

PICTURES: Final = (
    Picture("report", "input-bound", "", 760, 1080),  # in the README and on the home page
    Picture("first-run", "first", "", 680, 1000),
    Picture("inputs", "input-bound", "#inputs", 525, 590),
    Picture("mistakes", "first", "#classes", 590, 600),
    Picture("scaling", "scale", "#speed", 365, 600),
    Picture("prediction", "prediction", "#time", 400, 600),
)


def make_runs(entries: Sequence[Entry], data: Path | None) -> None:
    """Run the commands of `entries`, in place of their earlier runs, and store what their reports are made of."""
    WORK.mkdir(parents=True, exist_ok=True)
    if data is not None:
        (WORK / "data").unlink(missing_ok=True)
        (WORK / "data").symlink_to(data.resolve())
    write_photographs()
    (WORK / "times.csv").write_text(TIMES, encoding="utf-8")
    for entry in entries:
        folders = [WORK / each for command in entry.commands for each in re.findall(r"--run-dir (\S+)", command)]
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        (WORK / "photos.pack").unlink(missing_ok=True)
        entry.run(entry.commands)
        for folder in folders:
            make_neutral(folder)
            store(folder)


def make_neutral(folder: Path) -> None:
    """Shorten what the records of a run say about this machine: its name, absolute paths, and its kernel."""
    release = os.uname().release
    shorter = {f"{WORK}/": "", release: release.partition("-")[0], f'"{os.uname().nodename}"': '"node"'}
    for path in folder.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".csv", ".yaml", ".md") and "checkpoints" not in path.parts:
            text = path.read_text(encoding="utf-8")
            for long, short in shorter.items():
                text = text.replace(long, short)
            path.write_text(text, encoding="utf-8")


def store(folder: Path) -> None:
    """Store the records of a run in `RUNS`, without its weights, so that any checkout can render its report."""

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        path = Path(member.name)
        if NOT_STORED & {*path.parts} or path.suffix in (".html", ".safetensors"):
            return None
        member.mtime = member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(RUNS / f"{folder.name}.tar.xz", "w:xz") as archive:
        archive.add(folder, folder.name, filter=kept)


def restore() -> None:
    """Write the stored records of all runs that are not in the folder of runs."""
    for path in sorted(RUNS.glob("*.tar.xz")):
        if not (WORK / "runs" / path.name.removesuffix(".tar.xz")).exists():
            with tarfile.open(path) as archive:
                archive.extractall(WORK / "runs", filter="data")


def make_pages(entries: Sequence[Entry]) -> None:
    """Render the report of each entry, and take its pictures."""
    restore()
    (WORK / "times.csv").write_text(TIMES, encoding="utf-8")
    for entry in entries:
        if entry.is_page:
            run(entry.commands[-1])
        else:
            run(f"paceline report runs/{entry.name} --out {entry.name}.html")
        check_neutral(WORK / f"{entry.name}.html")
    with browser() as open_page:
        for entry in entries:
            if entry.is_listed:
                shutil.copyfile(WORK / f"{entry.name}.html", GALLERY / f"{entry.name}.html")
                for theme in THEMES:
                    page = open_page(GALLERY / f"{entry.name}.html", WIDTH, theme)
                    save(page, (0, 0, WIDTH, HEIGHT), GALLERY / "images" / f"{entry.name}-{theme}.webp", 1 / 2)
        for picture in PICTURES:
            if picture.entry in [entry.name for entry in entries]:
                take(picture, open_page)


def take(picture: Picture, open_page: Callable[[Path, int, Theme], "Page"]) -> None:
    """Write a part of a report for wide screens and for phones, light and dark."""
    for theme in THEMES:
        for suffix, width, height in (("", WIDTH, picture.height), ("-phone", PHONE, picture.phone_height)):
            page = open_page(WORK / f"{picture.entry}.html", width, theme)
            top = 0.0
            if picture.selector:
                top = page.locator(picture.selector).first.evaluate("each => each.getBoundingClientRect().top") - MARGIN
            path = REPORTS / f"{picture.name}{suffix}-{theme}.webp"
            save(page, (0, top, width, height), path, 3 / 4 if suffix else 3 / 5)


@contextlib.contextmanager
def browser() -> Iterator[Callable[[Path, int, Theme], "Page"]]:
    """Yield a function that opens a file in a window of a width and a colour scheme, two pixels per CSS pixel."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"))

        def open_page(path: Path, width: int, theme: Theme) -> "Page":
            for context in chromium.contexts:
                context.close()
            viewport: ViewportSize = {"width": width, "height": HEIGHT}
            page = chromium.new_page(viewport=viewport, color_scheme=theme, device_scale_factor=2)
            page.goto(path.as_uri())
            return page

        yield open_page
        chromium.close()


def save(page: "Page", clip: tuple[float, float, float, float], path: Path, scale: float) -> None:
    """Write a part (x, y, width, height) of a page as WebP, with `scale` pixels for each of the screen."""
    x, y, width, height = clip
    shot = page.screenshot(clip={"x": x, "y": y, "width": width, "height": height}, full_page=True)
    picture = Image.open(io.BytesIO(shot)).convert("RGB")
    picture = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.LANCZOS)
    picture.save(path, quality=76, method=6)


def check_neutral(page: Path) -> None:
    """Raise `ValueError` if a page names this machine, its user or a folder outside of the gallery's."""
    text = page.read_text(encoding="utf-8")
    node = os.uname().nodename
    for word in (str(ROOT), f"{Path.home()}/", f"{node}:", f"on {node}", tempfile.gettempdir(), os.uname().release):
        if word in text:
            raise ValueError(f"{page.name}: has {word!r}")


def write_page() -> None:
    """Write the page of the gallery from the results of the runs."""
    cards = "".join(card(entry) for entry in ENTRIES if entry.is_listed)
    text = f"""# Gallery

These reports come from real runs on two CPU cores, except the prediction, which uses published times. Each is a single
self-contained HTML file that makes no network requests and is readable without JavaScript. Click a picture to open it.

<div class="gallery">
{cards}</div>

`docs/gallery/make.py` makes this page and its reports. The CIFAR-10 and Fashion-MNIST reports
include no images from those datasets. The photographs of the flower and the temple come with scikit-learn:
[flower](https://www.flickr.com/photos/vultilion/6056698931/) and
[temple](https://www.flickr.com/photos/danielbuechele/6061409035/), CC BY 2.0, cropped.
"""
    (GALLERY / "README.md").write_text(text, encoding="utf-8")


def card(entry: Entry) -> str:
    """Return the card of an entry: a picture, light or dark, a title, a sentence and the commands."""
    result = WORK / "runs" / entry.name / "result.json"
    values = {}
    if result.exists():
        found = json.loads(result.read_text(encoding="utf-8"))
        last = found["ema"] or found["eval"]
        values = {"top1": f"{100 * last['top1']:.1f} %", "wall": duration(found["time"]["wall_s"])}
    sentence = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(entry.text.format(**values), quote=False))
    name, commands = entry.name, html.escape("\n".join(entry.commands), quote=False)
    return (
        f'<figure><a href="{name}.html"><picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="images/{name}-dark.webp">'
        f'<img src="images/{name}-light.webp" alt="{entry.title}: the top of its report" loading="lazy">'
        "</picture></a>\n"
        f'<figcaption><a href="{name}.html"><strong>{entry.title}</strong></a><br>{sentence}\n'
        f"<pre><code>{commands}</code></pre></figcaption></figure>\n"
    )


def duration(seconds: float) -> str:
    """Return a time as `45 s` or `3 min 02 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def main() -> None:
    """Make what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--data", type=Path, help="folder with cifar10/ and fashion-mnist/")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--runs", action="store_true", help="train, and render nothing")
    only.add_argument("--pages", action="store_true", help="render the reports of stored runs, without training")
    parser.add_argument("names", nargs="*", help="entries (all)", choices=[[], *(each.name for each in ENTRIES)])
    args = parser.parse_args()
    entries = [each for each in ENTRIES if each.name in args.names or not args.names]
    for folder in (GALLERY / "images", RUNS, REPORTS, WORK / "runs"):
        folder.mkdir(parents=True, exist_ok=True)
    if not args.pages:
        make_runs(entries, args.data)
    if not args.runs:
        make_pages(entries)
        write_page()


if __name__ == "__main__":
    main()
