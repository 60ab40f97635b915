"""How fast are loaders, ours and others', on photographs and on small images, and what do they take beside a main loop?

Claims, on two cores, uint8 out, medians of rounds in which all take turns, each in a fresh process: the lossless pack
loads at least 6 times as fast as torchvision's ImageFolder + DataLoader and 3 times as fast as DALI on the CPU; the
pack at short side 256 and quality 90 at least 13 times as fast as torchvision and 3 times as fast as FFCV's fastest on
the images as they are (raw pixels, 500 at most); both at 80 % or more of what decoding alone does in the same process.
Resident small images come at least 25 times as fast as torchvision's one by one. Beside a main thread that is busy in
Python a native thread keeps 80 % of its rate, and costs it less than 5 %.

A folder is read natively too: in its first epoch, when each JPEG is decoded without an index (not counting the time to
store the index), at least twice as fast as torchvision's ImageFolder in uint8 and faster than every peer that reads
those files, and later, with the index, at least 5 times. Evaluation crops centers, at least 3 times as fast.

FFCV's raw pixels at short side 256 are measured too: ten times the bytes of our pack, and a center crop is a mere copy.

    sh benchmarks/peers/setup.sh /tmp/peers
    python benchmarks/loaders.py --data FOLDER --peers /tmp/peers/bin/python --rounds 3 \
        --json benchmarks/results/loaders-cpu.json

FOLDER has `train/` with class folders of JPEGs, in the page cache. Without `--peers` only ours and torchvision's are
measured. What contenders read is written to `--cache` first: packs, the 256 px files (a pack unpacked, so all read the
same), and FFCV's. Speed is measured, not checked: the exit status is 0.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import record

BENCHMARKS = Path(__file__).parent
TIMEOUT_S = 300


@dataclass(frozen=True)
class Contender:
    """A program that measures one loader. `data` says on what: `jpeg` as it is, `256`, or `pixels`.

    `program` is below this folder, `is_peer` one of the other environment.
    """

    name: str
    data: str
    program: str
    word: str
    is_peer: bool = False

    @property
    def key(self) -> str:
        """What it is called in results."""
        return f"{self.name} ({self.data})"


TORCHVISION = [
    Contender("torchvision PIL float", "jpeg", "peers/torchvision_loader.py", "float"),
    Contender("torchvision PIL uint8", "jpeg", "peers/torchvision_loader.py", "uint8"),
    Contender("torchvision decode_jpeg uint8", "jpeg", "peers/torchvision_loader.py", "decode_jpeg"),
    Contender("torchvision decode_jpeg uint8", "256", "peers/torchvision_loader.py", "decode_jpeg"),
]
PEERS = [
    Contender("DALI fused", "jpeg", "peers/dali_loader.py", "fused", is_peer=True),
    Contender("DALI fused", "256", "peers/dali_loader.py", "fused", is_peer=True),
    Contender("FFCV jpeg q90", "jpeg", "peers/ffcv_loader.py", "jpeg", is_peer=True),
    Contender("FFCV max 500 jpeg q90", "jpeg", "peers/ffcv_loader.py", "jpeg500", is_peer=True),
    Contender("FFCV max 500 raw", "jpeg", "peers/ffcv_loader.py", "raw500", is_peer=True),
    Contender("FFCV jpeg q90", "256", "peers/ffcv_loader.py", "jpeg", is_peer=True),
    Contender("FFCV raw", "256", "peers/ffcv_loader.py", "raw500", is_peer=True),
    Contender("SPDL threads", "jpeg", "peers/threads_loader.py", "spdl", is_peer=True),
    Contender("Grain threads", "jpeg", "peers/threads_loader.py", "grain", is_peer=True),
    Contender("LitData", "jpeg", "peers/streams_loader.py", "litdata", is_peer=True),
    Contender("MosaicML streaming", "jpeg", "peers/streams_loader.py", "streaming", is_peer=True),
    Contender("WebDataset", "jpeg", "peers/streams_loader.py", "webdataset", is_peer=True),
]
OURS = [
    Contender("paceline folder, processes", "jpeg", "peers/ours.py", "processes"),
    Contender("paceline folder, threads", "jpeg", "peers/ours.py", "threads"),
    Contender("paceline folder, native, epoch 1", "jpeg", "peers/ours.py", "files"),
    Contender("paceline folder, native, indexed", "jpeg", "peers/ours.py", "indexed_files"),
    Contender("paceline pack, native", "jpeg", "peers/ours.py", "native"),
    Contender("paceline pack, native", "256", "peers/ours.py", "native"),
]
WRITING = ("peers/ffcv_loader.py", "peers/streams_loader.py")
"""Programs that write files of their own first."""
PIXELS = [
    Contender("torchvision one by one", "pixels", "peers/pixels_loader.py", "per_sample"),
    Contender("paceline inline", "pixels", "peers/ours.py", "inline"),
    Contender("paceline resident", "pixels", "peers/ours.py", "device"),
]
BESIDE = [
    Contender("native thread beside Python", "256", "peers/beside.py", "native"),
    Contender("Python thread beside Python", "256", "peers/beside.py", "threads"),
    Contender("process beside Python", "256", "peers/beside.py", "processes"),
]


@dataclass(frozen=True)
class Section:
    """Contenders that take turns, and with which words each of them is called."""

    name: str
    contenders: Sequence[Contender]
    arguments: tuple[str, ...] = ()


def sections(args: argparse.Namespace) -> list[Section]:
    """Return what is measured, as far as it was asked for and there is a python to run it."""
    photographs = [each for each in (*TORCHVISION, *PEERS, *OURS) if args.peers or not each.is_peer]
    photographs = [each for each in photographs if not args.loaders or each.name in args.loaders]
    main_ones = [each for each in photographs if each.key in MAIN]
    every = [
        Section("train", photographs),
        Section("train scale 0.35", main_ones, ("--scale", "0.35", "1")),
        Section("eval", main_ones, ("--purpose", "eval")),
        Section("pixels", PIXELS, ("--batch", "512")),
        Section("beside", BESIDE, ("--workers", "1")),
    ]
    return [section for section in every if not args.only or section.name in args.only]


NOT_MEASURED = {"slipstream": "not measured: PyPI has no image loader of that name"}
"""Loaders that could not be installed, and why."""
MAIN = (
    "torchvision PIL float (jpeg)",
    "torchvision PIL uint8 (jpeg)",
    "DALI fused (jpeg)",
    "FFCV max 500 raw (jpeg)",
    "FFCV raw (256)",
    "paceline folder, processes (jpeg)",
    "paceline folder, native, epoch 1 (jpeg)",
    "paceline folder, native, indexed (jpeg)",
    "paceline pack, native (jpeg)",
    "paceline pack, native (256)",
)
"""Those that are also measured at another scale and in evaluation."""
CLAIMS = (
    ("train", "paceline pack, native (jpeg)", "torchvision PIL float (jpeg)", 6.0),
    ("train", "paceline pack, native (jpeg)", "DALI fused (jpeg)", 3.0),
    ("train", "paceline pack, native (256)", "torchvision PIL float (jpeg)", 13.0),
    ("train", "paceline pack, native (256)", "FFCV max 500 raw (jpeg)", 3.0),
    ("train", "paceline pack, native (256)", "FFCV raw (256)", 3.0),
    ("train", "paceline folder, native, epoch 1 (jpeg)", "torchvision PIL uint8 (jpeg)", 2.0),
    *(
        ("train", "paceline folder, native, epoch 1 (jpeg)", f"{name} (jpeg)", 1.0)
        for name in (
            *("torchvision decode_jpeg uint8", "DALI fused", "SPDL threads", "Grain threads"),
            *("LitData", "MosaicML streaming", "WebDataset"),
        )
    ),
    ("train", "paceline folder, native, indexed (jpeg)", "torchvision PIL uint8 (jpeg)", 5.0),
    ("eval", "paceline folder, native, epoch 1 (jpeg)", "torchvision PIL uint8 (jpeg)", 3.0),
    ("pixels", "paceline inline (pixels)", "torchvision one by one (pixels)", 25.0),
)
"""A section, what is claimed to be faster in it than what, and how many times."""


def main() -> None:
    """Measure, print, and write the result."""
    args = parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        cache = args.cache or Path(temporary)
        cache.mkdir(parents=True, exist_ok=True)
        places = prepare(args, cache)
        stored = bytes_an_image(places, cache)
        found = {section.name: measure(section, args, places, cache) for section in sections(args)}
    result = {
        "benchmark": "loaders",
        **record.provenance(),
        "load_before": round(load_before, 2),
        "config": {
            "rounds": args.rounds,
            "seconds": args.seconds,
            "workers": args.workers,
            "size": 224,
            "batch": 64,
        },
        "peers": versions(args.peers),
        "bytes_an_image": stored,
        "sections": {
            name: {key: summary(runs, args.workers) for key, runs in rows.items()} for name, rows in found.items()
        },
        "claims": claims(found),
        "runs": {
            name: {key: [round(run["images_per_s"], 1) for run in runs] for key, runs in rows.items()}
            for name, rows in found.items()
        },
    }
    print(table(result))
    if args.json:
        record.write(args.json, result)


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train/ and class folders of JPEGs in it")
    parser.add_argument("--peers", type=Path, help="python of the environment that peers/setup.sh makes")
    parser.add_argument("--cache", type=Path, help="where packs and the like are kept (default: removed afterwards)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="a window (default: 5)")
    parser.add_argument("--workers", type=int, default=2, help="processes or threads of each loader (default: 2)")
    parser.add_argument("--only", action="append", help="a section: train, 'train scale 0.35', eval, pixels or beside")
    parser.add_argument("--loader", dest="loaders", action="append", help="a loader of photographs, such as LitData")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    return args


def prepare(args: argparse.Namespace, cache: Path) -> dict[str, dict[str, Path]]:
    """Make packs, small files and FFCV's files; return what ours and the others read, by the form of the data."""
    train = args.data / "train"
    both = ("data.source.name=folder", f"data.source.train_root={train}", f"data.source.val_root={train}")
    for name, options in (("jpeg.pack", ()), ("256.pack", ("--resize", "256", "--quality", "90"))):
        if not (cache / name).exists():
            run([sys.executable, "-m", "paceline", "data", "pack", "folder", str(cache / name), *both, *options])
    if not (cache / "256").exists():
        run([sys.executable, "-m", "paceline", "data", "unpack", str(cache / "256.pack"), str(cache / "256")])
    places = {
        "peer": {"jpeg": train, "256": cache / "256" / "train", "pixels": cache},
        "pack": {"jpeg": cache / "jpeg.pack", "256": cache / "256.pack", "pixels": cache},
    }
    written = [each for each in PEERS if args.peers and each.program in WRITING]
    for each in (*written, *(each for each in OURS if each.word == "indexed_files")):
        if not args.loaders or each.name in args.loaders:
            run([*command(each, args, places, cache), "--prepare"])
    return places


