"""`measure.verdict`: the bottleneck, from summaries made by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import RecipeError
from paceline.core.results import CommunicationResult, CpuResult, StragglerResult
from paceline.core.stages import WATCHED
from paceline.core.units import Duration
from paceline.measure import ClockSummary, StageClock, StageTotal
from paceline.measure.bottleneck import Ceilings, RunSettings, find_bottleneck
from paceline.recipe.load import Layer, Patch, load, merge_layers, validate
from paceline.recipe.schema import Recipe

GPU = RunSettings(device_type="cuda")


def summary_of(*, starved: float = 0.0, pauses: dict[str, float] | None = None, **stages_s: float) -> ClockSummary:
    """Return the summary of 10 steps of 10 s in all; what the stages leave of it is residual."""
    assert set(stages_s) <= set(WATCHED)
    return ClockSummary(
        n=10,
        images=320,
        wall_s=10.0,
        stages={name: StageTotal(seconds, seconds, seconds / 10) for name, seconds in stages_s.items()},
        warmup_s=0.0,
        pauses=pauses or {},
        unfinished_s=0.0,
        step_s=(1.0,) * 10,
        starved=starved,
    )


def late(rank: int | None, seconds: float, stage: str | None = None, late_steps: float = 0.5) -> StragglerResult:
    """Return that `rank`, or a different rank in each step, is `seconds` late in a step of 1 s."""
    late_s = 0.0 if rank is None else seconds
    return StragglerResult(lost_s=seconds, share=seconds, rank=rank, stage=stage, late_s=late_s, late_steps=late_steps)


CASES = {
    "all of it is compute": (summary_of(forward=4.0, backward=6.0), GPU, None, "compute-bound"),
    "a fifth is waiting for data": (summary_of(data_wait=2.0, forward=8.0), GPU, None, "input-bound"),
    "less than a fifth is": (summary_of(data_wait=1.9, forward=8.1), GPU, None, "compute-bound"),
    "a fifth is copying": (summary_of(h2d=2.0, forward=8.0), GPU, None, "copy-bound"),
    "copying takes longer than waiting": (summary_of(data_wait=2.5, h2d=4.0, forward=3.5), GPU, None, "copy-bound"),
    "waiting takes longer than copying": (summary_of(data_wait=4.0, h2d=2.5, forward=3.5), GPU, None, "input-bound"),
    "a fifth is reading values": (summary_of(sync=2.0, forward=8.0), RunSettings(), None, "sync-bound"),
    "a GPU without work meanwhile": (summary_of(sync=2.0, forward=8.0), GPU, None, "sync-bound"),
    "a fifth is logging": (summary_of(log=2.0, forward=8.0), GPU, None, "logging-bound"),
    "the GPU ran dry": (summary_of(forward=5.0, backward=5.0, starved=0.9), GPU, None, "launch-bound"),
    "it ran dry in half the steps": (summary_of(forward=5.0, backward=5.0, starved=0.5), GPU, None, "compute-bound"),
    "it ran dry for want of data": (summary_of(data_wait=4.0, forward=6.0, starved=0.9), GPU, None, "input-bound"),
    "a CPU never queues": (summary_of(forward=10.0, starved=1.0), RunSettings(), None, "compute-bound"),
    "a fifth is the wire": (
        summary_of(forward=8.0, exposed_communication=2.0),
        GPU,
        late(None, 0.0),
        "communication-bound",
    ),
    "all of it is waiting for another rank": (
        summary_of(forward=5.0, exposed_communication=5.0),
        GPU,
        late(2, 0.5, "backward"),
        "straggler-bound",
    ),
    "the wire takes more than the other rank": (
        summary_of(forward=3.0, exposed_communication=7.0),
        GPU,
        late(2, 0.3, "backward"),
        "communication-bound",
    ),
    "the other rank takes more than the wire": (
        summary_of(forward=3.0, exposed_communication=7.0),
        GPU,
        late(2, 0.4, "backward"),
        "straggler-bound",
    ),
    # Slowed by a fifth, a step takes 1.2 times as long, and a sixth of it is lost.
    "another rank is slowed by a fifth": (
        summary_of(forward=8.3, exposed_communication=1.7),
        RunSettings(),
        late(1, 1 / 6, "backward"),
        "straggler-bound",
    ),
    "this rank is slowed by a fifth": (
        summary_of(forward=9.9, exposed_communication=0.1),
        RunSettings(),
        late(0, 1 / 6, "forward"),
        "straggler-bound",
    ),
    "this rank alone waits for data": (
        summary_of(data_wait=4.5, forward=5.5),
        RunSettings(),
        late(0, 0.4, "data_wait"),
        "straggler-bound",
    ),
    "all ranks wait for data, and this one a little more": (
        summary_of(data_wait=4.5, forward=5.5),
        RunSettings(),
        late(0, 0.15, "data_wait"),
        "input-bound",
    ),
    "now one rank is late and now another": (
        summary_of(forward=7.5, exposed_communication=2.5),
        RunSettings(),
        late(None, 0.2),
        "straggler-bound",
    ),
    "now one rank is a little late and now another": (
        summary_of(forward=7.5, exposed_communication=2.5),
        RunSettings(),
        late(None, 0.15),
        "compute-bound",
    ),
    "another rank stalls once": (
        summary_of(forward=6.0, exposed_communication=4.0),
        RunSettings(),
        late(None, 0.4, late_steps=0.1),
        "compute-bound",
    ),
    "another rank stalls once, for longer than all the rest": (
        summary_of(forward=4.0, exposed_communication=6.0),
        RunSettings(),
        late(None, 0.6, late_steps=0.1),
        "unknown",
    ),
    "this rank is late now and then, and waits for the wire": (
        summary_of(forward=7.0, exposed_communication=3.0),
        RunSettings(),
        StragglerResult(lost_s=0.1, share=0.1, rank=0, stage="forward", late_s=0.08),
        "communication-bound",
    ),
    "ranks are a twentieth apart": (summary_of(forward=10.0), RunSettings(), late(1, 0.05), "compute-bound"),
    "evaluation takes most": (summary_of(forward=9.0, pauses={"evaluate": 42.0}), GPU, None, "evaluation-bound"),
    "evaluation takes half": (summary_of(forward=9.0, pauses={"evaluate": 10.0}), GPU, None, "evaluation-bound"),
    "evaluation takes less": (summary_of(forward=9.0, pauses={"evaluate": 9.9}), GPU, None, "compute-bound"),
    "saving takes most": (summary_of(forward=9.0, pauses={"checkpoint": 11.0}), GPU, None, "checkpoint-bound"),
    "starting the loader takes most": (
        summary_of(forward=9.0, pauses={"epoch_boundary": 11.0}),
        GPU,
        None,
        "input-bound",
    ),
    "pauses take most, each of them less": (
        summary_of(forward=9.0, pauses={"evaluate": 9.0, "checkpoint": 9.0}),
        GPU,
        None,
        "compute-bound",
    ),
    "no stage covers most of it": (summary_of(forward=4.0), GPU, None, "unknown"),
    "logging takes most of it": (summary_of(forward=4.0, other=5.0), GPU, None, "unknown"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_largest_loss_above_its_threshold_is_the_bottleneck(case: str) -> None:
    summary, settings, straggler, bottleneck = CASES[case]

    assert find_bottleneck(summary, settings, straggler=straggler).bottleneck == bottleneck


def test_the_table_has_every_class() -> None:
    assert {bottleneck for *_, bottleneck in CASES.values()} == {
        "input-bound",
        "copy-bound",
        "compute-bound",
        "launch-bound",
        "communication-bound",
        "straggler-bound",
        "evaluation-bound",
        "checkpoint-bound",
        "sync-bound",
        "logging-bound",
        "unknown",
    }


def test_a_run_that_only_waits_is_input_bound_without_a_ceiling() -> None:
    seconds = [0.0]
    clock = StageClock(now=lambda: seconds[0])
    with clock.stage("data_wait"):
        seconds[0] += 2.0
    clock.end_step(images=1)

    assert find_bottleneck(clock.drain(), RunSettings(workers=0, cores=8)).to_dict() == {
        "bottleneck": "input-bound",
        "evidence": "Waiting for data took 2 s of the 2 s of 1 step (100 %).",
        "ceiling": "",
        "try": "",
    }


def test_waiting_while_the_device_has_work_is_no_bottleneck() -> None:
    """A host that runs ahead of its GPU waits for data at no cost."""
    stages = {"data_wait": StageTotal(6.0, 0.1, 0.6), "forward": StageTotal(1.0, 9.0, 0.1)}
    summary = replace(summary_of(), stages=stages)

    assert find_bottleneck(summary, GPU).bottleneck == "compute-bound"


@pytest.mark.parametrize(
    ("data_wait_s", "workers", "to_try"),
    [(2.0, 0, "data.workers=1"), (8.0, 0, "data.workers=4"), (5.0, 2, "data.workers=4"), (9.0, 4, "data.workers=7")],
)
def test_workers_to_try_decode_a_batch_while_the_rest_of_a_step_runs(
    data_wait_s: float, workers: int, to_try: str
) -> None:
    summary = summary_of(data_wait=data_wait_s, forward=10 - data_wait_s)

    assert find_bottleneck(summary, RunSettings(workers=workers, cores=8)).try_ == to_try


def test_a_rank_that_computes_on_a_cpu_keeps_a_core() -> None:
    summary = summary_of(data_wait=8.0, forward=2.0)

    assert find_bottleneck(summary, RunSettings(workers=0, cores=4)).try_ == "data.workers=3"
    assert find_bottleneck(summary, RunSettings(workers=0, cores=4, device_type="cuda")).try_ == "data.workers=4"
    assert find_bottleneck(summary, RunSettings(workers=0, cores=1)).try_ == ""


def test_files_are_to_be_packed_where_there_are_no_cores_left_to_read_them() -> None:
    waiting = summary_of(data_wait=8.0, forward=2.0)

    assert find_bottleneck(waiting, RunSettings(workers=1, cores=8, has_files=True)).try_.startswith("data.workers=")
    assert (
        "paceline data pack SRC OUT.pack"
        in find_bottleneck(waiting, RunSettings(workers=8, cores=8, has_files=True)).try_
    )
    assert find_bottleneck(
        waiting, replace(GPU, workers=4, cores=4, augments_on="host", has_files=True)
    ).try_.startswith("pack")


def test_nothing_is_tried_without_the_setting_or_the_cores_for_it() -> None:
    waiting = summary_of(data_wait=8.0, forward=2.0)

    assert find_bottleneck(waiting).try_ == ""
    assert find_bottleneck(waiting, RunSettings(workers=8, cores=8)).try_ == ""


def test_evaluation_that_takes_more_than_all_else_is_made_rarer() -> None:
    summary = summary_of(forward=9.0, pauses={"evaluate": 42.0})

    assert find_bottleneck(summary, RunSettings(eval_every=Duration(1, "ep"))).to_dict() == {
        "bottleneck": "evaluation-bound",
        "evidence": "Evaluation took 42 s of 52 s (81 %).",
        "ceiling": "at most 5.2x without evaluation, all else unchanged",
        "try": "train.eval_every=5ep",
    }
    assert find_bottleneck(summary).try_ == ""


def test_saving_is_moved_to_the_background_before_it_is_made_rarer() -> None:
    summary = summary_of(forward=9.0, pauses={"checkpoint": 15.0})
    used = RunSettings(save_every=Duration(10, "min"), saves_in_background=True)

    assert find_bottleneck(summary, replace(used, saves_in_background=False)).try_ == "checkpoint.background=on"
    assert find_bottleneck(summary, used).try_ == "checkpoint.every=20min"
    assert find_bottleneck(summary).try_ == ""


def test_gradients_are_sent_in_16_bits_where_they_are_not_yet() -> None:
    summary = summary_of(forward=5.0, exposed_communication=5.0)
    used = RunSettings(world_size=2, precision="fp32", compression="off")

    assert find_bottleneck(summary, used).try_ == "parallel.compression=bf16"
    for other in ({"compression": "bf16"}, {"precision": "bf16_pure"}, {"strategy": "fsdp"}, {"world_size": 1}):
        assert find_bottleneck(summary, replace(used, **other)).try_ == ""


def test_computing_on_a_gpu_is_tried_in_16_bits_and_then_compiled() -> None:
    summary = summary_of(forward=10.0)
    used = replace(GPU, precision="fp32", compile="off")

    assert find_bottleneck(summary, used).try_ == "train.precision=amp"
    assert find_bottleneck(summary, replace(used, precision="torch_default")).try_ == "train.precision=amp"
    assert find_bottleneck(summary, replace(used, precision="bf16")).try_ == "train.compile=default"
    assert find_bottleneck(summary, replace(used, precision="bf16", compile="default")).try_ == ""
    assert find_bottleneck(summary, replace(used, strategy="dataparallel")).try_ == ""
    assert find_bottleneck(summary, replace(used, device_type="cpu")).try_ == ""


def test_launching_is_tried_as_one_graph_on_one_rank_and_compiled_on_more() -> None:
    summary = summary_of(forward=10.0, starved=1.0)
    used = replace(GPU, precision="bf16", compile="off")

    assert find_bottleneck(summary, used).try_ == "train.compile=reduce-overhead"
    assert find_bottleneck(summary, replace(used, compile="default")).try_ == "train.compile=reduce-overhead"
    assert find_bottleneck(summary, replace(used, world_size=2)).try_ == "train.compile=default"
    assert find_bottleneck(summary, replace(used, accumulate=2)).try_ == "train.compile=default"
    assert find_bottleneck(summary, replace(used, world_size=2, compile="default")).try_ == ""
    assert find_bottleneck(summary, replace(used, compile="reduce-overhead")).try_ == ""
    for how in ({}, {"compile": "default"}, {"world_size": 2}, {"accumulate": 2}):
        assert find_bottleneck(summary, replace(used, strategy="dataparallel", **how)).try_ == ""


def test_batches_changed_on_the_host_are_changed_on_the_gpu_when_there_are_no_more_cores() -> None:
    summary = summary_of(data_wait=5.0, forward=5.0)
    used = replace(GPU, workers=4, cores=4, augments_on="host")

    assert find_bottleneck(summary, used).try_ == "data.augment_on=device"
    assert find_bottleneck(summary, replace(used, augments_on=None)).try_ == ""
    assert find_bottleneck(summary, replace(used, device_type="cpu")).try_ == ""


def words_of(used: RunSettings) -> list[str]:
    """Return the overrides that make a recipe these settings are of; there may be no such recipe."""
    return [
        f"parallel.strategy={used.strategy}",
        f"parallel.compression={used.compression}",
        f"train.precision={used.precision}",
        f"train.compile={used.compile}",
        f"train.accumulate={used.accumulate}",
        f"train.eval_every={used.eval_every}",
        f"checkpoint.every={used.save_every}",
        f"checkpoint.background={'on' if used.saves_in_background else 'off'}",
    ]


def test_every_override_loads_over_the_recipe_that_it_was_made_for() -> None:
    """Whatever a verdict tries, for any class and any settings of a GPU or a CPU, can be pasted."""
    recipes = [
        RunSettings(
            workers=1,
            cores=8 if in_background else 1,
            eval_every=Duration(4, "ep"),
            save_every=Duration(4, "ep"),
            saves_in_background=in_background,
            augments_on="host",
            strategy=strategy,
            precision=precision,
            compile=compiled,
            compression="off",
            accumulate=accumulate,
        )
        for strategy in ("ddp", "fsdp", "dataparallel")
        for precision in ("fp32", "bf16", "bf16_master")
        for compiled in ("off", "default")
        for accumulate, in_background in ((1, True), (2, False))
    ]
    digits = Layer(load("digits").stack.values, "digits")  # read once: a hundred times the file takes seconds

    def recipe_with(*words: str) -> Recipe:
        return validate(merge_layers([digits, Layer(Patch.parse(list(words)).values(), "command line")]))

    tried: set[str] = set()
    num_recipes = 0
    for recipe in recipes:
        words = words_of(recipe)
        try:
            recipe_with(*words)
        except RecipeError:
            continue
        num_recipes += 1
        overrides = {
            find_bottleneck(
                case[0], replace(recipe, device_type=device_type, world_size=world_size), straggler=case[2]
            ).try_
            for device_type, world_size in (("cpu", 2), ("cuda", 1), ("cuda", 2))
            for case in CASES.values()
        } - {""}
        for override in overrides:
            field, _, value = override.partition("=")
            section, name = field.split(".")
            kept = [word for word in words if not word.startswith(f"{field}=")]
            assert str(recipe_with(*kept, override).to_dict()[section][name]) == value
        tried |= overrides
    assert len(tried) >= 10 and num_recipes >= 18


def test_all_the_stages_of_computing_count() -> None:
    result = find_bottleneck(
        summary_of(data_wait=1.0, device_augment=1.0, forward=2.0, loss=1.0, backward=3.0, optimizer=1.0)
    )

    assert result.evidence == "Computing took 8 s of the 10 s of 10 steps (80 %)."
    assert (result.ceiling, result.try_) == ("", "")


def test_time_outside_every_stage_is_not_called_computing() -> None:
    assert (
        find_bottleneck(summary_of(forward=4.0)).evidence
        == "What no stage covers took 6 s of the 10 s of 10 steps (60 %)."
    )
    logging = find_bottleneck(summary_of(forward=4.0, other=5.0))
    assert logging.evidence == "Logging and agreement between ranks took 5 s of the 10 s of 10 steps (50 %)."


def test_the_late_rank_and_its_stage_are_named() -> None:
    summary = summary_of(forward=5.0, exposed_communication=5.0)

    assert find_bottleneck(summary, straggler=late(2, 0.5, "data_wait")).to_dict() == {
        "bottleneck": "straggler-bound",
        "evidence": "Waiting for the latest rank took 5 s of the 10 s of 10 steps (50 %): most often rank 2, which "
        "loses it in data wait.",
        "ceiling": "at most 2.0x without it, all else unchanged",
        "try": "",
    }
    nobody = find_bottleneck(summary, straggler=late(None, 0.4))
    assert nobody.evidence.endswith("(40 %), a different one from step to step.")


def test_evidence_of_communication_says_what_was_measured() -> None:
    summary = summary_of(forward=5.0, exposed_communication=5.0)
    wire = CommunicationResult(exposed_s=0.5, share=0.5, bytes=44_700_000, wire_s=1.0, overlap=0.25)

    assert find_bottleneck(summary).evidence == (
        "Exposed communication took 5 s of the 10 s of 10 steps (50 %), waiting for late ranks with it."
    )
    assert find_bottleneck(summary, straggler=late(1, 0.1), communication=wire).evidence == (
        "Exposed communication took 4 s of the 10 s of 10 steps (40 %), waiting for late ranks left out; 44.7 MB a "
        "step, 25 % of the time hidden by backward."
    )


def test_the_ceiling_is_what_the_clock_bounds() -> None:
    waiting = summary_of(data_wait=3.75, forward=6.25)
    assert find_bottleneck(waiting).ceiling == "at most 1.6x without waiting for data, all else unchanged"


def test_ceilings_name_what_was_free() -> None:
    assert str(Ceilings(free_data=3.94, free_communication=1.043)) == (
        "without data loading: at most 3.9x; without communication: at most 1.04x"
    )
    assert str(Ceilings(free_copy=1.0, free_model=12.3)) == (
        "without loading and copies: at most 1.00x; without the model: at most 12.3x"
    )
    assert str(Ceilings()) == ""


def test_one_long_stall_of_another_rank_is_no_straggler() -> None:
    summary = summary_of(forward=4.0, exposed_communication=6.0)

    assert find_bottleneck(summary, straggler=late(None, 0.6, late_steps=0.1)).evidence == (
        "Waiting for ranks that were late now and then took 6 s of the 10 s of 10 steps (60 %)."
    )


def test_the_page_shows_what_is_printed() -> None:
    summary = replace(summary_of(forward=9.0, exposed_communication=2.2), n=100, wall_s=11.2)
    straggler = StragglerResult(lost_s=0.019, share=0.17, rank=1, stage="backward", late_s=0.019, late_steps=0.9)

    found = find_bottleneck(summary, straggler=straggler).to_dict()

    page = Path(__file__).parents[3] / "docs" / "explanation" / "verdict.md"
    shown = " ".join(page.read_text(encoding="utf-8").split())
    assert f"{found['bottleneck']}. {found['evidence']}" in shown and found["try"] in shown


def test_no_counted_step_is_unknown() -> None:
    seconds = [0.0]
    clock = StageClock(warmup_steps=10, now=lambda: seconds[0])
    empty = clock.drain()
    seconds[0] += 1.0
    clock.end_step(images=1)

    assert find_bottleneck(empty).to_dict() == {
        "bottleneck": "unknown",
        "evidence": "No step was counted.",
        "ceiling": "",
        "try": "",
    }
    assert find_bottleneck(clock.drain()).try_ == "measure.warmup_steps=0"


def cpu(**values: float) -> CpuResult:
    """Return the CPU time of a rank of two threads on two cores that had all it wanted, but for what `values` say."""
    usual = {
        "rank": 0, "cores": 2, "ranks": 1, "threads": 2, "wall_s": 10.0, "run_s": 18.0, "waited_s": 0.2, "lost_s": 0.1,
        "share": 0.005, "own_share": 0.005, "throttled_share": 0.0, "others_cores": 0.01, "pressure": 0.1,
        "switches": 9,
    }  # fmt: skip
    return CpuResult.model_validate({**usual, **values})


COMPUTES = summary_of(forward=4.0, backward=6.0)


def test_a_run_whose_cores_others_used_is_starved_without_advice() -> None:
    found = find_bottleneck(COMPUTES, cpu=cpu(share=0.62, lost_s=12.4, others_cores=1.24))
    assert (found.bottleneck, found.ceiling, found.try_) == ("cpu-starved", "", "")
    assert "held the cores 62 % of the time that training wanted to run" in found.evidence
    assert "1.2 of 2 cores" in found.evidence


def test_it_is_starved_with_any_stages() -> None:
    """A pause of nine tenths, and waiting for data of a half: others had the loader's cores as well."""
    busy = cpu(share=0.5, lost_s=10.0)
    paused = summary_of(forward=10.0, pauses={"evaluate": 90.0})
    waiting = summary_of(data_wait=5.0, forward=5.0)
    assert [find_bottleneck(each, cpu=busy).bottleneck for each in (paused, waiting)] == ["cpu-starved"] * 2


