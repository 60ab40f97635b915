"""Model cards: facts of a run, and fields to fill in."""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard
from PIL import Image

from paceline.core.errors import PacelineError
from paceline.core.results import ClassCount
from paceline.core.run_dir import RunDir
from paceline.core.statistics import wilson_interval
from paceline.inference.classifier import load_classifier
from paceline.inference.formats import ExportModel, build_config
from paceline.inference.model_card import (
    FILL_IN,
    ConfusedPair,
    measured_energy_wh,
    read_checkpoint_record,
    render_model_card,
)

from . import made_run


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return load_classifier(made_run.write(tmp_path_factory.mktemp("card") / "run"), device="cpu")


def written(classifier, **changes):
    record = replace(read_checkpoint_record(classifier.run, classifier.checkpoint), **changes)
    return render_model_card(
        classifier, record, name="a", library="onnx", input_description="float32", usage_code="ask(images)\n"
    )


def test_the_card_has_the_records_of_the_run(classifier):
    card = written(classifier)
    assert "library_name: onnx" in card and "pipeline_tag: image-classification" in card
    assert "200 validation images" in card
    assert "| top-1 | 81.00 % (75.00 % to 85.83 %) |" in card  # 162 of 200
    assert "| training images | 64 |" in card and "| step | 12 |" in card
    assert "| hardware | 2 x H200 per node |" in card and "torch 2.15.0" in card
    assert f"`{classifier.recipe.hash}`" in card
    assert "```python\nask(images)\n```" in card


def test_the_hub_reads_the_accuracy_from_the_header_unless_the_file_has_another(classifier):
    data = ModelCard(written(classifier)).data
    assert (data.library_name, data.license, data.model_name) == ("onnx", "unknown", "a")
    assert [(each.metric_name, each.metric_value) for each in data.eval_results] == [("top-1", 0.81), ("top-5", 0.975)]
    for other in (written(classifier, evaluation=None), written(replace(classifier, evaluated_image_size=8))):
        assert "model-index" not in other


def test_the_weakest_classes_come_first_and_one_without_a_mistake_is_left_out(classifier):
    table = written(classifier).partition("lowest accuracy")[2].partition("## ")[0]
    assert re.findall(r"^\| (\d) \| (\S+) %", table, re.MULTILINE) == [("1", "64.00"), ("2", "80.00"), ("3", "80.00")]


def test_what_no_run_knows_is_marked(classifier):
    card = written(classifier)
    for heading in ("Intended use", "Data", "Limits", "License"):
        assert FILL_IN in card.partition(f"## {heading}")[2].partition("\n## ")[0], heading
    assert "license: unknown\n" in card


def test_no_path_of_this_machine_is_in_a_card_or_a_configuration(tmp_path):
    root = tmp_path / "of-somebody"
    for name in ("train/a", "train/b", "val/a", "val/b"):
        (root / name).mkdir(parents=True)
        for number in range(16):
            Image.new("RGB", (16, 16)).save(root / name / f"{number}.png")
    args = ("data.source.name=folder", f"data.source.root={root}", "data.image_size=16", "data.batch_size=16")
    run = made_run.write_of(tmp_path / "run", *args, "model.name=resnet18_cifar", "model.width=0.125")
    named = load_classifier(run, device="cpu")
    assert str(root) in (run / "recipe.yaml").read_text()
    for text in (written(named), json.dumps(build_config(named))):
        assert "resnet18_cifar" in text and str(tmp_path) not in text


def test_names_of_classes_are_names_and_no_markup(classifier):
    names = ("cat\n\n## License\n\nMIT", "<img src=x onerror=alert(1)>", "a|b`c*d_[e](f)", "caf\udce9")
    record = read_checkpoint_record(classifier.run, classifier.checkpoint)
    counts = tuple(ClassCount(name, 9, 1) for name in names)
    evaluation = replace(record.evaluation, classes=counts, confused=(ConfusedPair(names[0], names[1], 3),))
    card = written(replace(classifier, classes=names), evaluation=evaluation)
    assert re.findall("^#+ .*$", card, re.MULTILINE) == re.findall("^#+ .*$", written(classifier), re.MULTILINE)
    assert "<" not in card and r"a\|b\`c\*d\_\[e\](f)" in card and r"caf\\udce9" in card
    exported = ExportModel(replace(classifier, classes=names), with_preprocessing=False)
    assert exported.metadata()["classes"][3] == r"caf\udce9"


def test_a_machine_that_calls_itself_what_it_likes_is_one_row(classifier):
    card = written(classifier, machine={"cuda_devices": ["H200 |\n\n# All"], "torch": "2.15"})
    assert r"| hardware | 1 x H200 \|\\n\\n\# All per node |" in card


def test_a_checkpoint_that_was_not_evaluated_has_no_accuracy(classifier):
    assert "Not measured" in written(classifier, evaluation=None)


def test_a_run_that_left_nothing_but_its_recipe_has_a_card(classifier):
    card = written(classifier, evaluation=None, plan={}, machine={}, result=None)
    assert "hardware" not in card and "## License" in card


