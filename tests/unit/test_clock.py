"""Trials: how many, in which order, and what is counted. The clock is set by the tests; nothing here depends on real time."""

import contextlib
import platform

import pytest
import torch

from kvferry.evaluate import clock
from kvferry.evaluate.clock import LEAST, Effort, device_name, milliseconds, time_trials
from kvferry.provenance import Stopwatch

CPU = torch.device("cpu")
ALONE = [CPU]


class Watch:
    """A clock that stands still until a call moves it on."""

    def __init__(self):
        self.now = 0.0

    def take(self, seconds, log, name):
        def call():
            log.append(name)
            self.now += seconds

        return call


@pytest.fixture
def watch(monkeypatch):
    """The clock of the calls and of the budget of seconds."""
    own = Watch()
    monkeypatch.setattr("time.perf_counter", lambda: own.now)
    monkeypatch.setattr(clock, "Stopwatch", lambda: Stopwatch(own.now))
    return own


def timed(watch, effort, **seconds):
    """Trials of calls that take these seconds, and the order of all calls."""
    log = []
    return time_trials({name: watch.take(s, log, name) for name, s in seconds.items()}, ALONE, effort), log


def test_a_call_is_timed_from_its_begin_to_its_end_in_milliseconds(watch):
    assert milliseconds(watch.take(0.25, [], "it"), ALONE) == pytest.approx(250)


def test_calls_take_turns_and_the_warm_up_does_not_count(watch):
    found, log = timed(watch, Effort(warm_up=2, trials=4), a=1, b=3)
    assert "".join(log) == "ab" * 6
    assert found == {"a": pytest.approx([1000] * 4), "b": pytest.approx([3000] * 4)}


def test_no_round_begins_after_the_seconds_but_for_the_least_number(watch):
    assert len(timed(watch, Effort(0, 100, seconds=9.5), it=1)[0]["it"]) == 10
    assert len(timed(watch, Effort(4, 100, seconds=9.5), it=1)[0]["it"]) == 6
    assert len(timed(watch, Effort(0, 100, seconds=0.5), it=9)[0]["it"]) == LEAST
    assert len(timed(watch, Effort(0, 2, seconds=0.5), it=9)[0]["it"]) == 2


def test_a_long_warm_up_is_cut_short(watch):
    found, log = timed(watch, Effort(50, 5, seconds=10), it=6)
    assert len(log) == 2 + LEAST
    assert len(found["it"]) == LEAST


def test_calls_are_made_without_gradients():
    seen = []
    time_trials({"it": lambda: seen.append(torch.is_inference_mode_enabled())}, ALONE, Effort(1, 1))
    assert seen == [True, True]


def test_on_a_gpu_events_stand_around_the_call_and_both_ends_are_waited_for(monkeypatch):
    """A made-up GPU that notes what it is told: nothing earlier may fall into the time, nor may the end be read too soon."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def synchronize(self):
            log.append("wait for the event")

        def elapsed_time(self, end):
            assert end is not self
            return 12.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(log.append(str(device))))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait for all"))
    assert milliseconds(lambda: log.append("call"), [torch.device("cuda:1")]) == 12.5
    assert log == ["cuda:1", "wait for all", "event", "call", "event", "wait for the event"]


def test_on_several_gpus_the_clock_stands_until_all_are_idle_before_and_after_the_call(monkeypatch):
    log = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(str(device)))
    gpus = [torch.device("cuda:0"), torch.device("cuda:1")]
    milliseconds(lambda: log.append("call"), [CPU, *gpus])
    assert log == ["cuda:0", "cuda:1", "call", "cuda:0", "cuda:1"]


def test_several_devices_are_named_with_their_numbers(monkeypatch):
    monkeypatch.setattr(clock, "device_name", lambda device: "A Processor" if device == CPU else "A GPU")
    gpus = [torch.device("cuda:0"), torch.device("cuda:1")]
    assert clock.names_of([CPU]) == "A Processor"
    assert clock.names_of([CPU, *gpus]) == "A Processor, 2 × A GPU"


def test_the_processor_is_called_as_the_machine_calls_it(tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: A Processor @ 2 GHz\nprocessor : 1\n")
    monkeypatch.setattr(clock, "PROCESSORS", tmp_path / "cpuinfo")
    assert device_name(CPU) == "A Processor @ 2 GHz"
    monkeypatch.setattr(clock, "PROCESSORS", tmp_path / "nothing")
    assert device_name(CPU) in (platform.processor(), platform.machine())
