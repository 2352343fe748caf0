"""How near mapped keys and values come to a target's own, and whether they miss it where its attention reads.

The target reads a text by itself; then each layer's attention is computed again with mapped keys and values under the target's
true queries (the paper, Method and Table 4). All tokens of a text count, those of a native head too, so that all mappers of a
pair are compared on the same ones. Does not know where texts come from, nor records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvferry.errors import KvferryError
from kvferry.evaluate.finite import NotFinite, named
from kvferry.kv.attention import Attention, attend, observed
from kvferry.kv.cache import LayerKV, forward, make_cache
from kvferry.kv.handoff import Translator, as_cached
from kvferry.kv.prefill import SourcePrefill, Span, Text, Tokens
from kvferry.kv.rope import Rotation, rotation
from kvferry.prepare.decoder import positions_of
from kvferry.progress import bar

Sums = tuple[Tensor, ...]


@dataclass(frozen=True)
class Ferry:
    """What carries a text: a mapper, and how many first tokens have the target's own keys and values."""

    mapper: Translator
    native_head: int = 0


@dataclass
class Diagnosis:
    """What was found of one mapper: by text a value a target layer, and R² a target layer over the tokens of all texts.

    Where a layer has no error at all there is nothing to be concentrated: its value is None, and a text of such layers alone
    has no entry. A mapper of siblings that share their first layers may be exact there.
    """

    cosine: dict[str, list[float]] = field(default_factory=dict)
    k_concentration: dict[str, list[float | None]] = field(default_factory=dict)
    v_concentration: dict[str, list[float | None]] = field(default_factory=dict)
    r2_k: list[float] = field(default_factory=list)
    r2_v: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Truth:
    """What a target layer did with a text: its attention without the probabilities, and what they are needed for.

    directions `[kv_heads, head_dim, components]` are the right singular vectors of the queries of a KV head's group,
    strengths `[kv_heads, components]` the squared singular values. reading `[heads, tokens]` is Σ_u a_ui², the squared
    attention that position i gets; even `[heads, tokens]` spreads what each query reads evenly over the positions that it
    may see, later ones excluded. float64.
    """

    attention: Attention
    directions: Tensor
    strengths: Tensor
    reading: Tensor
    even: Tensor


@torch.inference_mode()
def diagnose(
    source: PreTrainedModel, target: PreTrainedModel, ferries: Mapping[str, Ferry], texts: Mapping[str, Tokens]
) -> dict[str, Diagnosis]:
    """Diagnose mappers of one pair, by name, on texts by name: each text is read once by either model.

    One text's keys and values, and one mapper's, are held at a time. R² of a head is 1 − (squared error) / (squares about the
    mean), both over its coordinates and the tokens of all texts, then the mean over heads. Keys are compared in content space:
    the target's rotation is taken off mapped and true ones alike, as they lie in the cache.

    Raises:
        KvferryError: a text is empty or longer than the target's positions, the target's attention or a mapped value is not
            finite, R² is undefined since a head's values never change, or the target's attention cannot be observed.
    """
    found = {name: Diagnosis() for name in ferries}
    errors: dict[str, list[Sums]] = {name: [] for name in ferries}
    spread: list[Sums] = []
    with bar(len(texts), "diagnostics", "text") as progress:
        for text, tokens in texts.items():
            truths, positions = _read(target, text, tokens), torch.arange(len(tokens), device=target.device)[None]
            layers, _ = SourcePrefill(source).extend([Text()], Span.of([tokens], source.device))
            own, turned = rotation(source, positions), rotation(target, positions)
            spread = _added(spread, [_spread(truth, turned) for truth in truths])
            for name, ferry in ferries.items():
                mapped = _mapped(ferry, layers, own, turned, truths, target)
                _check_finite(mapped, name, text)
                _note(found[name], text, truths, mapped)
                errors[name] = _added(errors[name], _errors(truths, mapped, turned))
            progress.update()
    for name, own_errors in errors.items():
        found[name].r2_k, found[name].r2_v = (
            [_r2(error[kind], *true[3 * kind : 3 * kind + 3]) for error, true in zip(own_errors, spread, strict=True)]
            for kind in (0, 1)
        )
    return found


