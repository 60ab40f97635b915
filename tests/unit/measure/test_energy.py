"""Energy from counters: joules since the start, over wraps and lost counters; what cannot be read is never guessed."""

import json
from pathlib import Path

import pytest

from paceline.core.units import Duration
from paceline.measure.energy import (
    EnergyCounter,
    EnergyMeter,
    build_energy_result,
    find_gpu_counters,
    find_rapl_counters,
    recorded_energy_j,
)
from paceline.measure.telemetry import NvmlSampler, build_telemetry, gpu_id

LIMIT = 1_000_000


def write_zone(sys: Path, zone: str, name: str, energy: int) -> Path:
    folder = sys / "class" / "powercap" / zone
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{LIMIT}\n")
    (folder / "energy_uj").write_text(f"{energy}\n")
    return folder / "energy_uj"


def test_packages_and_memory_count_and_what_they_contain_does_not(tmp_path: Path) -> None:
    files = [
        write_zone(tmp_path, "intel-rapl:0", "package-0", 100_000),
        write_zone(tmp_path, "intel-rapl:0:0", "core", 5),
        write_zone(tmp_path, "intel-rapl:0:1", "dram", 7),
        write_zone(tmp_path, "intel-rapl:1", "psys", 9),
    ]
    counters, missing = find_rapl_counters(tmp_path)
    meter = EnergyMeter(counters, {"cpu": missing})
    assert meter.sample() == {"cpu_energy_j": 0.0} and meter.missing == {}
    for file in files:
        file.write_text(str(int(file.read_text()) + 500_000))
    assert meter.sample() == {"cpu_energy_j": 1.0}  # package and memory, half a joule each
    files[0].write_text("50_000".replace("_", ""))  # 600,000 -> wrap at 1,000,000 -> 50,000
    assert meter.sample() == {"cpu_energy_j": 0.45}
    assert meter.totals_j == {"cpu": pytest.approx(1.45)}


def test_a_counter_that_goes_away_or_is_reset_counts_nothing() -> None:
    values = iter([1000, 3000, ValueError(), 9000, 500])

    def read() -> int:
        value = next(values)
        if isinstance(value, Exception):
            raise value
        return value

    meter = EnergyMeter([EnergyCounter("gpu", read, 1e-3)])
    assert [meter.sample()["gpu_energy_j"] for _ in range(4)] == [2.0, 0.0, 6.0, 0.0]


def test_unreadable_counters_are_missing_with_their_reason(tmp_path: Path) -> None:
    counters, missing = find_rapl_counters(tmp_path)
    assert counters == [] and "no RAPL" in missing
    write_zone(tmp_path, "intel-rapl:0", "package-0", 1).write_text("none")
    counters, missing = find_rapl_counters(tmp_path)
    assert counters == [] and missing.startswith("intel-rapl:0 cannot be read")


def test_a_counter_of_root_alone_names_the_command_that_opens_it(tmp_path: Path, monkeypatch) -> None:
    write_zone(tmp_path, "intel-rapl:0", "package-0", 1)
    monkeypatch.setattr("paceline.measure.energy._read_number", lambda path: (_ for _ in ()).throw(PermissionError))
    counters, missing = find_rapl_counters(tmp_path)
    assert counters == [] and "sudo chmod a+r" in missing


class Library:
    """Module pynvml with two GPUs, of which torch knows the UUIDs."""

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802 - here and below: NVML's own names
        return handle

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return f"GPU-ABC{handle}"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        return {"a": 1, "b": 2000}[handle]


def test_only_the_gpus_of_the_ranks_count() -> None:
    readers = NvmlSampler(Library(), {0: "a", 1: "b"}).energy_readers()
    counters, missing = find_gpu_counters(readers, {gpu_id("abcb")})  # as torch writes it
    assert [each.read() for each in counters] == [2000] and missing == ""
    counters, missing = find_gpu_counters(readers, {gpu_id("abcb"), gpu_id("mig")})
    assert counters == [] and "MIG" in missing


def test_rows_of_all_nodes_and_processes_add_up(tmp_path: Path) -> None:
    rows = [{"cpu_energy_j": 1.5, "gpu_energy_j": 10}, {"cpu": 0.5}, {"cpu_energy_j": "x"}, {"cpu_energy_j": 2}]
    files = [tmp_path / f"telemetry.node{node}.jsonl" for node in (0, 1)]
    for file in files:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"cpu_en')
    assert recorded_energy_j([*files, tmp_path / "none"]) == {"cpu": 7.0, "gpu": 20.0}


def test_telemetry_writes_energy_and_starts_from_earlier_processes(tmp_path: Path) -> None:
    file = write_zone(tmp_path, "intel-rapl:0", "package-0", 0)
    rows: list[dict] = []
    telemetry = build_telemetry(
        Duration(60, "s"), rows.append, print, gpus=(), energy_before_j={"cpu": 3.0, "gpu": 9.0}, sys=tmp_path
    )
    assert telemetry is not None
    file.write_text("500000")
    telemetry._write_sample()
    assert rows[0]["cpu_energy_j"] == 0.5
    assert telemetry.energy.totals_j == {"cpu": 3.5}  # this process cannot measure the GPU: the run's is unknown


def test_a_result_has_what_every_node_measured() -> None:
    whole = build_energy_result({"gpu": (3.6e6, 2), "cpu": (7.2e6, 2)}, 2, 600, {})
    assert (whole.gpu_kwh, whole.cpu_kwh, whole.kwh, whole.images_per_kwh) == (1.0, 2.0, 3.0, 200.0)
    assert (whole.source, whole.missing) == ("NVML energy counters, RAPL", {})
    part = build_energy_result({"gpu": (3.6e6, 2), "cpu": (7.2e6, 1)}, 2, 600, {})
    assert (part.gpu_kwh, part.cpu_kwh, part.images_per_kwh) == (1.0, None, 600.0)
    assert part.missing == {"cpu": "only 1 of 2 nodes could measure it"}
    none = build_energy_result({"gpu": (0.0, 0), "cpu": (0.0, 0)}, 1, 600, {"cpu": "no RAPL"})
    assert (none.kwh, none.images_per_kwh, none.source, none.missing) == (None, None, "", {"cpu": "no RAPL"})
