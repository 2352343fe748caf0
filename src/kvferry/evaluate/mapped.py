"""A fitted mapper between the two models of a pair, and where its records go. Does not know what is measured of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvferry.evaluate.pair import DECIDING
from kvferry.evaluate.setting import Contestant
from kvferry.kv.cache import devices_of, layer_devices
from kvferry.kv.handoff import Handoff
from kvferry.kv.mapper import Mapper, load_mapper, read_manifest
from kvferry.kv.prefill import Memory
from kvferry.prepare.models import Loaded


@dataclass(frozen=True)
class Mapped:
    """A variant on a pair: the models, the mapper's directory, the native head it is used with, and record → path."""

    pair: str
    variant: str
    source: Loaded
    target: Loaded
    directory: Path
    outputs: Mapping[str, Path]
    native_head: int = 0

    @property
    def devices(self) -> list[torch.device]:
        """All that the two models are on."""
        return devices_of(self.source.model, self.target.model)

    def contestant(self, **deciding: Any) -> Contestant:
        """Who answers; `deciding`: what else tells its records from others.

        Raises:
            KvferryError: the mapper's manifest is missing, broken or altered.
        """
        manifest = read_manifest(self.directory)
        mapper = {key: manifest[key] for key in DECIDING}
        return Contestant(
            self.variant,
            self.target.card["model"],
            {"source": self.source.card["weights_id"], "mapper": mapper, **deciding},
            {},
            dict(self.outputs),
            self.source.card["model"],
            self.pair,
            self.native_head,
        )

    def load(self) -> Mapper:
        """Read the mapper, check it, and bring it to where the target's layers are.

        Raises:
            KvferryError: it is unreadable, altered, or was fitted for other models.
        """
        mapper, _ = load_mapper(self.directory, self.source.card, self.target.card)
        return mapper.onto(layer_devices(self.target.model))

    def handoff(self, memory: Memory | None = None) -> Handoff:
        """The hand-off through the mapper. Raises as `load` does."""
        return Handoff(self.source.model, self.target.model, self.load(), self.native_head, memory or Memory())
