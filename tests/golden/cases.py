"""All cases in the order of their dependencies."""

import os
import random
from pathlib import Path

from codes import code_cases
from jobs import import_libraries, run_cases
from recipes import training_cases
from values import Record
from verbs import data_cases, interface_cases, verb_cases

NUM_TRAIN, NUM_VAL, CLASSES = 24, 9, ("ant", "bee", "cat")


def record_all(record: Record, work: Path, checkout: Path, only: str, public_names: list[str]) -> None:
    """Run all cases, or those of the parts in `only`, and record their results."""
    make_photos(work)
    import_libraries()
    cores = min(len(os.sched_getaffinity(0)), 4)
    run_cases(data_cases(record, work), work, cores)
    parts = {
        "train": lambda: training_cases(record, work),
        "interface": lambda: interface_cases(record, work, checkout, public_names),
        "codes": lambda: code_cases(record, work),
        "verbs": lambda: verb_cases(record, work),
    }
    chosen = [part for name, part in parts.items() if only in name]
    if not chosen:
        raise SystemExit(f"--only: there is no part {only!r} (it is one of {', '.join(parts)})")
    run_cases([case for part in chosen for case in part()], work, cores)


def make_photos(work: Path) -> None:
    """Write a folder of images of several sizes, lists of the same files, and a damaged copy of one."""
    from PIL import Image

    draw = random.Random(0)
    lists = {"train": ["path,label"], "val": ["path,label"]}
    for number in range(NUM_TRAIN + NUM_VAL):
        split, label = ("train" if number < NUM_TRAIN else "val"), CLASSES[number % len(CLASSES)]
        path = work / "photos" / split / label / f"{number:02}.{'png' if number in (4, 9) else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        width, height = 32 + 4 * (number % 4), 30 + 3 * (number % 5)
        small = Image.frombytes("RGB", (6, 5), draw.randbytes(6 * 5 * 3))
        small.resize((width, height), Image.Resampling.BICUBIC).save(path)
        lists[split].append(f"{path.relative_to(work)},{number % len(CLASSES)}")
    for split, lines in lists.items():
        (work / f"{split}.csv").write_text("\n".join(lines) + "\n")
    whole = (work / "photos/train/ant/00.jpg").read_bytes()
    for split in ("train", "val"):
        for label in CLASSES[:2]:
            path = work / "damaged" / split / label / "0.jpg"
            path.parent.mkdir(parents=True)
            path.write_bytes(whole)
    (work / "damaged/train/ant/1.jpg").write_bytes(whole[: len(whole) // 3])