def test_a_gpu_that_is_kept_busy_all_the_same_is_what_holds_the_run_back() -> None:
    busy = cpu(share=0.5, lost_s=10.0)
    dry, waits = summary_of(forward=10.0, starved=0.6), summary_of(data_wait=1.5, forward=8.5)
    found = [find_bottleneck(each, GPU, cpu=busy).bottleneck for each in (COMPUTES, dry, waits)]
    assert found == ["compute-bound", "cpu-starved", "cpu-starved"]


@pytest.mark.parametrize(
    ("wait_s", "lost_s", "bottleneck"),
    [
        (6.0, 2.9, "communication-bound"),
        (6.0, 3.1, "cpu-starved"),  # as large as the rest of the wait
        (2.4, 0.5, "cpu-starved"),  # without it the wait is less than a fifth
    ],
)
def test_a_wait_far_longer_than_the_lost_time_is_the_bottleneck(wait_s: float, lost_s: float, bottleneck: str) -> None:
    waiting = summary_of(exposed_communication=wait_s, forward=10.0 - wait_s)
    assert find_bottleneck(waiting, cpu=cpu(share=0.3, lost_s=lost_s)).bottleneck == bottleneck
    assert find_bottleneck(waiting, cpu=cpu(throttled_share=0.3)).bottleneck == "cpu-throttled"