def look(attention: Attention) -> Truth:
    """What diagnostics need of one layer's attention to one text: an observer. Raises NotFinite if it is not."""
    if not attention.output.isfinite().all():
        raise NotFinite(0, f"the target's attention is not finite in layer {attention.layer}")
    query = attention.query[0].double().unflatten(0, (attention.key.shape[1], -1)).flatten(1, 2)
    strengths, directions = torch.linalg.eigh(query.transpose(1, 2) @ query)
    # An eigenvalue that is next to zero may come out a little below it.
    return Truth(replace(attention, blocks=[]), directions, strengths.clamp_min(0), *reading_weights(attention))


def reading_weights(attention: Attention) -> tuple[Tensor, Tensor]:
    """`reading` and `even` of `Truth`, `[heads, tokens]`, from the probabilities. Both have the same sum over positions."""
    heads, tokens = attention.query.shape[1:3]
    reading, even = torch.zeros(2, heads, tokens, dtype=torch.float64, device=attention.query.device)
    for block in attention.blocks:
        squares = block.probabilities[0].flatten(0, 1).double().square()
        seen = _seen(attention, block.start, block.stop)
        reading[:, : block.stop] += squares.sum(1)
        even[:, : block.stop] += (squares.sum(2) / seen.sum(1)) @ seen
    return reading, even


def _seen(attention: Attention, start: int, stop: int) -> Tensor:
    """1 where the queries `start` to `stop` may see a key, float64 `[stop - start, stop]`."""
    if attention.mask is not None:
        return attention.mask[0, 0, start:stop, :stop].double()
    ones = torch.ones(stop - start, stop, dtype=torch.float64, device=attention.query.device)
    return ones.tril(start)


def cosine_of(truth: Truth, keys: Tensor, values: Tensor) -> float:
    """Cosine of the attention outputs from mapped and from true keys and values, mean over tokens and query heads.

    keys (with rotation) and values `[1, kv_heads, tokens, head_dim]`.
    """
    own = truth.attention
    outputs, _ = attend(own.query, keys, values, own.mask, own.scaling)
    return float(torch.cosine_similarity(outputs.double(), own.output.double(), dim=-1).mean())


def k_concentration(truth: Truth, keys: Tensor) -> float | None:
    """Squared key errors along the queries' singular vectors, weighted by squared singular values, over their plain mean.

    Σ_c s_c²·e_c / (Σ_c s_c² · mean_c e_c) with e_c summed over tokens, mean over KV heads that have an error; None where none
    has. keys with rotation, where queries live, `[1, kv_heads, tokens, head_dim]`.
    """
    errors = ((keys - truth.attention.key)[0].double() @ truth.directions).square().sum(1)
    even = truth.strengths.mean(1, keepdim=True).expand_as(errors)
    return _concentration(truth.strengths, even, errors)


def v_concentration(truth: Truth, values: Tensor) -> float | None:
    """Squared value errors by position, weighted by squared true attention, over the same with attention spread evenly.

    Σ_u Σ_i a_ui²·e_i / Σ_u (Σ_i a_ui² · mean_i e_i), where i runs over the positions that query u may see: the mean over query
    heads that read an error; None where none does. values `[1, kv_heads, tokens, head_dim]`.
    """
    errors = (values - truth.attention.value)[0].double().square().sum(-1)
    group = len(truth.reading) // len(errors)
    return _concentration(truth.reading, truth.even, errors.repeat_interleave(group, 0))


def _concentration(weights: Tensor, even: Tensor, errors: Tensor) -> float | None:
    """Σ weights·errors / Σ even·errors over the last dimension, mean over heads; all `[heads, places]`."""
    whole = (even * errors).sum(1)
    known = whole > 0
    return float(((weights * errors).sum(1)[known] / whole[known]).mean()) if known.any() else None


