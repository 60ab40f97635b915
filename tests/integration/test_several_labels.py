"""Several labels per image and soft labels, on real digits: the same on two ranks, resumed, and in scikit-learn."""

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from sklearn import metrics as sk
from sklearn.datasets import load_digits

NAMES = [str(number) for number in range(10)]
ARGS = (
    *("train", "digits", "model.norm=none", "model.width=0.1", "data.image_size=12", "data.eval_resize=stretch"),
    *("data.augment=[pad_crop,mixup]", "data.batch_size=20", "data.source.train=train.csv", "data.source.val=val.csv"),
    *("data.source.channels=1", "optim.lr=0.05", "train.epochs=auto", "train.steps=12", "train.eval_every=4st"),
    *("checkpoint.every=4st", "log.every=1st", "schedule.warmup=0st", "parallel.threads=1", "log.tensorboard=off"),
    *("data.source.name=manifest", "data.workers=0", "train.label_smoothing=0", "log.report=off", "log.worst=0"),
    *("measure.telemetry=off", "--json"),
)
BCE = ("train.loss=bce", "data.source.separator=;")


def write_pairs(
    folder: Path, images: NDArray[np.uint8], labels: NDArray[np.int64], sizes: Sequence[int] = (120, 37)
) -> dict[str, NDArray[np.int64]]:
    """Write pairs of images side by side with the labels of both, some blank ones without; return the truth [N, 10]."""
    draws, truth = np.random.default_rng(0), {}
    for split, num, part in zip(
        ("train", "val"), sizes, np.split(np.arange(len(labels)), [len(labels) // 2]), strict=True
    ):
        truth[split] = np.zeros((num, len(NAMES)), dtype=np.int64)
        with (folder / f"{split}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["path", "label"])
            for index in range(num):
                pair = draws.choice(part, 2)
                pixels = np.concatenate(images[pair], axis=1)
                if index % 10 == 9:
                    pixels = np.zeros_like(pixels)
                else:
                    truth[split][index, labels[pair]] = 1
                Image.fromarray(pixels).save(folder / f"{split}-{index}.jpg", quality=95)
                rows.writerow(
                    [f"{split}-{index}.jpg", ";".join(NAMES[each] for each in truth[split][index].nonzero()[0])]
                )
    return truth


@pytest.fixture
def digit_pairs(tmp_path: Path) -> NDArray[np.int64]:
    pixels, labels = load_digits(return_X_y=True)
    return write_pairs(tmp_path, (pixels.reshape(-1, 8, 8) * 15.9).astype(np.uint8), labels)["val"]


def predicted(paceline: Callable, run: str, num_images: int, threshold: float = 1e-9) -> NDArray[np.float64]:
    """Return the saved probabilities [N, 10] of `paceline predict` for all validation images."""
    files = [f"val-{index}.jpg" for index in range(num_images)]
    lines = paceline("predict", run, *files, "--format", "jsonl").out.splitlines()
    scores = np.zeros((num_images, len(NAMES)))
    for row, line in enumerate(lines):
        for guess in json.loads(line)["predictions"]:
            scores[row, NAMES.index(guess["class"])] = guess["probability"]
    return scores


def reference_metrics(truth: NDArray[np.int64], scores: NDArray[np.float64], threshold: float) -> dict[str, float]:
    """Return scikit-learn's metrics; `scores` below the threshold may be 0."""
    found = scores > threshold
    values = {
        f"{average}{name}": function(truth, found, average=average.strip("_") or "macro", zero_division=0)
        for average in ("", "weighted_", "micro_")
        for name, function in (("precision", sk.precision_score), ("recall", sk.recall_score), ("f1", sk.f1_score))
    }
    return values | {
        "subset_accuracy": sk.accuracy_score(truth, found),
        "hamming_loss": sk.hamming_loss(truth, found),
    }


def test_metrics_are_those_of_scikit_learn_on_one_and_two_ranks(paceline, tmp_path: Path, digit_pairs) -> None:
    """All scores are above a threshold of 1e-9, so `predict` lists every probability."""
    paceline(*ARGS, *BCE, "train.label_threshold=1e-9", "--run-dir", "run").result  # noqa: B018
    scores = predicted(paceline, "run", len(digit_pairs))
    assert (scores > 0).all()
    averages = {
        f"{weight}{name}": function(digit_pairs, scores, average=weight.strip("_") or "macro")
        for weight in ("", "weighted_")
        for name, function in (("auroc", sk.roc_auc_score), ("ap", sk.average_precision_score))
    }
    for ranks in "12":
        found = paceline("eval", "run", "train.label_threshold=0.2", "--ranks", ranks, "--classes", "--json").result
        expected = reference_metrics(digit_pairs, scores, 0.2) | averages
        assert found["images"] == len(digit_pairs) and found["metrics"].keys() == expected.keys()
        assert found["metrics"] == pytest.approx(expected, abs=1e-6)
        assert found["loss"] == pytest.approx(sk.log_loss(digit_pairs.ravel(), scores.ravel()), abs=1e-5)
        assert not found.keys() & {"top1", "top5", "ece", "mean_class_accuracy", "health"}
        for number, each in enumerate(found["classes"]):
            truth, score = digit_pairs[:, number], scores[:, number]
            assert (each["images"], each["predicted"]) == (truth.sum(), (score > 0.2).sum())
            assert each["auroc"] == pytest.approx(sk.roc_auc_score(truth, score), abs=1e-6)
            assert each["ap"] == pytest.approx(sk.average_precision_score(truth, score), abs=1e-6)


def test_two_ranks_train_what_one_does_and_a_killed_run_resumes_to_the_same_bits(
    paceline, tmp_path: Path, cut, lines_of, digit_pairs
) -> None:
    results = {}
    for ranks in "12":
        whole = paceline(*ARGS, *BCE, "--ranks", ranks, "--run-dir", f"whole{ranks}").result
        results[ranks] = whole, [row["loss"] for row in lines_of(tmp_path / f"whole{ranks}" / "steps.jsonl")]
    cut(tmp_path / "whole2", tmp_path / "cut2", 4)
    resumed = paceline(*ARGS, *BCE, "--ranks", "2", "--run-dir", "cut2", "--resume").result
    assert resumed["weights_sha256"] == whole["weights_sha256"] and resumed["eval"] == whole["eval"]
    # The ranks' gradients are summed in another order.
    assert results["2"][1] == pytest.approx(results["1"][1], abs=1e-4) and len(results["1"][1]) == 12
    assert results["2"][0]["eval"]["metrics"] == pytest.approx(results["1"][0]["eval"]["metrics"], abs=1e-4)
    (first, *_), last = results["1"][1], results["1"][1][-1]
    assert last < 0.9 * first, "it learns"
    assert results["1"][0]["monitor"] == "ap" and results["1"][0]["health"] == []


def test_all_loaders_give_the_same_targets(paceline, digit_pairs) -> None:
    using = [("data.workers=0",), *((f"data.loader={name}", "data.workers=1") for name in ("threads", "processes"))]
    runs = [paceline(*ARGS, *BCE, *more, "--run-dir", f"run{number}").result for number, more in enumerate(using)]
    assert len({run["weights_sha256"] for run in runs}) == 1 and len(runs) == 3


def test_a_pack_trains_to_the_bits_of_its_source(paceline, tmp_path: Path, digit_pairs) -> None:
    source = ("data.source.val=val.csv", "data.source.channels=1", "data.source.separator=;")
    assert paceline("data", "pack", "train.csv", "out.pack", *source).code == 0
    args = [each for each in ARGS if not each.startswith("data.source.")]
    losses = []
    for loader in ("threads", "native"):
        using = (f"data.loader={loader}", "data.workers=1")
        files = paceline(*ARGS, *BCE, *using, "--run-dir", f"files-{loader}").result
        packed = (*args, *using, "data.source={name: pack, root: out.pack}", "train.loss=bce")
        result = paceline(*packed, "--run-dir", loader).result
        assert result["weights_sha256"] == files["weights_sha256"] and result["eval"] == files["eval"]
        losses.append(files["eval"]["loss"])
    # The native core resizes with its own rounding.
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)


def test_a_run_shows_what_has_a_meaning(paceline, tmp_path: Path, lines_of, digit_pairs) -> None:
    more = ("train.ema=on", "train.eval_train=on", "log.report=on", "log.worst=16")
    text = paceline(*(each for each in ARGS if each != "--json"), *BCE, *more, "--run-dir", "run")
    shown = text.out + text.err
    paceline("eval", "run", "--calibrate").assert_error("--calibrate", "one class per image", "leave it out")
    assert "AP 0." in shown and "top1" not in shown and "top-1" not in shown and "nan" not in shown
    for path in ("result.json", "evals.jsonl", "metrics.csv", "report.html"):
        content = (tmp_path / "run" / path).read_text()
        assert "subset_accuracy" in content or path == "report.html"
        for absent in ("top1", "top5", "Top-1", "NaN", ">nan", "mean_class_accuracy", '"ece"'):
            assert absent not in content.replace("top1-", ""), (path, absent)
    assert not (tmp_path / "run" / "confusion.csv").exists() and not (tmp_path / "run" / "worst").exists()
    (row, *_) = lines_of(tmp_path / "run" / "evals.jsonl")
    assert {"ap", "hamming_loss", "ema_ap", "ema_loss", "train_loss"} <= row.keys()
    markdown = paceline("report", "run", "--format", "md").out
    assert "top-1" not in markdown and "subset accuracy" in markdown
    exported = paceline("export", "run", "--format", "torch", "--out", "model.pt2", "--json").result
    assert exported["parity"]["labels"] == exported["parity"]["num_images"]
    card = (tmp_path / "model.pt2.md").read_text()
    assert "| AP |" in card and "if logit > 0]" in card and "sigmoid" in card


def test_soft_labels_train_with_cross_entropy_and_mixup(paceline, tmp_path: Path, lines_of, digit_pairs) -> None:
    """The labels of a pair share 1: loss and accuracy are those of scikit-learn's formulas on the saved predictions."""
    for split in ("train", "val"):
        lines = (tmp_path / f"{split}.csv").read_text().splitlines()[1:]
        rows = []
        for line in lines:
            path, label = line.split(",")
            given = [int(each) for each in label.split(";") if each] or [0]
            shares = np.zeros(10)
            shares[given] = [0.75, 0.25] if len(given) == 2 else 1.0
            rows.append([path, *(f"{share:g}" if share else "" for share in shares)])
        with (tmp_path / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["path", *NAMES], *rows])
    args = (*ARGS, "data.source.class_columns=auto", "train.class_weights=balanced")
    results = [paceline(*args, "--ranks", ranks, "--run-dir", f"on{ranks}").result for ranks in "12"]
    assert results[1]["eval"] == pytest.approx(results[0]["eval"], abs=1e-4)
    targets = np.array([[float(cell or 0) for cell in row[1:]] for row in rows])
    files = [f"val-{index}.jpg" for index in range(len(rows))]
    lines = paceline("predict", "on1", *files, "--format", "jsonl", "--top", "10").out.splitlines()
    scores = np.zeros_like(targets)
    for row, line in enumerate(lines):
        for guess in json.loads(line)["predictions"]:
            scores[row, NAMES.index(guess["class"])] = guess["probability"]
    assert results[0]["eval"]["loss"] == pytest.approx(-(targets * np.log(scores)).sum(axis=1).mean(), abs=1e-4)
    assert results[0]["eval"]["top1"] == pytest.approx((scores.argmax(1) == targets.argmax(1)).mean())


@pytest.mark.real_data
def test_pairs_of_garments(paceline, tmp_path: Path, real_data) -> None:
    """Two images of Fashion-MNIST side by side, evaluated as scikit-learn does."""
    from paceline.data.sources.fashion_mnist import load_fashion_mnist
    from paceline.recipe.schema.source import FashionMnist

    section = FashionMnist(root=str(real_data("fashion-mnist")), download=False)
    data = load_fashion_mnist(section, may_download=False)
    truth = write_pairs(tmp_path, data.train.images[:2000, :, :, 0], data.train.labels[:2000], (200, 50))["val"]
    paceline(*ARGS, *BCE, "train.label_threshold=1e-9", "--run-dir", "run").result  # noqa: B018
    scores = predicted(paceline, "run", len(truth))
    found = paceline("eval", "run", "train.label_threshold=0.2", "--ranks", "2", "--json").result["metrics"]
    expected = reference_metrics(truth, scores, 0.2) | {"ap": sk.average_precision_score(truth, scores)}
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
