"""Results of experiments as the lab would write them, made up: the numbers are plausible and measured nowhere."""

from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.experiments.results import (
    BatchPoint,
    LadderResult,
    MeasuredPoint,
    ParityResult,
    Predicted,
    PredictionResult,
    RungResult,
    ScalePoint,
    ScaleResult,
    SweepPoint,
    SweepResult,
    TriedResult,
    TuneResult,
)
from paceline.core.statistics import Interval

EVIL = "<script>window.hacked=1</script>|`x`\"'"
PROVENANCE = {"cpu": "Made-up CPU", "cpu_cores": 2, "torch": "2.15.0", "python": "3.11.9", "host": EVIL}
FACTS = {"recipe": "cifar10-cpu", "recipe_hash": "0123456789abcdef", "steps": 40, "warmup_steps": 5, "repeats": 3}


def around(value, width=0.03, n=3):
    """Return an interval of `width` times the value to each side."""
    return Interval(value=value, low=value * (1 - width), high=value * (1 + width), n=n)


def ladder(name="cpu"):
    """Return a ladder of eight rungs, of which one is slower, one has failed, and one does not fit."""
    stages = {"data_wait": 0.21, "h2d": 0.001, "forward": 0.12, "loss": 0.002, "backward": 0.25, "optimizer": 0.02}

    def rung(index, name, patch, speed, over, status="kept", why="", **more):
        shrunk = {stage: value * 101 / speed for stage, value in stages.items()}
        return RungResult(
            name=name, explains=f"what {name} is, in a sentence", patch=patch, status=status, why=why,
            images_per_s=around(speed), spread=(0.97 * speed, 1.02 * speed), over_below=over and around(over, 0.02),
            over_first=over and around(speed / 101, 0.04), stages=shrunk, step_s=sum(shrunk.values()) + 0.004,
            startup_s=1.9 + index, compile_s=11.5 if name == "compiled" else 0.0, host_bytes=410_000_000 + index,
            parity=over and ParityResult(loss=2.301, loss_below=2.3, gap=around(0.0004, 2.0), tolerance=0.02,
                                         verdict="same", why="all of the interval lies within 2 % of no difference"),
            runs=(f"trials/{name}-1", f"trials/{name}-2"), **more,
        )  # fmt: skip

    rungs = (
        rung(0, "first", (), 101.0, None),
        rung(1, "resident", ("data.loader=resident",), 190.0, 1.88, below="first", expects=("data_wait",),
             shrank={"data_wait": (0.21, 0.011)}),
        rung(2, "channels-last", ("model.memory_format=channels_last",), 240.5, 1.27, below="resident",
             expects=("forward", "backward"), shrank={"forward": (0.12, 0.09), "backward": (0.25, 0.19)}),
        rung(3, "bf16", ("train.precision=bf16",), 180.0, 0.75, "dropped", "slower: 0.75x (0.73 to 0.77)",
             below="channels-last", expects=("forward",)),
        rung(4, "compiled", ("train.compile=true",), 330.0, 1.37, below="channels-last"),
        RungResult(name=EVIL, explains=EVIL, patch=(f"data.source.root={EVIL}",), status="failed", why=f"{EVIL} failed",
                   below="compiled"),
        RungResult(name="ddp", explains="two processes", patch=("parallel.strategy=ddp",), status="left_out",
                   why="one rank has nobody to average with", below="compiled"),
        rung(7, "threads", ("train.threads=2",), 401.0, 1.21, below="compiled",
             verdict={"bottleneck": "compute", "evidence": "backward takes 61 % of a step.",
                      "try": "train.compile=true", "ceiling": "1.02x with free data"}),
    )  # fmt: skip
    return LadderResult(
        ladder=name, summary="From a plain loop to all that a CPU offers.", ranks=1, batch_size=128, rungs=rungs,
        best="threads", best_patch=tuple(word for each in rungs if each.status == "kept" for word in each.patch),
        wall_s=642.0, command=("paceline", "ladder", name, "data.source.root=/data/cifar 10"), provenance=PROVENANCE,
        **FACTS,
    )  # fmt: skip


