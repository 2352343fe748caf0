"""How long calls take: the one clock of every measured time. Knows no model and no mapper.

CUDA events around a call on one GPU, a monotonic clock elsewhere; on several GPUs it begins and ends when all of them are idle.
Calls that are compared are timed in turns, one round after another, so that whatever else the machine does falls on all of them
alike.
"""

from __future__ import annotations

import math
import platform
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from kvferry.provenance import Stopwatch

LEAST = 3
PROCESSORS = Path("/proc/cpuinfo")

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Effort:
    """How often to measure: rounds that do not count, rounds that do, and the seconds after which no further one begins.

    The seconds count from the first round on; however long they take, one round of the warm-up, if there is one, and LEAST
    rounds that count (or `trials`, if that is less) are run.
    """

    warm_up: int
    trials: int
    seconds: float = math.inf


@torch.inference_mode()
def time_trials(
    calls: Mapping[Name, Callable[[], object]], devices: Sequence[torch.device], effort: Effort
) -> dict[Name, list[float]]:
    """Milliseconds of each call in every round that counts. In a round the calls come in their order, each once.

    devices: all that the calls compute on.
    """
    watch = Stopwatch()
    for done in range(effort.warm_up):
        if done and watch.seconds() > effort.seconds:
            break
        for call in calls.values():
            milliseconds(call, devices)
    times: dict[Name, list[float]] = {name: [] for name in calls}
    for done in range(effort.trials):
        if done >= LEAST and watch.seconds() > effort.seconds:
            break
        for name, call in calls.items():
            times[name].append(milliseconds(call, devices))
    return times


def milliseconds(call: Callable[[], object], devices: Sequence[torch.device]) -> float:
    """Time of one call, from devices that have nothing left to do until they have done all of it."""
    gpus = [device for device in devices if device.type == "cuda"]
    if len(gpus) == 1:
        return _on_gpu(call, gpus[0])
    _wait_for(gpus)
    begin = time.perf_counter()
    call()
    _wait_for(gpus)
    return 1000 * (time.perf_counter() - begin)


def _wait_for(gpus: Sequence[torch.device]) -> None:
    """An event is one GPU's: what the others still do is waited for in turn."""
    for gpu in gpus:
        torch.cuda.synchronize(gpu)


def _on_gpu(call: Callable[[], object], device: torch.device) -> float:
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end)


def names_of(devices: Sequence[torch.device]) -> str:
    """The models of these devices, each with its number where there are several of it."""
    counts = Counter(map(device_name, devices))
    return ", ".join(name if count == 1 else f"{count} × {name}" for name, count in counts.items())


def device_name(device: torch.device) -> str:
    """The model of the GPU or of the processor, as the machine calls it; its architecture where it does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = PROCESSORS.read_text().splitlines() if PROCESSORS.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(models), "") or platform.processor() or platform.machine()
