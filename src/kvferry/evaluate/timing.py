"""How long a mapper takes for 1,024 tokens: real keys and values of a source, one span, a few trials.

The source's prefill is not in the time, nor is anything the target does. Does not know which mapper it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvferry.evaluate.clock import Effort, time_trials
from kvferry.kv.cache import LayerKV, devices_of
from kvferry.kv.handoff import Translator
from kvferry.kv.prefill import SourcePrefill, Span, Text
from kvferry.kv.rope import Rotation, rotation
from kvferry.records import Item

METRIC = "ms_per_1024_tokens"
TOKENS, WARM_UP, TRIALS = 1024, 1, 3


@dataclass(frozen=True)
class Load:
    """What `translate` is given: the source's keys and values of one row of tokens, and both rotations of its positions.

    devices: all that the two models are on.
    """

    layers: list[LayerKV]
    source: Rotation
    target: Rotation
    devices: list[torch.device]


def make_load(source: PreTrainedModel, target: PreTrainedModel, chunks: Tensor) -> Load:
    """The first 1,024 tokens of the chunks `[count, length]`, as one text; again from the first where there are fewer."""
    few = chunks.flatten()[:TOKENS]
    ids = few.repeat(-(-TOKENS // len(few)))[None, :TOKENS].to(source.device)
    span = Span(ids, torch.ones_like(ids))
    layers, _ = SourcePrefill(source).extend([Text()], span)
    positions = span.positions(torch.zeros(1, dtype=torch.long, device=ids.device))
    turned = rotation(target, positions.to(target.device))
    return Load(layers, rotation(source, positions), turned, devices_of(source, target))


def time_translation(mapper: Translator, load: Load) -> list[Item]:
    """An item a trial, its time in milliseconds; one run before them does not count."""
    calls = {METRIC: lambda: mapper.translate(load.layers, load.source, load.target)}
    times = time_trials(calls, load.devices, Effort(WARM_UP, TRIALS))[METRIC]
    return [Item(f"trial-{number}", milliseconds) for number, milliseconds in enumerate(times)]
