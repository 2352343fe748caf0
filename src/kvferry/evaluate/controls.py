"""Controls: carriers that are no fitted mapper, or that carry the wrong text, for telling what the hand-off itself does.

Know no benchmark, nor where the other text comes from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvferry.errors import KvferryError
from kvferry.kv.cache import LayerKV
from kvferry.kv.handoff import Handoff, Prefix, read
from kvferry.kv.mapper import Map, Mapper
from kvferry.kv.prefill import Span
from kvferry.kv.rope import Rotation


@dataclass(frozen=True)
class Passthrough:
    """The target's own cache, through the same path: rotation taken off and put back. Must answer as the target does."""

    def translate(self, layers: list[LayerKV], source: Rotation, target: Rotation) -> list[LayerKV]:
        """Keys stripped and rotated again, values as they are."""
        plain, turned = source.for_heads(), target.for_heads()
        return [(turned.apply(plain.strip(keys.float())).to(keys.dtype), values) for keys, values in layers]


@dataclass(frozen=True)
class ZeroCache:
    """A cache of zeros with the target's geometry: what the target does with slots that say nothing."""

    layers: int
    kv_heads: int
    head_dim: int

    @staticmethod
    def like(card: dict[str, Any]) -> ZeroCache:
        """With the geometry of a model's card."""
        return ZeroCache(card["layers"], card["kv_heads"], card["head_dim"])

    def translate(self, layers: list[LayerKV], source: Rotation, target: Rotation) -> list[LayerKV]:
        """Zeros for every token."""
        keys = layers[0][0]
        nothing = torch.zeros(
            keys.shape[0], self.kv_heads, keys.shape[2], self.head_dim, device=keys.device, dtype=keys.dtype
        )
        return [(nothing, nothing) for _ in range(self.layers)]


def random_like(mapper: Mapper, seed: int) -> Mapper:
    """A mapper that was fitted to nothing: what is left of `mapper` when only the size of its weights is kept.

    Every weight of every map becomes Gaussian numbers with the Frobenius norm of the fitted one, for each target layer, head
    and kind (and each matrix of a network) on its own. Biases are kept, so the control knows the same means of the target's
    cache as the mapper does; selected layers, RoPE handling, geometry, dtype and device are the mapper's. Equal seeds give
    equal weights on every device, since they are drawn on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    keys, values = (
        [_redrawn(own, mapper.kv_heads, generator) for own in maps] for maps in (mapper.keys, mapper.values)
    )
    return replace(mapper, keys=keys, values=values)


def _redrawn(own: Map, heads: int, generator: torch.Generator) -> Map:
    """A map of the same kind whose weights are drawn."""
    tensors = {
        name: tensor if name.endswith("bias") else _noise_like(tensor, heads, generator)
        for name, tensor in own.tensors().items()
    }
    return type(own)(**tensors)


def _noise_like(weight: Tensor, heads: int, generator: torch.Generator) -> Tensor:
    """Gaussian numbers with the norm that `weight` has for each head: `[features, heads·width]` or `[heads, in, out]`."""
    noise = torch.randn(weight.shape, generator=generator).to(weight.device)
    fitted, drawn = (_by_head(part.float(), heads) for part in (weight, noise))
    size = torch.linalg.vector_norm(fitted, dim=(1, 2), keepdim=True)
    scaled = drawn * (size / torch.linalg.vector_norm(drawn, dim=(1, 2), keepdim=True))
    if weight.ndim == 2:
        scaled = scaled.transpose(0, 1).flatten(1)
    return scaled.to(weight.dtype).contiguous()


def _by_head(weight: Tensor, heads: int) -> Tensor:
    """`[heads, in, out]`, a view: the first axis of three, or equal parts of the columns of a matrix."""
    return weight if weight.ndim == 3 else weight.unflatten(1, (heads, -1)).transpose(0, 1)


@dataclass(frozen=True)
class WrongDocument:
    """A hand-off whose source reads another text, as long as the prompt: token p of `other [tokens]`, modulo its length, at
    position p. What the target reads itself (its native head, the tokens held back, every continuation) is the prompt's own.

    The other text must not be the prompt, which is for the caller to see to. Prompts of any text share the source's prefills.
    """

    handoff: Handoff
    other: Tensor

    def __post_init__(self) -> None:
        """Raises KvferryError if there is no other text."""
        if not len(self.other):
            raise KvferryError("wrong_document: the other text has no tokens; give it a longer one")

    @property
    def target(self) -> PreTrainedModel:
        """The model that reads on."""
        return self.handoff.target

    def start(self, batch: int) -> Prefix:
        """An empty prefix for `batch` prompts."""
        return self.handoff.start(batch)

    def extend(self, prefix: Prefix, span: Span) -> Prefix:
        """Take a span of as many tokens of the other text into the prefix; the target reads the prompt's head, if it has one."""
        positions = span.positions(prefix.lengths)
        wrong = Span(self.other.to(positions.device)[positions % len(self.other)], span.mask)
        native = span.mask * (positions < self.handoff.native_head)
        carried = replace(self.handoff, native_head=0)
        if not native.any():
            return carried.extend(prefix, wrong)
        width = int(native.sum(1).max())
        _, grown = read(self.target, prefix, Span(span.ids[:, :width], native[:, :width]), logits_to_keep=1)
        whole = carried.extend(replace(grown, lengths=prefix.lengths), wrong)
        own = whole.mask.shape[1] - span.mask.shape[1]
        return replace(whole, mask=torch.cat((whole.mask[:, :own], span.mask - native), dim=1))
