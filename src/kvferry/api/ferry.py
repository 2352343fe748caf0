"""A mapper with the two models that it was fitted for: the source's cache in, the target's cache out.

What comes out has a slot for every slot that came in. Does not know texts, tokenizers or what is generated then.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvferry.api.checks import check_positions
from kvferry.api.models import identified
from kvferry.config import Geometry
from kvferry.errors import KvferryError
from kvferry.kv import handoff
from kvferry.kv.cache import (
    NO_LOGITS,
    LayerKV,
    append_layers,
    cache_length,
    filled_layers,
    forward,
    layer_devices,
    plain_cache,
)
from kvferry.kv.mapper import MANIFEST
from kvferry.kv.mapper import load_mapper as read_mapper
from kvferry.prepare.models import Loaded


@dataclass(frozen=True)
class Ferry:
    """What `load_mapper` returns: a mapper between two models in memory.

    source, target: the models. mapper: the maps themselves. manifest: what the artifact says of itself: `recipe`,
    `selected_layers` (source layers of each target layer), `rows`, `features`, `r2`, `parameters`, `dtype`, and `source` and
    `target` (models by hash).
    """

    source: Loaded
    target: Loaded
    mapper: handoff.Translator
    manifest: dict[str, Any]

    @property
    def native_head(self) -> int:
        """How many first tokens of a text the target reads itself with this mapper, by its recipe."""
        return self.manifest["recipe"]["native_head"]

    @torch.no_grad()
    def translate(
        self,
        source_cache: DynamicCache,
        *,
        attention_mask: Tensor | None = None,
        input_ids: Tensor | None = None,
        into: DynamicCache | None = None,
    ) -> DynamicCache:
        """The target's cache of the tokens that the source's cache is of, as `target.generate` takes it.

        Args:
            source_cache: as the source's forward or `generate` filled it; keys and values of a layer are
                `[batch, kv_heads, slots, head_dim]`. It is left as it is.
            attention_mask: `[batch, slots]`, 1 where a slot holds a token, as the source was given it; None if all do. A row's
                positions count its tokens, so padding may be on either side.
            input_ids: `[batch, slots]`, the tokens. Only needed by a mapper whose recipe has a `native_head`: the target reads
                the slots up to where every row has so many tokens itself.
            into: a target cache of the first slots, from an earlier call. It grows by those that it does not have yet, and
                only these are mapped: so a conversation maps each token once.

        Returns:
            A cache of the target with `slots` slots (`into`, if that is given), in the target's dtype. Use it with the same mask.

        Raises:
            KvferryError: the cache is not the source's, is empty, on another device than the target, or longer than the target
                has positions for; the mask, ids or `into` do not belong to it; ids are missing.

        Example:
            >>> source_cache = source.model(input_ids=ids[:, :-1], use_cache=True).cache
            >>> cache = mapper.translate(source_cache)
            >>> out = target.model.generate(ids, cache=cache, max_new_tokens=8)
            >>> out.shape[1] > ids.shape[1]
            True
        """
        own = self._source_layers(source_cache)
        batch, _, slots, _ = own[0][0].shape
        device = self.target.model.device
        mask = torch.ones(batch, slots, dtype=torch.long) if attention_mask is None else attention_mask
        given = {"attention_mask": mask} | ({} if input_ids is None else {"input_ids": input_ids})
        for name, tensor in given.items():
            if not isinstance(tensor, Tensor):
                raise KvferryError(f"{name} is a {type(tensor).__name__}; give a tensor [batch, slots]")
            if tensor.shape != (batch, slots):
                raise KvferryError(
                    f"{name} is {list(tensor.shape)}, but the source cache has {batch} rows of {slots} slots; give them alike"
                )
        done = 0 if into is None else self._length(into, batch, slots)
        cache = plain_cache(self.target.model) if into is None else into
        rest = [(keys[:, :, done:], values[:, :, done:]) for keys, values in own]
        ids = None if input_ids is None else input_ids[:, done:].to(device)
        self.append(cache, rest, mask.long().to(device), ids)
        return cache

    @torch.no_grad()
    def append(self, cache: DynamicCache, own: list[LayerKV], mask: Tensor, ids: Tensor | None) -> None:
        """Bring new slots into the target's cache: the native head by reading, the others by mapping.

        Args:
            cache: of the target; it grows.
            own: the source's keys and values `[batch, kv_heads, new, head_dim]` of every layer.
            mask: `[batch, cached + new]`.
            ids: the new tokens `[batch, new]`, if the native head may reach into them.

        Raises:
            KvferryError: it does, and there are no ids.
        """
        done = cache_length(cache)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, done:]
        head = self._head_slots(positions, mask[:, done:])
        if head and ids is None:
            raise KvferryError(
                f"this mapper leaves the first {self.native_head} tokens to the target (native_head); give input_ids"
            )
        if head:
            seen = mask[:, : done + head]
            forward(self.target.model, ids[:, :head], cache, seen, positions[:, :head], NO_LOGITS)
        if head < positions.shape[1]:
            rest = [(keys[:, :, head:], values[:, :, head:]) for keys, values in own]
            append_layers(cache, self._handoff.mapped(rest, positions[:, head:]))

    def _head_slots(self, positions: Tensor, mask: Tensor) -> int:
        """How many of the slots the target reads itself: up to where every row has its native head behind it."""
        if not self.native_head:
            return 0
        native = ((positions < self.native_head) & mask.bool()).any(0).nonzero()
        return int(native[-1]) + 1 if len(native) else 0

    @property
    def _handoff(self) -> handoff.Handoff:
        return handoff.Handoff(self.source.model, self.target.model, self.mapper)

    def _source_layers(self, cache: DynamicCache) -> list[LayerKV]:
        """The layers of a cache, if it can be the source's."""
        layers, card = filled_layers(cache, "source"), self.source.card
        wanted = Geometry(card["layers"], card["kv_heads"], card["head_dim"])
        found = Geometry(len(layers), layers[0][0].shape[1], layers[0][0].shape[3])
        if found != wanted:
            raise KvferryError(
                f"the source cache has {_said(found)}, but {card['model']} has {_said(wanted)}; give the source's own cache"
            )
        if layers[0][0].device != self.target.model.device:
            raise KvferryError(
                f"the source cache is on {layers[0][0].device} and the target on {self.target.model.device}; "
                "put both on one device"
            )
        check_positions(self.target, layers[0][0].shape[2])
        return layers

    def _length(self, into: DynamicCache, batch: int, slots: int) -> int:
        """The slots of `into`, if it can be a target cache of the first slots."""
        layers, card = filled_layers(into, "target"), self.target.card
        wanted = [batch, card["kv_heads"], card["head_dim"]]
        rows, heads, done, dim = layers[0][0].shape
        if len(layers) != card["layers"] or [rows, heads, dim] != wanted or done > slots:
            raise KvferryError(
                f"into has {len(layers)} layers of {rows} rows, {done} slots and {heads} heads of {dim}, which is no cache of "
                f"{card['model']} for the first of {slots} slots of {batch} rows; give what an earlier call returned"
            )
        return done


