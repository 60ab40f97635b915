"""SGD, LARS and NovoGrad at a batch of 2,048, with and without warm-up: what large-batch tutorials argue about.

    python benchmarks/large_batch.py --root DIR --seeds 0 --json benchmarks/results/large-batch-fashion.json

Fashion-MNIST, speednet94 at a quarter of its width, the same few epochs for all, batch norm over micro-batches of 256
as on GPUs of that many each. Learning rates are chosen per optimizer from the short list below, at the first seed, by
the accuracy with warm-up; the list and all its outcomes are in the record, so that nobody has to take the choice on
trust. Batch 128 with plain SGD is the reference at the top.
"""

import argparse
from pathlib import Path
from typing import Any

import accuracy
import record

COMMON = (
    "synthetic",
    "data.source.name=fashion_mnist",
    "data.augment=[flip]",
    "model.name=speednet94",
    "model.width=0.25",
    "train.precision=bf16",
    "train.eval_every=1ep",
    "checkpoint.every=off",
    "schedule.name=cosine",
)
WEIGHTS = "optim.weight_decay=5e-4"
REFERENCE = ("data.batch_size=128", "optim.name=sgd", "optim.lr=0.1", "optim.nesterov=true", WEIGHTS)
OPTIMIZERS: dict[str, tuple[tuple[str, ...], tuple[float, ...]]] = {
    "sgd": (("optim.name=sgd", "optim.nesterov=true", WEIGHTS), (0.4, 1.6, 6.4)),
    "lars": (("optim.name=lars", "optim.trust=0.02", WEIGHTS, "optim.decay_norm_and_bias=false"), (4.0, 16.0)),
    "novograd": (("optim.name=novograd", "optim.grad_averaging=true", "optim.weight_decay=1e-3"), (0.15, 1.0, 4.0)),
}


def main() -> None:
    """Train all, print the table, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="folder of Fashion-MNIST")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2, help="epochs of warm-up, where there is one")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    args = parser.parse_args()
    common = [*COMMON, f"data.source.root={args.root}", f"train.epochs={args.epochs}"]
    rows = {"sgd at 128": [top1([*common, *REFERENCE], seed) for seed in args.seeds]}
    searched: dict[str, dict[str, float]] = {}
    for name, (arguments, rates) in OPTIMIZERS.items():
        large = [*common, *arguments, "data.batch_size=2048", "train.accumulate=8"]
        warm = f"schedule.warmup={args.warmup}ep"
        tried = {rate: top1([*large, warm, f"optim.lr={rate}"], args.seeds[0]) for rate in rates}
        best = max(tried, key=lambda rate: tried[rate])
        searched[name] = {str(rate): found for rate, found in tried.items()}
        others = [top1([*large, warm, f"optim.lr={best}"], seed) for seed in args.seeds[1:]]
        rows[f"{name} at 2048, lr {best:g}, warm-up"] = [tried[best], *others]
        rows[f"{name} at 2048, lr {best:g}, no warm-up"] = [
            top1([*large, f"optim.lr={best}"], seed) for seed in args.seeds
        ]
    table: dict[str, dict[str, Any]] = {name: accuracy.over_seeds(values) for name, values in rows.items()}
    for name, facts in table.items():
        print(f"{name:45} {facts['mean']:.4f}  n {facts['n']}")
    values = {"benchmark": "large_batch", **record.provenance(), "epochs": args.epochs, "warmup_epochs": args.warmup}
    values["command"] = accuracy.without_folders(values["command"].replace(args.root, "DIR"))
    if args.json:
        record.write(args.json, {**values, "top1": table, "searched": searched})


def top1(arguments: list[str], seed: int) -> float:
    """Return the top-1 accuracy at the end of a run."""
    run = accuracy.trained([*arguments, f"seed={seed}"])
    print(f"{' '.join(arguments[len(COMMON) + 2 :])} seed={seed}: {accuracy.summary(run)}", flush=True)
    found: float = run["result"]["eval"]["top1"]
    return found


if __name__ == "__main__":
    main()