def test_a_checkpoint_within_the_run_has_its_own_progress(classifier):
    run = SimpleNamespace(
        epochs=3.0, images_seen=1152, steps=36, status="completed", lr="0.1", world_size=1,
        goodput=None, time=SimpleNamespace(wall_s=9.0),
    )  # fmt: skip
    values = {"result": run, "plan": {"steps_per_epoch": 12}, "images_seen": 384}
    middle = written(classifier, **values, energy_wh=700)
    assert "| trained | 1 epoch, 384 images; the run: 3 epochs, 1,152 images, completed |" in middle
    assert "| time | 9.00 s of wall clock (of the whole run) |" in middle and middle.count("(of the whole run)") == 2
    assert "| trained | 12 steps; the run: 3 epochs" in written(
        classifier, **{**values, "plan": {}, "images_seen": None}
    )
    assert "| trained | 3 epochs, 1,152 images, completed |" in (last := written(classifier, **values, step=36))
    assert "of the whole run" not in last


def test_eval_views_that_are_not_exported_are_noted(classifier):
    data = classifier.recipe.data.model_copy(update={"eval_views": 6})
    recipe = classifier.recipe.model_copy(update={"data": data})
    assert "averaged over 6 views per image, which the exported model does not do" in written(
        replace(classifier, recipe=recipe)
    )


def test_the_card_has_the_accuracy_of_averaged_weights_if_any(tmp_path):
    run = made_run.write(tmp_path / "run")
    row = '{"step": 12, "images": 50, "top1": 0.5, "top5": 0.9, "ema_top1": 0.6, "ema_top5": 1.0}\n'
    (run / "evals.jsonl").write_text(row)
    evaluation = read_checkpoint_record(run, run / "checkpoints" / "step-00000012").evaluation
    assert evaluation.description == "the averaged weights" and (evaluation.top1.value, evaluation.top5.value) == (
        0.6,
        1,
    )


def test_only_the_last_evaluation_has_classes(tmp_path):
    run = made_run.write(tmp_path / "run")
    assert read_checkpoint_record(run, run / "checkpoints" / "step-00000012").evaluation.classes
    assert read_checkpoint_record(run, run / "checkpoints" / "step-00000006").evaluation.classes == ()
    assert read_checkpoint_record(run, run / "checkpoints" / "step-00000009").evaluation is None


def test_a_damaged_file_is_named(tmp_path):
    run = made_run.write(tmp_path / "run")
    (run / "plan.json").write_text("{")
    with pytest.raises(PacelineError, match=r"plan.json: cannot be read: .* \(remove it, or fix it\)$"):
        read_checkpoint_record(run, run / "checkpoints" / "step-00000012")


@pytest.mark.parametrize("correct, total", [(0, 10), (1, 3), (81, 100), (9_412, 10_000), (10, 10)])
def test_wilsons_bounds_are_the_shares_from_which_the_count_is_that_far(correct, total):
    found = wilson_interval(correct, total)
    assert found.value == correct / total and found.n == total and 0 <= found.low <= found.value <= found.high <= 1
    for bound in {found.low, found.high} - {0.0, 1.0}:
        # The score test's own equation, of which the bounds are the roots; a float's rounding is 1e-16.
        distance = abs(found.value - bound) / math.sqrt(bound * (1 - bound) / total)
        assert distance == pytest.approx(1.959963984540054, rel=1e-9)


def test_confusions_are_listed_most_frequent_first(tmp_path):
    run = made_run.write(tmp_path / "run")
    (run / "confusion.csv").write_text("true\\predicted,cat,dog,a|b\r\ncat,9,1,0\r\ndog,0,8,2\r\na|b,7,0,1\r\n")
    table = written(load_classifier(run, device="cpu")).partition("most frequent")[2].partition("## ")[0]
    assert re.findall(r"^\| (.*) as (.*) \| (\d) \|$", table, re.MULTILINE) == [
        ("a\\|b", "cat", "7"), ("dog", "a\\|b", "2"), ("cat", "dog", "1")
    ]  # fmt: skip


def test_energy_is_the_mean_power_by_time_of_all_nodes(classifier, tmp_path):
    samples = [(0, 100), (10, 100), (40, 300)]  # 100 W for 10 s, then 200 W for 30 s: 175 W
    for node in range(2):
        rows = [{"unix_s": at, "gpus": [{"power_w": watts - 40}, {"power_w": 40}]} for at, watts in samples]
        (tmp_path / f"telemetry.node{node}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = SimpleNamespace(goodput=SimpleNamespace(wall_s=7300, down_s=100))
    assert measured_energy_wh(RunDir(tmp_path), result) == pytest.approx(2 * 175 * 2)  # sums of binary fractions
    assert "| energy | 0.700 kWh, all GPUs" in written(classifier, energy_wh=700)


def test_the_time_in_which_no_process_ran_has_no_power(tmp_path):
    samples = [*((at, 600) for at in range(0, 60, 10)), *((at, 600) for at in range(9000, 9060, 10))]
    samples[6] = (9000, 100)  # the first sample after the queue, before there is work
    rows = [{"unix_s": at, "gpus": [{"power_w": watts}]} for at, watts in samples]
    (tmp_path / "telemetry.node0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = SimpleNamespace(goodput=SimpleNamespace(wall_s=9050, down_s=8950))
    # 100 s of processes: at 600 W but for a span of 10 s of ten at 350 W, which is 575 W on average.
    assert measured_energy_wh(RunDir(tmp_path), result) == pytest.approx(575 * 100 / 3600)


def test_energy_is_unknown_if_a_sample_has_no_power(tmp_path):
    result = SimpleNamespace(goodput=None, time=SimpleNamespace(wall_s=60))
    assert measured_energy_wh(RunDir(tmp_path), result) is None
    (tmp_path / "telemetry.node0.jsonl").write_text('{"unix_s": 1}\n{"unix_s": 2, "gpus": [{"index": 0}]}\n')
    assert measured_energy_wh(RunDir(tmp_path), result) is None