def _read(target: PreTrainedModel, text: str, tokens: Tokens) -> list[Truth]:
    """The target reads a text by itself, in one pass."""
    most = positions_of(target.config)
    if not 0 < len(tokens) <= most:
        raise KvferryError(
            f"text {text}: {len(tokens)} tokens, where the target has 1 to {most} positions; leave the text out"
        )
    span = Span.of([tokens], target.device)
    positions = torch.arange(len(tokens), device=target.device)[None]
    with named(lambda _: f"text {text}"), observed(target, look) as seen:
        forward(target, span.ids, make_cache([], target), span.mask, positions)
    return [seen[layer] for layer in sorted(seen)]


def _mapped(
    ferry: Ferry, layers: list[LayerKV], own: Rotation, turned: Rotation, truths: list[Truth], target: PreTrainedModel
) -> list[LayerKV]:
    """The cache that the target would read from, rounded as it would be, in float32; the native head is its own."""
    head, mapped = ferry.native_head, as_cached(ferry.mapper.translate(layers, own, turned), target)
    return [
        (
            torch.cat((truth.attention.key[:, :, :head], keys[:, :, head:].float()), dim=2),
            torch.cat((truth.attention.value[:, :, :head], values[:, :, head:].float()), dim=2),
        )
        for truth, (keys, values) in zip(truths, mapped, strict=True)
    ]


def _check_finite(mapped: list[LayerKV], name: str, text: str) -> None:
    """Refuse a cache with an infinite or undefined number."""
    for layer, pair in enumerate(mapped):
        if not all(part.isfinite().all() for part in pair):
            raise KvferryError(
                f"{name}: its keys or values for layer {layer} are not finite on text {text}; fit the mapper again"
            )


def _note(found: Diagnosis, text: str, truths: list[Truth], mapped: list[LayerKV]) -> None:
    """What one text says of one mapper."""
    pairs = list(zip(truths, mapped, strict=True))
    found.cosine[text] = [cosine_of(truth, *pair) for truth, pair in pairs]
    on_keys = [k_concentration(truth, keys) for truth, (keys, _) in pairs]
    on_values = [v_concentration(truth, values) for truth, (_, values) in pairs]
    for by_text, by_layer in ((found.k_concentration, on_keys), (found.v_concentration, on_values)):
        if any(value is not None for value in by_layer):
            by_text[text] = by_layer


def _content(truth: Truth, turned: Rotation) -> tuple[Tensor, Tensor]:
    """True keys without rotation and true values, float64 `[kv_heads, tokens, head_dim]`."""
    keys = turned.for_heads().strip(truth.attention.key)
    return keys[0].double(), truth.attention.value[0].double()


def _spread(truth: Truth, turned: Rotation) -> Sums:
    """Number, sums `[kv_heads, head_dim]` and sums of squares `[kv_heads]` of the tokens' keys, then of their values."""
    sums: Sums = ()
    for part in _content(truth, turned):
        sums += (torch.tensor(float(part.shape[1])), part.sum(1), part.square().sum((1, 2)))
    return sums


def _errors(truths: list[Truth], mapped: list[LayerKV], turned: Rotation) -> list[Sums]:
    """Squared errors of keys without rotation, and of values, by layer: `[kv_heads]` each."""
    sums = []
    for truth, (keys, values) in zip(truths, mapped, strict=True):
        stripped = turned.for_heads().strip(keys)[0].double()
        own_keys, own_values = _content(truth, turned)
        sums.append(tuple((a - b).square().sum((1, 2)) for a, b in ((stripped, own_keys), (values[0], own_values))))
    return sums


def _added(so_far: list[Sums], more: list[Sums]) -> list[Sums]:
    """Sums by layer, with more of them."""
    if not so_far:
        return more
    return [tuple(a + b for a, b in zip(old, new, strict=True)) for old, new in zip(so_far, more, strict=True)]


def _r2(errors: Tensor, count: Tensor, sums: Tensor, squares: Tensor) -> float:
    """R² from sums over tokens, mean over heads."""
    total = squares - sums.square().sum(1) / count.to(sums.device)
    r2 = float((1 - errors / total).mean())
    if not torch.tensor(r2).isfinite():
        raise KvferryError("the texts hold one token only, or the same everywhere: R² is undefined; take more text")
    return r2