def bytes_an_image(places: dict[str, dict[str, Path]], cache: Path) -> dict[str, int]:
    """Return what an image takes, as files, in packs and in FFCV's files. A pack holds each twice, once a split."""
    files = {
        form: sorted(path for path in places["peer"][form].rglob("*") if path.is_file()) for form in ("jpeg", "256")
    }
    found = {f"files ({form})": sum(path.stat().st_size for path in each) for form, each in files.items()}
    found |= {f"pack ({form})": places["pack"][form].stat().st_size // 2 for form in ("jpeg", "256")}
    found |= {path.name: path.stat().st_size for path in sorted(cache.glob("*.beton"))}
    return {name: num_bytes // len(files["jpeg"]) for name, num_bytes in found.items()}


def command(
    contender: Contender, args: argparse.Namespace, places: dict[str, dict[str, Path]], cache: Path
) -> list[str]:
    """Return how a contender is started. Ours read packs, but for those that are named after a folder."""
    python = str(args.peers) if contender.is_peer else sys.executable
    kind = (
        "pack"
        if contender.program in ("peers/ours.py", "peers/beside.py") and "folder" not in contender.name
        else "peer"
    )
    data = places[kind][contender.data]
    arguments = [
        "--data",
        str(data),
        "--cache",
        str(cache),
        "--workers",
        str(args.workers),
        "--seconds",
        str(args.seconds),
    ]
    return [python, str(BENCHMARKS / contender.program), contender.word, *arguments]


def run(arguments: Sequence[str]) -> str:
    """Run a program, and return what it says on stdout. One thread a process, as every loader's workers have."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(arguments, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def measure(section: Section, args: argparse.Namespace, places: dict, cache: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what each contender found, by its key: every round has all of them, forwards and then backwards."""
    found: dict[str, list[dict[str, Any]]] = {each.key: [] for each in section.contenders}
    for number in range(args.rounds):
        for each in list(section.contenders)[:: -1 if number % 2 else 1]:
            output = run([*command(each, args, places, cache), *section.arguments])
            found[each.key].append(json.loads(output.splitlines()[-1]))
            print(
                f"{section.name}, round {number + 1}: {each.key}: {found[each.key][-1]['images_per_s']:,.0f} images/s",
                file=sys.stderr,
                flush=True,
            )
    return found


def summary(runs: Sequence[dict[str, Any]], cores: int) -> dict[str, Any]:
    """Return a contender's rate by the clock, and by the CPU time it took, which a busy machine disturbs least.

    The latter is what `cores` would give that did nothing else. `of_alone` is the share of what decoding alone did in
    the same process; `kept` and `cost` are those of a loop beside the loader.
    """
    found: dict[str, Any] = {"images_per_s": spread([each["images_per_s"] for each in runs])}
    if all(each["cpu_s"] for each in runs):
        found["cpu_ms"] = round(float(np.median([1000 * each["cpu_s"] / each["images"] for each in runs])), 5)
        found["images_per_s_by_cpu"] = spread([cores * each["images"] / each["cpu_s"] for each in runs])
    if "alone" in runs[0]:
        found["alone_images_per_s"] = spread([each["alone"]["images_per_s"] for each in runs])
        found["of_alone"] = spread([each["images_per_s"] / each["alone"]["images_per_s"] for each in runs])
        by_cpu = [_per_cpu_s(each) / _per_cpu_s(each["alone"]) for each in runs]
        found["of_alone_by_cpu"] = spread(by_cpu)
    found |= {
        name: spread([each[name] for each in runs]) for name in ("idle_images_per_s", "kept", "cost") if name in runs[0]
    }
    return found


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the median, the lowest and the highest of some values, and how many there are."""
    return {
        "median": _rounded(np.median(values)),
        "low": _rounded(min(values)),
        "high": _rounded(max(values)),
        "n": len(values),
    }


def _rounded(value: float) -> float:
    return round(float(value), 1 if abs(value) >= 100 else 4)


def _per_cpu_s(run: dict[str, Any]) -> float:
    return run["images"] / run["cpu_s"]


def claims(found: dict[str, dict[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Return how many times as fast as another each is that is claimed to be: by rounds, by the clock and by CPU."""
    rows = []
    for section, ours, theirs, times in CLAIMS:
        runs = found.get(section, {})
        if ours in runs and theirs in runs:
            pairs = list(zip(runs[ours], runs[theirs], strict=True))
            rows.append(
                {
                    "section": section,
                    "ours": ours,
                    "theirs": theirs,
                    "claimed": times,
                    "ratio": spread([a["images_per_s"] / b["images_per_s"] for a, b in pairs]),
                    "ratio_by_cpu": spread([_per_cpu_s(a) / _per_cpu_s(b) for a, b in pairs]),
                }
            )
    return rows


def versions(python: Path | None) -> dict[str, str]:
    """Return the versions of the peers."""
    if python is None:
        return {}
    names = ("torch", "torchvision", "Pillow", "numpy", "ffcv", "nvidia-dali-cuda130", "grain", "spdl-core", "litdata")
    names += ("mosaicml-streaming", "webdataset")
    code = (
        "import json, importlib.metadata as m; had = {each.name for each in m.distributions()}; "
        f"print(json.dumps({{name: m.version(name) if name in had else 'not installed' for name in {names!r}}}))"
    )
    return {**json.loads(run([str(python), "-c", code])), **NOT_MEASURED}


def table(result: dict[str, Any]) -> str:
    """Return the result as a person reads it."""
    lines = [f"load {result['load_before']} before; by CPU: {result['config']['workers']} cores that do nothing else"]
    for name, rows in result["sections"].items():
        lines.append(f"\n{name}")
        for key, row in sorted(rows.items(), key=lambda item: item[1]["images_per_s"]["median"]):
            rate, by_cpu = row["images_per_s"], row.get("images_per_s_by_cpu")
            lines.append(
                f"  {key:38} {rate['median']:10,.0f} images/s ({rate['low']:,.0f} to {rate['high']:,.0f})"
                + (f"  by CPU {by_cpu['median']:10,.0f}" if by_cpu else "")
            )
            lines += [
                f"  {'':38} {what.replace('_', ' ')} {row[what]['median']:.0%}"
                for what in ("of_alone", "of_alone_by_cpu", "kept", "cost")
                if what in row
            ]
    lines.append("")
    for row in result["claims"]:
        ratio, by_cpu = row["ratio"]["median"], row["ratio_by_cpu"]["median"]
        lines.append(f"{row['ours']} : {row['theirs']} = {ratio:.1f} ({by_cpu:.1f} by CPU; claimed {row['claimed']:g})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