def _said(geometry: Geometry) -> str:
    return f"{geometry.layers} layers with {geometry.kv_heads} KV heads of {geometry.head_dim}"


def load_mapper(directory: str | Path, source: Loaded | PreTrainedModel, target: Loaded | PreTrainedModel) -> Ferry:
    """Load a mapper for two models in memory.

    Args:
        directory: of the artifact, `RESULTS/pairs/PAIR/mappers/VARIANT` of a run.
        source, target: what `kvferry.load_model` or transformers' `from_pretrained` returned, both on one device.

    Returns:
        The mapper, on the target's device, with both models.

    Raises:
        KvferryError: there is no mapper, it is altered, or was fitted for other models or another tokenizer; or the models are
            on two devices.

    Example:
        >>> mapper = load_mapper("results/pairs/24l-to-30l/mappers/ridge_k8", source, target)
        >>> mapper.manifest["target"]["model"]
        'smollm2-135m'
    """
    path = mapper_at(directory)
    whence, whither = identified(source), identified(target)
    mapper, manifest = read_mapper(path, whence.card, whither.card)
    devices = [loaded.model.device for loaded in (whence, whither)]
    if devices[0] != devices[1]:
        raise KvferryError(f"the source is on {devices[0]} and the target on {devices[1]}; put both on one device")
    return Ferry(whence, whither, mapper.onto(layer_devices(whither.model)), manifest)


def mapper_at(directory: str | Path) -> Path:
    """The directory, if it holds a mapper.

    Raises:
        KvferryError: it does not.
    """
    path = Path(directory)
    if not (path / MANIFEST).is_file():
        raise KvferryError(f"{path}: holds no mapper (no {MANIFEST}); give RESULTS/pairs/PAIR/mappers/VARIANT of a run")
    return path
