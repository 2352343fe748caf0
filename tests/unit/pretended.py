"""GPUs that are pretended: every tensor is on the CPU and computed there, but carries the device that it would be on.

Inside `pretended_devices` tensors say that device, `.to` and its like change it, and an operation on tensors of two devices is
refused where CUDA refuses it: a tensor without dimensions, an index on the CPU and a copy into another tensor are let through.
What computes elsewhere than it should therefore fails here as it would on two GPUs; how fast anything is cannot be seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

CPU = torch.device("cpu")
GPUS = tuple(torch.device("cuda", number) for number in range(4))
COPIES = ("copy_", "__setitem__")
INDEXING = ("__getitem__", "__setitem__")
MOVES = ("to", "cuda", "cpu")
LOOKS = ("_has_compatible_shallow_copy_type",)


class Pretended(TorchFunctionMode):
    """Keeps the devices, and looks at every call. crossed: (name of the call, from, to) of every copy between two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.crossed: list[tuple[str, torch.device, torch.device]] = []

    def of(self, tensor: Tensor) -> torch.device:
        """Where a tensor says that it is."""
        return self.devices.get(tensor, CPU)

    def put(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Have a tensor be there."""
        self.devices[tensor] = device
        return tensor

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "__get__" and getattr(func, "__self__", None) is Tensor.device:
            return self.of(args[0])
        if name == "__get__" and getattr(func, "__self__", None) is Tensor.is_cuda:
            return self.of(args[0]).type == "cuda"
        if name == "__set__" and getattr(func, "__self__", None) is Tensor.data:
            self.put(args[0], self.of(args[1]))
            return func(*args, **kwargs)
        if name in LOOKS:
            return func(*args, **kwargs)
        if name in MOVES and isinstance(args[0], Tensor):
            return self._moved(func, name, args, kwargs)
        given = list(_tensors((args, kwargs)))
        made_on = kwargs.pop("device", None)
        place = torch.device(made_on) if made_on is not None else self._common(name, args, given)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if not any(tensor is own for own in given):
                self.put(tensor, _numbered(place))
        return result

    def _moved(self, func, name, args, kwargs):
        """What `.to` gives: the same tensor where nothing changes, else a new one."""
        own, before = args[0], self.of(args[0])
        after = {"cpu": CPU, "cuda": GPUS[0]}.get(name) or self._wanted(args[1:], kwargs) or before
        dtypes = [arg.dtype if isinstance(arg, Tensor) else arg for arg in (*args[1:], kwargs.get("dtype"))]
        dtype = next((arg for arg in dtypes if isinstance(arg, torch.dtype)), own.dtype)
        result = func(own, dtype) if name == "to" else own
        if result is own and _numbered(after) != before:
            result = own.detach().clone() if not isinstance(own, nn.Parameter) else nn.Parameter(own.detach().clone())
        if _numbered(after) != before:
            self.crossed.append((name, before, _numbered(after)))
        return result if result is own else self.put(result, _numbered(after))

    def _wanted(self, args, kwargs):
        for arg in (*args, kwargs.get("device"), kwargs.get("other")):
            if isinstance(arg, Tensor):
                return self.of(arg)
            if isinstance(arg, str | torch.device):
                return torch.device(arg)
        return None

    def _common(self, name, args, given):
        """The device that all operands share."""
        if name in COPIES and given:
            for other in given[1:]:
                if other.ndim and self.of(other) != self.of(given[0]) and self.of(other) != CPU:
                    self.crossed.append((name, self.of(other), self.of(given[0])))
            return self.of(given[0])
        if name in INDEXING:
            given = [args[0], *(tensor for tensor in given[1:] if self.of(tensor) != CPU)]
        places = list(dict.fromkeys(self.of(tensor) for tensor in given if tensor.ndim))
        if len(places) > 1:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found {places}")
        lone = [self.of(tensor) for tensor in given]
        return places[0] if places else next((place for place in lone if place != CPU), CPU)


def _numbered(device: torch.device) -> torch.device:
    return torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device


def _tensors(values: object) -> Iterator[Tensor]:
    """The tensors in nested values."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


@contextmanager
def pretended_devices() -> Iterator[Pretended]:
    """Devices are pretended inside."""
    with Pretended() as mode:
        yield mode
