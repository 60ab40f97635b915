"""Records are read while they are written, and from processes that were killed."""

import json

import pytest

from paceline.watch.records import NUM_FIRST_LOSSES, RecordReader

from .written import end, header, pause, steps, write


def read(folder):
    reader = RecordReader(folder)
    reader.update()
    return reader.processes()


def test_all_kinds_of_records_are_read(tmp_path):
    write(
        tmp_path,
        header(rank=1, world_size=2, framework="timm"),
        pause("start_up", 100, 110),
        *steps(3),
        {"kind": "note", "text": "forward is compiled"},
        {"kind": "note", "text": "forward is compiled"},
        {"kind": "of a newer observer"},
        end(111.0, 3),
    )
    (records,) = read(tmp_path)
    assert (records.process.rank, records.process.world_size, records.process.framework) == (1, 2, "timm")
    assert [each.n for each in records.steps] == [0, 1, 2]
    assert records.steps[0].stages == pytest.approx({"forward": 0.1 / 3, "backward": 0.2 / 3})
    assert (records.pauses[0].name, records.pauses[0].end_s) == ("start_up", 110)
    assert records.notes == ("forward is compiled",)
    assert (records.ended_s, records.has_ended, records.num_damaged) == (111.0, True, 0)
    assert records.process.started_s + records.process.offset_s == 1_000_100.0


def test_device_times_that_come_later_belong_to_their_step(tmp_path):
    write(tmp_path, header(), *steps(2), {"kind": "device", "n": 0, "stages": {"forward": 0.09}})
    (records,) = read(tmp_path)
    assert [each.device_stages for each in records.steps] == [{"forward": 0.09}, {}]


def test_a_killed_process_lacks_its_end_and_a_part_of_a_line(tmp_path):
    path = write(tmp_path, header(), *steps(3))
    path.write_text(path.read_text()[:-20])
    (records,) = read(tmp_path)
    assert len(records.steps) == 2
    assert (records.has_ended, records.num_damaged) == (False, 0)


def test_a_line_is_read_once_it_is_whole(tmp_path):
    path = write(tmp_path, header(), *steps(1))
    reader = RecordReader(tmp_path)
    reader.update()
    text = "".join(json.dumps(each) + "\n" for each in steps(3)[1:])
    with path.open("a") as file:
        file.write(text[:-10])
        file.flush()
        reader.update()
        assert [each.n for each in reader.processes()[0].steps] == [0, 1]
        file.write(text[-10:])
    write(tmp_path, header(rank=1), *steps(1))
    reader.update()
    assert [[each.n for each in records.steps] for records in reader.processes()] == [[0, 1, 2], [0]]


DAMAGED = [
    "not JSON",
    "[1, 2]",
    '{"kind": "step"}',
    '{"kind": "step", "n": 1, "start_s": 2, "end_s": 1, "stages": {}}',
    '{"kind": "step", "n": 1, "start_s": NaN, "end_s": 1, "stages": {}}',
    '{"kind": "step", "n": 1, "start_s": 0, "end_s": 1, "stages": {"forward": "long"}}',
    '{"kind": "step", "n": 1, "start_s": 0, "end_s": 1, "stages": [1]}',
    '{"kind": "pause", "name": "evaluate", "start_s": 1e999, "end_s": 1}',
    '{"kind": "pause", "name": "\\u001b[2J", "start_s": 0, "end_s": 1}',
    '{"kind": "process", "pid": 1}',
    "[" * 100_000,
]


@pytest.mark.parametrize("line", DAMAGED, ids=lambda line: line[:30])
def test_damaged_lines_are_counted_and_skipped(tmp_path, line):
    path = write(tmp_path, header(), *steps(1))
    with path.open("a") as file:
        file.write(line + "\n" + json.dumps(end(120.0)) + "\n")
    (records,) = read(tmp_path)
    assert (len(records.steps), records.num_damaged, records.has_ended) == (1, 1, True)


def test_processes_without_steps_are_left_out(tmp_path):
    write(tmp_path, header())
    (tmp_path / "empty.jsonl").touch()
    assert read(tmp_path) == []
    assert read(tmp_path / "missing") == []


def test_of_a_long_run_the_last_records_are_kept_and_all_are_counted(tmp_path):
    number = 100
    losses = [{"kind": "loss", "n": n, "loss": float(n)} for n in range(number)]
    pauses = [pause("checkpoint", 200 + n, 200.5 + n) for n in range(number)]
    write(tmp_path, header(), *steps(number), *losses, *pauses)
    reader = RecordReader(tmp_path, max_steps=40)
    reader.update()
    (records,) = reader.processes()
    assert (records.num_steps, len(records.steps), records.steps[0].n) == (number, 40, number - 40)
    assert (records.trained_from_s, records.steps_s) == (110.0, pytest.approx(10))
    assert (len(records.pauses), records.pauses[-1].start_s) == (40, 299)
    assert (records.num_pauses, records.pause_s) == ({"checkpoint": number}, {"checkpoint": 50.0})
    assert records.losses == {n: float(n) for n in (*range(NUM_FIRST_LOSSES), *range(number - 40, number))}
