"""Devices as a config names them: `cpu`, `cuda`, `cuda:N`, or a list of GPUs that a model is spread over; and number formats.

Which devices the models of a job take, and how many GPUs that is. Knows no torch, and not which devices a machine has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Place = str | list[str]
DEVICE, SOURCE, TARGET = "device", "source_device", "target_device"
# Bytes of a number, by the name of its format.
SIZE_OF = {"float32": 4, "bfloat16": 2, "float16": 2}


def devices_in(place: Place) -> list[str]:
    """The devices of a place in order; `cuda` is `cuda:0`."""
    return [f"{own}:0" if own == "cuda" else own for own in ([place] if isinstance(place, str) else place)]


def place_of(compute: Mapping[str, Any], role: str) -> Place:
    """Where a role's model goes: `device`, unless it has a place of its own. compute: the config's section."""
    return compute.get(role, compute[DEVICE])


def first_of(compute: Mapping[str, Any]) -> str:
    """The device of arithmetic without a model, which is the fit's."""
    return devices_in(compute[DEVICE])[0]


def kinds_of(compute: Mapping[str, Any]) -> dict[str, str]:
    """cpu or cuda, by role: what decides the arithmetic, however many devices there are and whichever numbers they have."""
    return {role: devices_in(place_of(compute, role))[0].partition(":")[0] for role in (DEVICE, SOURCE, TARGET)}


def gpus_of(compute: Mapping[str, Any], roles: Iterable[str]) -> int:
    """How many GPUs a job needs whose models have these roles."""
    devices = {device for role in roles for device in devices_in(place_of(compute, role))}
    return sum(device != "cpu" for device in devices)