@pytest.mark.parametrize(
    ("share", "lost_s", "bottleneck"),
    [
        (0.1, 0.5, "cpu-starved"),
        (0.099, 2.0, "compute-bound"),
        (0.5, 0.4, "compute-bound"),  # it wanted to run so little that half of that was nothing
    ],
)
def test_little_lost_to_others_is_no_bottleneck(share: float, lost_s: float, bottleneck: str) -> None:
    assert find_bottleneck(COMPUTES, cpu=cpu(share=share, lost_s=lost_s)).bottleneck == bottleneck


def test_of_several_ranks_the_one_that_lost_most_is_named() -> None:
    found = find_bottleneck(COMPUTES, RunSettings(world_size=2), cpu=cpu(rank=1, share=0.4, lost_s=5.0))
    assert "40 % of the time that rank 1 wanted to run" in found.evidence


def test_a_quota_is_distinguished_from_other_processes() -> None:
    found = find_bottleneck(COMPUTES, cpu=cpu(throttled_share=0.3))
    assert (found.bottleneck, found.try_) == ("cpu-throttled", "")
    assert "stopped the run 30 % of the time" in found.evidence
    assert (
        find_bottleneck(COMPUTES, RunSettings(threads=4), cpu=cpu(throttled_share=0.3)).try_ == "parallel.threads=auto"
    )


