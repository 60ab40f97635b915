"""What GPUs are doing, by a library that may know some of it, or nothing, or not be there."""

from types import SimpleNamespace

import pytest

from paceline.measure.telemetry import NvmlSampler, build_gpu_sampler


class NVMLError(Exception):
    pass


class Library:
    """Module pynvml with two GPUs; a test names the calls that fail."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0
    NVMLError = NVMLError

    def __init__(self, *failing: str) -> None:
        self._failing = failing
        self.is_open = False

    def __getattribute__(self, name: str):
        if name.startswith("nvml") and name in object.__getattribute__(self, "_failing"):
            return self._fail
        return object.__getattribute__(self, name)

    def _fail(self, *arguments: object):
        raise NVMLError("Not Supported")

    def nvmlInit(self) -> None:  # noqa: N802 - here and below: NVML's own names
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        if index > 1:
            raise NVMLError("Invalid Argument")
        return f"gpu{index}"

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        return f"a {handle}"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=87, memory=12)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        return 312_500

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=80_000, free=60_000, used=20_000)

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:  # noqa: N802
        assert kind == self.NVML_CLOCK_SM
        return 1755

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:  # noqa: N802
        assert kind == self.NVML_TEMPERATURE_GPU
        return 61


ROW = {
    "index": 1,
    "name": "a gpu1",
    "utilisation": 0.87,
    "power_w": 312.5,
    "sm_clock_mhz": 1755,
    "memory_used_bytes": 20_000,
    "memory_total_bytes": 80_000,
    "temperature_c": 61,
}


def test_each_gpu_has_a_row_in_the_units_of_its_names() -> None:
    gpus, missing = build_gpu_sampler("all", lambda name: Library())
    rows = gpus.sample()
    assert rows == [{**ROW, "index": 0, "name": "a gpu0"}, ROW] and missing == ""


@pytest.mark.parametrize(
    ("call", "lost"),
    [
        ("nvmlDeviceGetName", {"name"}),
        ("nvmlDeviceGetUtilizationRates", {"utilisation"}),
        ("nvmlDeviceGetPowerUsage", {"power_w"}),
        ("nvmlDeviceGetClockInfo", {"sm_clock_mhz"}),
        ("nvmlDeviceGetMemoryInfo", {"memory_used_bytes", "memory_total_bytes"}),
        ("nvmlDeviceGetTemperature", {"temperature_c"}),
    ],
)
def test_a_value_that_a_gpu_does_not_have_is_left_out(call: str, lost: set[str]) -> None:
    gpus, missing = build_gpu_sampler([1], lambda name: Library(call))
    assert gpus.sample() == [{name: value for name, value in ROW.items() if name not in lost}] and missing == ""


def test_a_gpu_that_is_not_there_has_no_row() -> None:
    gpus, _ = build_gpu_sampler([0, 5], lambda name: Library())
    assert [row["index"] for row in gpus.sample()] == [0]


def test_the_library_is_let_go_of_once_even_where_it_refuses() -> None:
    library = Library()
    gpus, _ = build_gpu_sampler("all", lambda name: library)
    assert library.is_open
    gpus.close()
    assert not library.is_open
    NvmlSampler(Library("nvmlShutdown"), {}).close()


def absent(name: str):
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (absent, "nvidia-ml-py is not installed (pip install 'paceline[telemetry]')"),
        (lambda name: Library("nvmlInit"), "NVML: Not Supported"),
        (lambda name: Library("nvmlDeviceGetCount"), "NVML: Not Supported"),
    ],
)
def test_a_node_whose_gpus_cannot_be_sampled_says_why(load, why: str) -> None:
    gpus, missing = build_gpu_sampler("all", load)
    assert gpus is None and missing == why


def test_a_run_without_gpus_loads_no_library_and_misses_nothing() -> None:
    assert build_gpu_sampler((), absent) == (None, "")
