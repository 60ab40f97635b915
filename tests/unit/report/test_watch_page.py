"""The page of a watched command: figures, stages, ranks, timeline and findings, also of hostile or empty results."""

from pathlib import Path

import pytest

from paceline.core.results import CommunicationResult, RankResult, StageResult, StragglerResult
from paceline.core.watch_result import RankTimeline, StepPoint, WatchedPause, WatchResult, read_watch_result
from paceline.report.document import BarChart, StackedBar
from paceline.report.render import render_html, render_markdown
from paceline.report.watch_page import build_watch_page

EVIL = "<script>alert(1)</script>"
VERDICT = {"bottleneck": "straggler-bound", "evidence": "Waiting took 4 s.", "ceiling": "at most 1.7x", "try": "this"}
EMPTY = WatchResult(
    paceline="1", command=("sh", EVIL), exit_code=1, verdict={"bottleneck": "unknown", "evidence": "No."}
)


@pytest.fixture
def result():
    ranks = tuple(
        RankResult(rank=rank, step_s=0.1, late_s=0.04 * rank, stages={"forward": 0.06, "log": 0.04 * rank})
        for rank in range(2)
    )
    pauses = (
        WatchedPause(name="epoch_boundary", unix_s=1010, pause_s=5),
        WatchedPause(name="evaluate", unix_s=1050, pause_s=20),
    )
    return WatchResult(
        paceline="1",
        command=("python", "train.py", EVIL),
        exit_code=0,
        framework="timm",
        torch="2.6.0",
        hosts=("node0", EVIL),
        world_size=2,
        steps=110,
        warmup_steps=10,
        measured_steps=100,
        step_s=0.1,
        step_spread=(0.09, 0.12),
        samples_per_s=640.0,
        stages={
            "forward": StageResult(host_s=6.0, device_s=6.0, share=0.6),
            "exposed_communication": StageResult(host_s=3.0, device_s=3.0, share=0.3),
            "other": StageResult(host_s=1.0, device_s=1.0, share=0.1),
        },
        attributed=0.9,
        wall_s=100.0,
        start_up_s=10.0,
        steps_s=60.0,
        pauses={"evaluate": 20.0, "epoch_boundary": 5.0},
        num_pauses={"evaluate": 1, "epoch_boundary": 1},
        verdict=VERDICT,
        communication=CommunicationResult(exposed_s=0.03, share=0.3),
        straggler=StragglerResult(lost_s=0.04, share=0.4, rank=1, stage="log", late_s=0.04, late_steps=1.0),
        ranks=ranks,
        notes=("forward is compiled", EVIL),
        timeline=tuple(
            RankTimeline(
                rank=rank,
                host="node0",
                started_s=1000,
                trained_from_s=1010,
                ended_s=1100,
                is_killed=rank == 1,
                pauses=pauses,
            )
            for rank in range(2)
        ),
        curve=tuple(StepPoint(step=n, step_s=0.1, data_wait_s=0.0, exposed_s=0.03) for n in range(110)),
    )


def test_the_page_has_all_parts(result, without_own_scripts):
    page = build_watch_page(result, Path("runs/watch-train"))
    html = without_own_scripts(render_html(page))
    for text in ("straggler-bound", "forward", "communication", "logging", "evaluation", "starting the loader", "640",
                 "rank 1", "killed", "forward is compiled", "exit code 0", "To try"):  # fmt: skip
        assert text in html, text
    assert "<script>" not in html
    assert [each.key for each in page.sections] == ["time", "ranks", "timeline", "notes", "origin"]


def test_the_parts_of_a_step_and_of_the_process_fill_their_bars(result):
    time = build_watch_page(result, Path("w")).sections[0]
    bars = [each for each in time.blocks if isinstance(each, StackedBar)]
    assert [round(sum(part.share for part in bar.parts), 6) for bar in bars] == [1, 1]
    process = {part.name: round(part.share, 6) for part in bars[1].parts}
    assert process == {
        "start-up": 0.1, "steps": 0.6, "evaluation": 0.2, "starting the loader": 0.05, "not attributed": 0.05,
    }  # fmt: skip


def test_the_timeline_has_a_bar_per_rank_with_its_pauses(result):
    timeline = build_watch_page(result, Path("w")).sections[2]
    (chart,) = timeline.blocks
    assert isinstance(chart, BarChart)
    assert [row.text for row in chart.rows] == ["", "killed"]
    for row in chart.rows:
        assert [part.name for part in row.parts if part.share > 0.02] == [
            "start-up", "starting the loader", "training", "evaluation", "training",
        ]  # fmt: skip
        assert sum(part.share for part in row.parts) == pytest.approx(1)


def test_a_result_without_steps_has_a_page(tmp_path):
    page = build_watch_page(EMPTY, tmp_path)
    assert "No." in render_markdown(page)
    assert EVIL not in render_html(page)


def test_a_result_is_read_as_it_was_written(result, tmp_path):
    (tmp_path / "result.json").write_text(result.model_dump_json())
    assert read_watch_result(tmp_path) == result
