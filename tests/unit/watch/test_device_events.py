"""Events of a GPU are read later, and a script that takes no steps does not use up more and more of them."""

from paceline.watch.device_events import MAX_BOUNDARIES, DeviceEvents


class Device:
    """A device that passes an event per millisecond."""

    def __init__(self):
        self.is_capturing = False
        self.num_events = 0
        self.now_ms = 0
        self.events = DeviceEvents(self.new_event, lambda: self.is_capturing)

    def new_event(self):
        self.num_events += 1
        return Event(self)


class Event:
    def __init__(self, device):
        self.device = device
        self.at_ms = 0

    def record(self):
        self.device.now_ms += 1
        self.at_ms = self.device.now_ms

    def query(self):
        assert not self.device.is_capturing
        return True

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms


def test_a_step_with_too_many_boundaries_has_no_times():
    device = Device()
    device.events.record("forward")
    device.events.end_step(1, "other")
    for _ in range(3 * MAX_BOUNDARIES):
        device.events.record("sync")
    device.events.end_step(2, "other")
    device.events.record("forward")
    device.events.end_step(3, "other")
    device.events.end_step(4, "other")
    assert device.events.read_completed() == [(1, {"forward": 0.001}), (2, {}), (3, {"other": 0.001, "forward": 0.001})]
    assert device.num_events <= MAX_BOUNDARIES + 5


def test_no_event_is_queried_while_a_graph_is_captured():
    device = Device()
    device.events.record("forward")
    device.events.end_step(1, "other")
    device.events.end_step(2, "other")
    device.is_capturing = True
    assert device.events.read_completed() == []
    device.is_capturing = False
    assert device.events.read_completed() == [(1, {"forward": 0.001})]


def test_a_stage_is_renamed_from_a_boundary_on():
    device = Device()
    for stage in ("other", "data_wait", "other", "h2d", "other"):
        device.events.record(stage)
    device.events.rename_since(2, "other", "prepare")
    device.events.end_step(1, "other")
    device.events.end_step(2, "other")
    assert device.events.read_completed() == [(1, {"other": 0.001, "data_wait": 0.001, "prepare": 0.002, "h2d": 0.001})]