def test_ranks_and_threads_beyond_the_cores_are_the_runs_own_doing() -> None:
    found = find_bottleneck(COMPUTES, RunSettings(world_size=4), cpu=cpu(ranks=4, threads=1, own_share=0.5))
    assert found.bottleneck == "cpu-oversubscribed"
    assert "4 ranks of 1 thread oversubscribe 2 cores" in found.evidence
    assert "--ranks 2" in found.try_
    threads = find_bottleneck(COMPUTES, RunSettings(threads=8), cpu=cpu(ranks=1, threads=8, own_share=0.7))
    assert (threads.bottleneck, threads.try_) == ("cpu-oversubscribed", "parallel.threads=auto")


def test_loader_workers_that_share_the_cores_with_the_rank_oversubscribe_nothing() -> None:
    """A rank of two threads on two cores, beside its own two workers: all of them are busy with the run."""
    assert find_bottleneck(COMPUTES, cpu=cpu(own_share=0.5)).bottleneck == "compute-bound"


def test_few_ticks_allow_no_conclusion_on_cores() -> None:
    found = [
        find_bottleneck(COMPUTES, cpu=cpu(share=0.62, lost_s=0.6, wall_s=wall_s)).bottleneck for wall_s in (0.4, 0.6)
    ]
    assert found == ["compute-bound", "cpu-starved"]
