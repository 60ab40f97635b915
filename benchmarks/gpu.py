"""How near does training come to what a GPU could do, and to what other programs do there? A call is under 8 minutes.

    python benchmarks/gpu.py --only peaks,ladder,beside --json ONE   # all of it takes two calls, and each its own file
    python benchmarks/gpu.py --only networks,cifar10 --cifar10 DIR --json OTHER
    python benchmarks/gpu.py --device cpu --tiny                     # the same program in seconds, its numbers nothing

Works from a bare checkout with PYTHONPATH=src and without a network. Parts, in this order:

peaks     what a large matrix product and a large copy reach here, beside the vendor's figures
ladder    the rungs of NERSC's SC20 tutorial on its own ResNet-50 and what came after them, over the tutorial's own loop
networks  each network of the list, compiled and captured, as a share of its roofline (measure/roofline.py)
beside    paceline, loops by hand, eager and compiled, Lightning and Accelerate, on pixels of the same kind
cifar10   time to 94 % on CIFAR-10 by `cifar10-94`, five seeds, where --cifar10 says where the data is

Everything runs in this process, one measurement after the other, on made-up pixels that lie on the device; a rate is
images over seconds of all measured steps, with the 10th and 90th percentile over windows of ten steps and n. The result
is written after every measurement, so a program that is ended keeps what it has; each part has its share of the time.
Measurements without time left, or that cannot run here, are listed with the reason; the others run. Rates are
measured, not checked: the exit status is 0.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
from accuracy import without_folders
from gpu_device import as_row, clocks, clocks_under_load, reached, vendor
from gpu_loops import LOOPS, Work, tutorial

from paceline.core.results import RunResult
from paceline.core.run_dir import RunDir
from paceline.core.world import World
from paceline.measure.roofline import Peak, roofline
from paceline.models.flops import count_cost
from paceline.recipe.load import Patch, load
from paceline.training.process import Invocation
from paceline.training.run import run

SHARES = {"peaks": 3, "ladder": 22, "networks": 28, "beside": 27, "cifar10": 20}
"""The parts, and what each may take of the time, in percent; what one leaves over is for those that follow."""
NETWORKS = (
    ("resnet18_cifar", 32, 3, 100, 512),
    ("torchvision:resnet50", 224, 3, 1000, 256),
    ("torchvision:resnet18", 224, 3, 1000, 512),
    ("wideresnet_course", 32, 3, 10, 256),
    ("resnet50_nersc", 32, 3, 100, 256),
    ("wideresnet_course", 28, 1, 10, 256),
    ("speednet94", 32, 3, 10, 2000),
    ("speednet96", 32, 3, 10, 1024),
)
"""Name, height and width, channels, classes, batch; what the most is asked about comes first."""
TINY = tuple(each for each in NETWORKS if each[0] in ("resnet18_cifar", "torchvision:resnet18"))
BESIDE = ("resnet50_nersc", "resnet18_cifar")
BESIDE_ORDER = (
    *("paceline, compiled, captured", "bare, compiled", "Lightning", "Accelerate", "bare, eager"),
    *("paceline", "paceline, compiled"),
)
"""What the most is asked about comes first."""
SC20 = (
    ("fp32", ()),
    ("amp", ("train.precision=amp",)),
    ("channels last", ("model.memory_format=channels_last",)),
    ("extras", ("optim.implementation=fused", "train.cudnn_benchmark=auto")),
    ("capture", ("train.capture=on",)),
    ("compile", ("train.compile=default", "train.capture=off")),
    ("compile, capture", ("train.capture=on",)),
)
"""Each rung has the words of those before it."""
TARGET_TOP1, SEEDS = 0.94, 5


@dataclass
class Bench:
    """What is asked, what the clock says, and the result so far, which is written as soon as it grows.

    `limit_s` is the end of the part that is measured, in seconds since the beginning.
    """

    device: torch.device
    is_tiny: bool
    cifar10: Path | None
    limit_s: float
    out: Path | None
    values: dict[str, Any]
    began_s: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        if self.is_tiny:
            torch.set_num_threads(1)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the program began to measure."""
        return time.perf_counter() - self.began_s

    def take(self, part: str, name: str, expected_s: float, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return and keep the row that `work` makes, or an empty one where there is no time or it cannot be."""
        why = ""
        row: dict[str, Any] = {}
        if self.elapsed_s + (0 if self.is_tiny else expected_s) > self.limit_s:
            why = f"no time: {self.elapsed_s:.0f} s of {self.limit_s:.0f} are gone, and it may take {expected_s:.0f}"
        else:
            started_s = time.perf_counter()
            try:
                row = {"name": name, **work(), "took_s": round(time.perf_counter() - started_s, 2)}
            except ImportError as error:
                why = f"not installed: {error.name}"
            except Exception as error:  # of anybody's program: the rows that follow are worth more
                why = reason(error)
        if why:
            self.values["skipped"].append({"part": part, "name": name, "why": why})
        else:
            self.values["parts"].setdefault(part, []).append(row)
        print(f"{part:9} {name:28} {why or format_row(row)}", flush=True)
        self.write()
        self.forget()
        return row

    def measure(self, part: str, measure: "Callable[[Bench], None]") -> None:
        """Measure a part; what it raises outside of its rows is written, and the parts that follow are measured."""
        try:
            measure(self)
        except Exception as error:  # as in `take`
            self.values["skipped"].append({"part": part, "name": part, "why": reason(error)})
            print(f"{part:9} {part:28} {reason(error)}", flush=True)
        self.values["clocks"]["last"] = clocks(self.device)
        self.write()

    @cached_property
    def measured_peak(self) -> Peak:
        """What a product and a copy reach here, measured when it is first asked for."""
        return reached(self.device, is_tiny=self.is_tiny)

    def forget(self) -> None:
        """Give back what a row has left behind: memory, and what was compiled.

        torch.compile would else make code that it sees with a second size fit for any size, and a ninth variant of it
        not at all (https://docs.pytorch.org/docs/stable/torch.compiler_dynamic_shapes.html).
        """
        gc.collect()
        if self.device.type == "cuda":
            with suppress(Exception):  # the next row may run all the same
                torch.compiler.reset()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()

    def write(self) -> None:
        """Write the result in place of the one before."""
        if self.out:
            self.values["elapsed_s"] = round(self.elapsed_s, 1)
            beside = self.out.with_name(f"{self.out.name}.part")
            record.write(beside, self.values)
            beside.replace(self.out)

    def work(self, name: str) -> Work:
        """Return what the loops of others train, of the network called `name`."""
        _, size, channels, num_classes, batch_size = next(each for each in NETWORKS if each[0] == name)
        if self.is_tiny:
            # At 10 px a stride of 2 meets a map of one pixel, which is refused in bfloat16 on CPUs.
            return Work(name, 20, channels, 10, 2, 8, 0.02, self.device, 1, 2)
        return Work(name, size, channels, num_classes, batch_size, 16_384, 1.0, self.device, 10, 8)


def main() -> None:
    """Measure the parts that are asked for, and write the result."""
    args = parse_args()
    device = torch.device(args.device)
    values = {
        "benchmark": "gpu",
        **record.provenance(),
        "command": without_folders(record.provenance()["command"]),
        "unit": "images/s: of all steps; 10th and 90th percentile over windows of them",
        "clocks": {"first": clocks(device)},
        "parts": {},
        "skipped": [],
    }
    bench = Bench(device, args.tiny, args.cifar10, args.minutes * 60, args.json, values)
    measures = {"peaks": peaks, "ladder": ladder, "networks": networks, "beside": beside, "cifar10": cifar10}
    parts = [part for part in SHARES if part in args.only]
    for at, part in enumerate(parts):
        left_s = args.minutes * 60 - bench.elapsed_s
        bench.limit_s = bench.elapsed_s + left_s * fraction(parts[at:], has_cifar10=args.cifar10 is not None)
        bench.measure(part, measures[part])


def fraction(parts: Sequence[str], *, has_cifar10: bool) -> float:
    """Return what the first of `parts` may take of the time that is left for all of them."""
    weights = SHARES if has_cifar10 else {**SHARES, "cifar10": 0}
    return weights[parts[0]] / max(1, sum(weights[part] for part in parts))


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SHARES), metavar="PART,PART")
    parser.add_argument("--minutes", type=float, default=7.5, help="after which nothing new is begun (default: 7.5)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="networks and batches of next to nothing, uncompiled")
    parser.add_argument("--cifar10", type=Path, metavar="DIR", help="data.source.root of CIFAR-10")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    args = parser.parse_args()
    unknown = sorted(set(args.only) - set(SHARES))
    if unknown:
        parser.error(f"--only: {', '.join(unknown)} is no part (use some of {','.join(SHARES)})")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda: torch sees no GPU (use --device cpu --tiny to try the program)")
    return args


def peaks(bench: Bench) -> None:
    """Measure what a product and a copy reach."""
    bench.take(
        "peaks",
        "bf16",
        10,
        lambda: {
            "vendor": as_row(vendor(bench.device)),
            "here": as_row(bench.measured_peak),
            "clocks_under_load": clocks_under_load(bench.device, is_tiny=bench.is_tiny),
        },
    )


def ladder(bench: Bench) -> None:
    """Climb from the tutorial's own loop; every rung says how many times as fast as that it is."""
    work = bench.work("resnet50_nersc")
    first = bench.take("ladder", "the tutorial's own loop", 15, lambda: rates(tutorial(work)))
    arguments: tuple[str, ...] = ()
    for name, more in SC20:
        arguments += more
        if bench.is_tiny and "compile" in name:
            continue  # a compiler takes longer than all the rest
        rung = paceline(bench, "sc20/bs256", work, arguments)

        def times(rung: Callable[[], dict[str, Any]] = rung) -> dict[str, Any]:
            row = rung()
            over = row["images_per_s"] / first["images_per_s"] if first else None
            return {**row, "times": over and round(over, 2)}

        # Kernels that the rung "compile" has made lie on the disk for the next one.
        bench.take("ladder", name, 30 if name == "compile" else 12, times)


def networks(bench: Bench) -> None:
    """Train each network as fast as recipes can, and compare with its roofline."""
    for name, size, channels, num_classes, batch_size in TINY if bench.is_tiny else NETWORKS:
        work = replace(bench.work(name), channels=channels)
        if not bench.is_tiny:
            few = 4096 if size > 100 else 16_384
            work = replace(work, size=size, batch_size=batch_size, num_classes=num_classes, num_images=few)
        train = paceline(bench, "synthetic", work, FAST)

        def shares(work: Work = work, train: Callable[[], dict[str, Any]] = train) -> dict[str, Any]:
            row = train()
            kernels = list(count_cost(work.model(), work.channels, work.size, work.size).training)
            found = {"here": roofline(kernels, row["images_per_s"], bench.measured_peak)}
            of_vendor = vendor(bench.device)
            found |= {"vendor": roofline(kernels, row["images_per_s"], of_vendor)} if of_vendor else {}
            of_peak = {
                key: {
                    "share": round(each.share, 4),
                    "mfu": round(each.mfu, 4),
                    "bound_images_per_s": round(each.bound_images_per_s, 1),
                }
                for key, each in found.items()
            }
            return {**row, "size": work.size, "channels": work.channels, "batch_size": work.batch_size, **of_peak}

        bench.take("networks", f"{name} {size} px", 30, shares)


def beside(bench: Bench) -> None:
    """Train two networks in the loops of others and in paceline."""
    for name in BESIDE[bench.is_tiny :]:
        work = bench.work(name)
        ours = {
            "paceline, compiled, captured": ("train.compile=default", "train.capture=on"),
            "paceline, compiled": ("train.compile=default",),
            "paceline": (),
        }
        fast = ("train.precision=bf16", "optim.implementation=fused")
        loops = {named: paceline(bench, "synthetic", work, (*fast, *arguments)) for named, arguments in ours.items()}
        loops |= {named: lambda loop=loop, work=work: rates(loop(work)) for named, loop in LOOPS.items()}
        for named in BESIDE_ORDER:
            if not (bench.is_tiny and "compiled" in named):
                bench.take("beside", f"{name}: {named}", 25 if "compiled" in named else 8, loops[named])


def cifar10(bench: Bench) -> None:
    """Train CIFAR-10 to 94 % with several seeds; seconds are of steps and evaluation, compiling and capturing apart."""
    if bench.cifar10 is None:
        why = "no data (give --cifar10 DIR)"
        bench.values["skipped"].append({"part": "cifar10", "name": "cifar10-94", "why": why})
        return
    root = f"data.source.root={bench.cifar10}"
    arguments = (root, "log.tensorboard=off", "checkpoint.every=off", "measure.telemetry=off")
    arguments += (*FAST, f"parallel.device={bench.device.type}")
    if bench.is_tiny:
        arguments += (
            "train.epochs=auto",
            "train.steps=2",
            "data.batch_size=16",
            "model.width=0.1",
            "train.compile=off",
        )
        arguments += ("parallel.threads=1",)
    for seed in range(1 if bench.is_tiny else SEEDS):
        bench.take(
            "cifar10", f"seed {seed}", 30, lambda seed=seed: to_94(trained("cifar10-94", (*arguments, f"seed={seed}")))
        )
    done = bench.values["parts"].get("cifar10", [])
    if done:
        means = {key: round(float(np.mean([row[key] for row in done])), 4) for key in ("top1", "seconds")}
        reached_all = sum(row["top1"] >= TARGET_TOP1 for row in done)
        kept = {"n": len(done), "target": TARGET_TOP1, "runs_that_reach_it": reached_all}
        bench.values["cifar10_mean"] = {**means, **kept}


def to_94(result: RunResult) -> dict[str, Any]:
    """Return the accuracy of a run and what it took."""
    evaluation = result.ema or result.eval
    assert evaluation is not None and result.account is not None
    capture_s = result.account.pauses.get("capture", 0.0)
    seconds = result.time.train_s - capture_s + result.time.eval_s
    return {"top1": evaluation.top1, "seconds": seconds, "capture_s": capture_s, "compile_s": result.account.compile_s}


FAST = ("train.precision=bf16", "train.compile=default", "train.capture=on")


def paceline(bench: Bench, preset: str, work: Work, arguments: tuple[str, ...]) -> Callable[[], dict[str, Any]]:
    """Return what trains `preset` on made-up pixels on the device, and returns its rate."""
    source = ("data.source.name=synthetic", f"data.source.image_size={work.size}")
    source += (f"data.source.num_images={work.num_images}", f"data.source.channels={work.channels}")
    source += (f"data.source.num_classes={work.num_classes}", "data.source.num_val_images=2")
    # Ten more steps than are counted: the first warm up, and in them a step is compiled, chosen and captured.
    steps, warmup = work.steps_a_window * work.num_windows, 1 if bench.is_tiny else 15
    how = (f"data.batch_size={work.batch_size}", f"model.name={work.name}", f"train.steps={steps + warmup}")
    how += ("train.eval_every=off", "checkpoint.every=off", "log.every=1000st", "log.tensorboard=off")
    how += (f"measure.warmup_steps={warmup}", "measure.telemetry=off", f"parallel.device={bench.device.type}")
    # A rate at which nothing overflows: how fast it is does not depend on it.
    how += ("train.epochs=auto", "schedule.name=constant", "optim.lr=1e-4")
    how += (f"model.width={1.0 if ':' in work.name else work.width}",)
    if bench.is_tiny:
        arguments = (*arguments, "train.compile=off", "parallel.threads=1")

    def train() -> dict[str, Any]:
        result = trained(preset, (*source, *how, *arguments))
        rate = result.throughput
        assert result.account is not None
        return {
            "images_per_s": round(rate.images_per_s, 1),
            "p10": round(rate.spread[0], 1),
            "p90": round(rate.spread[1], 1),
            "n": rate.n,
            "compile_s": round(result.account.compile_s, 2),
            "capture_s": round(result.account.pauses.get("capture", 0.0), 2),
            "captured": "captured_step" in result.stages,
            "memory_bytes": result.memory.model_dump() if result.memory else None,
        }

    return train


def trained(preset: str, arguments: tuple[str, ...]) -> RunResult:
    """Return the result of a run in this process, whose folder is gone afterwards."""
    recipe = load(preset, Patch.parse(list(arguments))).recipe
    with tempfile.TemporaryDirectory() as folder:
        return run(recipe, World.single(), RunDir(Path(folder, "run")), invocation=Invocation())


def rates(found: list[float]) -> dict[str, Any]:
    """Return images over seconds of windows of as many images each, as a run's own rate is; percentiles, and n."""
    low, high = np.percentile(found, [10, 90])
    mean = len(found) / sum(1 / rate for rate in found)
    return {"images_per_s": round(mean, 1), "p10": round(low, 1), "p90": round(high, 1), "n": len(found)}


def reason(error: Exception) -> str:
    """Return the kind of an error and the beginning of what it says."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def format_row(row: dict[str, Any]) -> str:
    """Return a row as a person reads it."""
    arguments: Iterator[str] = (
        f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row.items()
        if key in ("images_per_s", "n", "times", "top1", "seconds", "captured")
    )
    share = row.get("here", {}).get("share") if isinstance(row.get("here"), dict) else None
    return ", ".join([*arguments, *([f"{share:.1%} of the roofline"] if share else [])])


if __name__ == "__main__":
    main()