def scale(mode="weak", ranks=(1, 2, 4, 8), failed=16):
    """Return a scaling over `ranks`, the last of which, `failed`, could not be measured."""
    points = [
        ScalePoint(
            ranks=each, nodes=max(1, each // 4), batch_size=128 * each, rank_batch=128,
            images_per_s=around(1000 * each * 0.96**index, 0.02), spread=(900.0 * each, 1100.0 * each), step_s=0.128,
            efficiency=around(0.96**index, 0.015) if index else None, exposed_s=0.002 * index if index else None,
            exposed_share=0.015 * index if index else None, straggler_share=0.007 * index if index else None,
            startup_s=2.0 + index, wall_s=31.0, bottleneck="compute", runs=(f"trials/base-{each}r-1",),
        )
        for index, each in enumerate(ranks)
    ]  # fmt: skip
    if failed:
        points.append(ScalePoint(ranks=failed, nodes=4, batch_size=128 * failed, rank_batch=128, error=f"{EVIL}: no"))
    return ScaleResult(
        mode=mode, points=tuple(points), caution="8 ranks share 2 cores: more machines would each have their own.",
        wall_s=400.0, command=("paceline", "scale", "--ranks", "1,2,4,8"), provenance=PROVENANCE, **FACTS,
    )  # fmt: skip


def batches():
    """Return a study of three batches with and without a warm-up, one of which never reaches the target."""

    def point(batch, warmup):
        is_cold = warmup == "off"
        is_reached = not (is_cold and batch == 2048)
        return BatchPoint(
            batch_size=batch, warmup=warmup, lr_rule="linear", lr=0.1 * batch / 128, seeds=3, reached=3 * is_reached,
            top1=around(0.93 - 0.01 * batch / 2048 - 0.01 * is_cold, 0.002), images_per_s=around(400.0 + batch / 8),
            to_target_s=around(9000 / batch + 30 + 20 * is_cold, 0.1) if is_reached else None,
            to_target_epochs=around(8 + batch / 512 + 4 * is_cold, 0.1) if is_reached else None,
            runs=(f"trials/b{batch}-{warmup}",),
        )  # fmt: skip

    points = [point(batch, warmup) for warmup in ("5ep", "off") for batch in (128, 512, 2048)]
    return ScaleResult(mode="batch", batches=tuple(points), target=0.75, wall_s=4000.0, provenance=PROVENANCE,
                       sentences=("Batch 2048 reaches 75 % in 0.53 of the time of batch 128.",),
                       command=("paceline", "batch-study", "--batch-sizes", "128,512,2048"), **FACTS)  # fmt: skip


def prediction(ranks=(8, 64, 512, 4096)):
    """Return a prediction from three points, whose interval has no end at the last number of ranks."""
    images = 1_281_167.0 * 10

    def time_s(num):
        return images / (400 * num) + 12 + 3 * num**0.4

    points = [MeasuredPoint(ranks=each, nodes=max(1, each // 4), rank_batch=128, images=images,
                            time_s=time_s(each) * 1.01, fitted_s=time_s(each)) for each in (1, 2, 4)]  # fmt: skip
    predictions = [
        Predicted(
            ranks=each, nodes=each // 4, rank_batch=128, images=images, time_s=time_s(each), low_s=0.9 * time_s(each),
            high_s=float("inf") if each == 4096 else 1.15 * time_s(each), step_s=0.32,
            images_per_s=images / time_s(each), efficiency=images / time_s(each) / each / 400,
            gpu_hours=each * time_s(each) / 3600, cost=2.5 * each * time_s(each) / 3600,
            dominates="collectives across nodes",
            parts={"compute": images / (400 * each), "collectives_across_nodes": 3 * each**0.4, "fixed": 12.0},
        )
        for each in ranks
    ]  # fmt: skip
    return PredictionResult(
        basis="points", source="published.csv", form="T = images/(N b) [b t + c1 [N>1] + c2 2(n-1)/n] + F",
        terms={"t": 0.0025, "c1": 0.004, "c2": 0.011, "F": 12.0}, points=tuple(points), network="",
        predictions=tuple(predictions), notes=(f"No point tells c1 from c2: {EVIL}.",),
        command=("paceline", "predict-scaling"), provenance=PROVENANCE,
    )  # fmt: skip


def tune():
    """Return a search of two rounds, of which one winner each."""

    def tried(number, name, patch, speed, ratio, status, why=""):
        parity = ParityResult(loss=2.301, loss_below=2.3, gap=around(0.0004, 2.0), tolerance=0.02, verdict="same",
                              why="all of the interval lies within 2 % of no difference")  # fmt: skip
        return TriedResult(name=name, patch=patch, over="recipe" if number == 1 else "loader", round=number, steps=20,
                           trials=3, images_per_s=speed, ratio=ratio, status=status, why=why,
                           runs=(f"trials/{number}-1",), explains=f"what {name} is, in a few words",
                           parity=ratio and parity)  # fmt: skip

    return TuneResult(
        ranks=1, first=around(101.0), best=around(240.0), gain=around(2.38, 0.04),
        best_patch=("data.loader=resident", "model.memory_format=channels_last"), recipe_file="runs/tune/tuned.yaml",
        tried=(
            tried(1, "loader", ("data.loader=resident",), 190.0, around(1.88), "won"),
            tried(1, "workers", ("data.workers=4",), 104.0, Interval(value=1.02), "no_gain", "not to be told from 1"),
            tried(2, "format", ("model.memory_format=channels_last",), 240.0, around(1.26), "won"),
            tried(2, EVIL, (f"data.source.root={EVIL}",), None, None, "failed", EVIL),
            tried(2, "batch", ("data.batch_size=4096",), None, None, "no_room", "out of memory"),
        ),
        trials=15, grid=96, stopped="no move is left", wall_s=310.0, command=("paceline", "tune"),
        provenance=PROVENANCE, first_verdict={"bottleneck": "input-bound", "evidence": "83 % of a step waits for data"},
        verdict={"bottleneck": "compute-bound", "evidence": "backward takes 61 % of a step"}, **FACTS,
    )  # fmt: skip


def sweep(values=("0", "2", "8", EVIL), key="data.workers"):
    """Return speeds over values, of which the last could not be measured."""
    points = [
        SweepPoint(value=value, patch=(f"{key}={value}",), batch_size=128, images_per_s=around(100.0 * (2 + index)),
                   spread=(95.0 * (2 + index), 105.0 * (2 + index)), is_fastest=index == len(values) - 2,
                   step_s=1.28 / (2 + index), data_wait_s=0.4 / (2 + index), epoch_s=500.0 / (2 + index),
                   stages={"data_wait": 0.4 / (2 + index), "forward": 0.5 / (2 + index)}, bottleneck="input-bound",
                   runs=(f"trials/{index}-1",))
        for index, value in enumerate(values[:-1])
    ]  # fmt: skip
    failed = SweepPoint(value=values[-1], patch=(f"{key}={values[-1]}",), error=EVIL)
    return SweepResult(
        key=key, ranks=1, points=(*points, failed), fastest=values[-2], sentence=f"{values[-2]} is the fastest.",
        wall_s=90.0, command=("paceline", "profile"), provenance=PROVENANCE, **FACTS,
    )  # fmt: skip


def all_results():
    """Return one result of each kind, by name."""
    return {
        "ladder": ladder(), "weak": scale(), "strong": scale("strong"), "batches": batches(),
        "prediction": prediction(), "tune": tune(), "sweep": sweep(),
    }  # fmt: skip


def write_experiment(path, result):
    """Write an experiment's folder as the lab does, and return it."""
    path.mkdir(parents=True)
    folder = ExperimentDir(path)
    folder.recipe.write_text("# made up\ndata:\n  batch_size: 128\n", encoding="utf-8")
    folder.write(result)
    return folder
