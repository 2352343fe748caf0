"""Where a model's weights go: on one device, or its decoder layers spread over several GPUs and everything else on the first.

So token ids, masks, positions and logits of a model that is spread are always on its first device, and only hidden states go from
one to the next. Knows devices as a config names them. Does not know what a model is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import dispatch_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvferry.devices import Place, devices_in
from kvferry.errors import KvferryError
from kvferry.prepare.decoder import decoder_config


def check_there(place: Place) -> None:
    """Refuse a device that this machine, or this job's share of it, lacks.

    Raises:
        KvferryError: a GPU is named and there is none, or none of its number.
    """
    asked, count = devices_in(place), torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device in asked:
        if device.startswith("cuda") and not count:
            raise KvferryError(
                f"compute.device: {device} is asked for, but torch sees no CUDA device here; set it to cpu"
            )
        if device.startswith("cuda") and int(device.removeprefix("cuda:")) >= count:
            there = "cuda:0 is" if count == 1 else f"cuda:0 to cuda:{count - 1} are"
            raise KvferryError(
                f"compute: {device} is asked for, but only {there} there; name fewer devices, or give the job more GPUs"
            )


def usable(device: str) -> torch.device:
    """A device for arithmetic without a model. Raises as `check_there` does."""
    check_there(device)
    return torch.device(device)


def device_map(location: Path, place: Place) -> dict[str, str] | None:
    """For `from_pretrained`: the device of each module of the model at `location`; None where it stays on the CPU."""
    devices = devices_in(place)
    if len(devices) == 1:
        return None if devices == ["cpu"] else {"": devices[0]}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(decoder_config(location))
    return spread(model, devices)


def spread(model: PreTrainedModel, devices: list[str]) -> dict[str, str]:
    """The device of each module by name, such that the devices hold about as many weights each."""
    layers = model.get_decoder().layers
    name = next(name for name, module in model.named_modules() if module is layers)
    whole, in_layers = (sum(weight.numel() for weight in part.parameters()) for part in (model, layers))
    counts = shares(len(layers), (whole - in_layers) / (in_layers / len(layers)), len(devices))
    of_layers = [device for device, count in zip(devices, counts, strict=True) for _ in range(count)]
    around = dict.fromkeys(_around(model, "", layers), devices[0])
    return around | {f"{name}.{number}": device for number, device in enumerate(of_layers)}


def shares(layers: int, first: float, devices: int) -> list[int]:
    """How many layers each device takes; the first one also has what weighs as much as `first` layers."""
    own = min(layers, max(0, round((layers + first) / devices - first)))
    each, more = divmod(layers - own, devices - 1)
    return [own, *(each + (number < more) for number in range(devices - 1))]


def _around(module: nn.Module, prefix: str, layers: nn.Module) -> Iterator[str]:
    """Names of the largest modules that the layers are no part of."""
    for name, child in module.named_children():
        if child is layers:
            continue
        if any(own is layers for own in child.modules()):
            yield from _around(child, f"{prefix}{name}.", layers)
        else:
            yield f"{prefix}{name}"


def settle(model: PreTrainedModel, place: Place) -> None:
    """Have a model that was loaded over several devices take its inputs on the first of them.

    Loading leaves that to the order of a set, and would move what indexes the hidden states away from these.
    """
    devices = devices_in(place)
    if len(devices) > 1:
        skipped = model._skip_keys_device_placement
        dispatch_model(model, model.hf_device_map, main_device=devices[0], skip_keys=skipped)
