"""Whatever the spans, padding and carrier, the target reads on as if it had read the prompt itself, where that is due."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.evaluate.controls import Passthrough
from kvferry.kv.cache import cache_layers, cache_length
from kvferry.kv.handoff import Handoff, Native, read, select
from kvferry.kv.mapper import Affine, Mapper
from kvferry.kv.prefill import Span

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
LAYERS = 3
SELECTED = {
    "own layer first": [[0, 1, 2], [1, 0, 2], [2, 1, 0]],
    "own layer anywhere": [[2, 1, 0], [0, 2, 1], [1, 2, 0]],
    "ascending": [[0, 1, 2]] * 3,
}


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama", LAYERS)


@pytest.fixture(scope="module")
def source(tiny_model):
    """Another model, of another depth and other heads."""
    return tiny_model("qwen3", 2, kv_heads=4, head_dim=4, seed=7)


@pytest.fixture(scope="module")
def garbage():
    """A mapper from `source` to `model` that knows nothing."""
    torch.manual_seed(11)
    affines = [Affine(torch.randn(16, 16), torch.randn(16)) for _ in range(LAYERS)]
    return Mapper([[0], [1], [0]], affines, affines, kv_heads=2)


@dataclass
class Counting:
    """A carrier that notes the number of token slots it is given, and passes the cache through."""

    spans: list

    def translate(self, layers, source, target):
        self.spans.append(layers[0][0].shape[2])
        return Passthrough().translate(layers, source, target)


def prompts(lengths, seed=5):
    torch.manual_seed(seed)
    return [torch.randint(3, 250, (length,)).tolist() for length in lengths]


def pieces(row, sizes):
    """Cut a row into pieces of `sizes`, which add up to its length."""
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    assert ends[-1] == len(row)
    return [row[a:b] for a, b in pairwise(ends)]


def extended(system, rows, sizes):
    """The prefix after all pieces of all rows; `sizes` holds a list of piece lengths a row, equally many."""
    prefix = system.start(len(rows))
    for span in zip(*[pieces(row, own) for row, own in zip(rows, sizes, strict=True)], strict=True):
        prefix = system.extend(prefix, Span.of(span, system.target.device))
    return prefix


def tail_logits(system, rows, sizes):
    """Logits of each row's last piece, which the target reads itself; a list of `[tokens, vocabulary]`."""
    heads = [row[: len(row) - own[-1]] for row, own in zip(rows, sizes, strict=True)]
    prefix = extended(system, heads, [own[:-1] for own in sizes])
    tails = [row[len(row) - own[-1] :] for row, own in zip(rows, sizes, strict=True)]
    logits, _ = read(system.target, prefix, Span.of(tails, system.target.device))
    return [row[: len(tail)] for row, tail in zip(logits, tails, strict=True)]


@torch.inference_mode()
def plain_tail(model, rows, sizes):
    """The same by one plain forward a row."""
    return [model(torch.tensor([row])).logits[0, len(row) - own[-1] :] for row, own in zip(rows, sizes, strict=True)]


def assert_reads_as(model, system, rows, sizes):
    for found, wanted in zip(tail_logits(system, rows, sizes), plain_tail(model, rows, sizes), strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)


SPLITS = [
    ([[12, 5]], "one row in one go"),
    ([[4, 4, 4, 5]], "one row in three spans"),
    ([[12, 5], [3, 2], [1, 1]], "rows of different lengths"),
    ([[12, 1, 7, 5], [3, 9, 2, 1], [1, 1, 1, 4]], "each row in spans of its own"),
    ([[1] * 12, [2] * 12], "token by token"),
    ([[0, 6, 3], [5, 0, 2], [4, 4, 4]], "rows without a token in a span"),
    ([[0, 0, 3], [5, 2, 6]], "a row of no tokens at all before the target reads"),
]
any_split = pytest.mark.parametrize("sizes", [s for s, _ in SPLITS], ids=[name for _, name in SPLITS])


@any_split
def test_a_native_prefix_reads_on_like_one_full_forward(sizes, model):
    assert_reads_as(model, Native(model), prompts(map(sum, sizes)), sizes)


@any_split
def test_a_cache_passed_through_the_handoff_reads_on_like_one_full_forward(sizes, model):
    assert_reads_as(model, Handoff(model, model, Passthrough()), prompts(map(sum, sizes)), sizes)


@any_split
@pytest.mark.parametrize("selected", SELECTED.values(), ids=SELECTED)
def test_an_identity_mapper_over_all_layers_reads_on_like_one_full_forward(sizes, selected, model, identity_mapper):
    system = Handoff(model, model, identity_mapper(model, selected))
    assert_reads_as(model, system, prompts(map(sum, sizes)), sizes)


@pytest.mark.parametrize("head", [1, 3, 30])
@any_split
def test_a_native_head_before_a_faithful_carrier_changes_nothing(sizes, head, model):
    assert_reads_as(model, Handoff(model, model, Passthrough(), native_head=head), prompts(map(sum, sizes)), sizes)


@given(
    rows=st.integers(1, 4).flatmap(
        lambda spans: st.lists(
            st.tuples(*[st.integers(0, 7)] * spans, st.integers(1, 5)).map(list), min_size=1, max_size=4
        )
    ),
    head=st.integers(0, 9),
)
@settings(max_examples=12, deadline=None)
def test_any_spans_of_any_rows_read_on_like_one_full_forward(model, rows, head):
    batch = prompts(map(sum, rows))
    if all(any(own[span] for own in rows) for span in range(len(rows[0]))):
        assert_reads_as(model, Native(model), batch, rows)
        assert_reads_as(model, Handoff(model, model, Passthrough(), native_head=head), batch, rows)


def test_the_order_of_features_matters(model, identity_mapper):
    """The tests above would not see a wrong order if blocks were alike."""
    sizes = [[12, 5]]
    rows = prompts([17])
    right = identity_mapper(model, SELECTED["own layer anywhere"])
    wrong = Mapper(SELECTED["ascending"], right.keys, right.values, right.kv_heads)
    found, wanted = (tail_logits(Handoff(model, model, mapper), rows, sizes)[0] for mapper in (wrong, right))
    assert (found - wanted).abs().max() > 0.1


def test_what_the_carrier_brings_decides_the_answer(model, source, garbage):
    """A mapper that knows nothing must not read on like the target: else the hand-off ignores it."""
    rows, sizes = prompts([17]), [[12, 5]]
    found, wanted = tail_logits(Handoff(source, model, garbage), rows, sizes), plain_tail(model, rows, sizes)
    assert (found[0] - wanted[0]).abs().max() > 0.1


@pytest.mark.parametrize("sizes", [[[12, 5]], [[3, 4, 5, 5], [2, 2, 6, 1]]], ids=["one span", "spans"])
@pytest.mark.parametrize("head", [12, 100])
def test_a_native_head_as_long_as_the_prefix_leaves_nothing_to_the_mapper(sizes, head, model, source, garbage):
    assert_reads_as(model, Handoff(source, model, garbage, native_head=head), prompts(map(sum, sizes)), sizes)


def readable(prefix, row):
    """Keys and values of the slots of a row that may be read, a pair a layer, `[kv_heads, tokens, head_dim]`."""
    slots = prefix.mask[row].bool()
    return [(keys[row][:, slots], values[row][:, slots]) for keys, values in cache_layers(prefix.cache)]


@pytest.mark.parametrize("sizes", [[14], [2, 12], [1, 1, 1, 11], [6, 8]], ids=str)
@pytest.mark.parametrize("head", [1, 4, 5])
def test_the_native_head_is_the_targets_own_cache_and_the_rest_is_mapped(sizes, head, model, source, garbage):
    rows = prompts([14])
    mapped = readable(extended(Handoff(source, model, garbage), rows, [sizes]), 0)
    found = readable(extended(Handoff(source, model, garbage, native_head=head), rows, [sizes]), 0)
    with torch.inference_mode():
        own = model(torch.tensor(rows), use_cache=True).cache.layers
    for pair, from_mapper, layer in zip(found, mapped, own, strict=True):
        for part, carried, native in zip(pair, from_mapper, (layer.keys[0], layer.values[0]), strict=True):
            assert part.shape[1] == 14
            torch.testing.assert_close(part[:, :head], native[:, :head], **CLOSE)
            torch.testing.assert_close(part[:, head:], carried[:, head:], **CLOSE)


def test_without_a_native_head_the_target_computes_nothing_of_the_prefix(model, source, garbage):
    calls = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    extended(Handoff(source, model, garbage), prompts([14]), [[6, 8]])
    hook.remove()
    assert not calls


def test_a_span_at_an_offset_is_mapped_to_the_rows_that_one_go_gives(model, source, garbage):
    system, rows = Handoff(source, model, garbage), prompts([20])
    together = readable(extended(system, rows, [[20]]), 0)
    for sizes in ([7, 13], [19, 1], [5, 5, 5, 5]):
        for pair, whole in zip(readable(extended(system, rows, [sizes]), 0), together, strict=True):
            for part, wanted in zip(pair, whole, strict=True):
                torch.testing.assert_close(part, wanted, **CLOSE)


def test_each_span_is_mapped_once_and_never_again(model):
    carrier = Counting([])
    extended(Handoff(model, model, carrier), prompts([20]), [[7, 3, 10]])
    assert carrier.spans == [7, 3, 10]


def test_a_row_without_tokens_disturbs_no_other_row_and_gives_no_nan(model, source, garbage):
    full = prompts([9, 6])
    for system in (Native(model), Handoff(source, model, garbage), Handoff(source, model, garbage, native_head=2)):
        alone = extended(system, full, [[9], [6]])
        beside = extended(system, [full[0], [], full[1]], [[9], [0], [6]])
        for keys, values in cache_layers(beside.cache):
            assert keys.isfinite().all()
            assert values.isfinite().all()
        for row, same in ((0, 0), (1, 2)):
            for pair, wanted in zip(readable(beside, same), readable(alone, row), strict=True):
                torch.testing.assert_close(pair, wanted, **CLOSE)
        assert beside.lengths.tolist() == [9, 0, 6]
        logits, _ = read(model, beside, Span.of([[5], [5], [5]], model.device))
        assert logits.isfinite().all()
        torch.testing.assert_close(logits[1], plain_tail(model, [[5]], [[1]])[0], **CLOSE)


def test_padding_tokens_are_never_read(model):
    rows = prompts([9, 4])
    span = Span.of(rows, model.device)
    noisy = Span(torch.where(span.mask.bool(), span.ids, 77), span.mask)
    tail = Span.of([[5, 6], [7, 8]], model.device)
    found = []
    for given_span in (span, noisy):
        system = Native(model)
        found.append(read(model, system.extend(system.start(2), given_span), tail)[0])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_positions_go_on_after_the_tokens_and_not_after_the_padding():
    span = Span.of([[5, 6, 7], [8], []], torch.device("cpu"))
    assert span.ids.tolist() == [[5, 6, 7], [8, 0, 0], [0, 0, 0]]
    assert span.mask.tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    positions = span.positions(torch.tensor([0, 10, 4]))
    assert positions[0].tolist() == [0, 1, 2]
    assert int(positions[1, 0]) == 10


@pytest.mark.parametrize("head", [0, 3, 9])
def test_selected_rows_of_a_prefix_go_on_as_their_originals_do(head, model, source, garbage):
    system, rows = Handoff(source, model, garbage, native_head=head), prompts([8, 5])
    more = prompts([4, 4, 4], seed=9)
    chosen = select(system, extended(system, rows, [[8], [5]]), torch.tensor([1, 0, 1]))
    forked = system.extend(chosen, Span.of(more, model.device))
    straight = extended(
        system, [rows[n] + new for n, new in zip((1, 0, 1), more, strict=True)], [[5, 4], [8, 4], [5, 4]]
    )
    for row in range(3):
        for pair, wanted in zip(readable(forked, row), readable(straight, row), strict=True):
            torch.testing.assert_close(pair, wanted, **CLOSE)


def test_a_selected_prefix_can_be_used_after_its_original_has_grown(model):
    system, rows = Handoff(model, model, Passthrough()), prompts([8])
    header = extended(system, rows, [[8]])
    for new in prompts([5, 3], seed=9):
        fork = select(system, header, torch.tensor([0]))
        fork = system.extend(fork, Span.of([new[:-1]], model.device))
        logits, _ = read(model, fork, Span.of([new[-1:]], model.device))
        torch.testing.assert_close(logits[0], plain_tail(model, [rows[0] + new], [[1]])[0], **CLOSE)
    assert cache_length(header.cache) == 8


def test_a_bfloat16_mapper_serves_float32_models(model, identity_mapper):
    mapper = identity_mapper(model, SELECTED["ascending"])

    def halved(affines):
        return [Affine(affine.weight.bfloat16(), affine.bias.bfloat16()) for affine in affines]

    half = Mapper(mapper.selected, halved(mapper.keys), halved(mapper.values), mapper.kv_heads)
    prefix = extended(Handoff(model, model, half), prompts([12]), [[12]])
    assert all(part.dtype == torch.float32 for pair in cache_layers(prefix.cache) for part in pair)
    exact = extended(Native(model), prompts([12]), [[12]])
    for pair, wanted in zip(readable(prefix, 0), readable(exact, 0), strict=True):
        for part, own in zip(pair, wanted, strict=True):
            assert (part - own).norm() / own.norm() < 0.01


def test_a_bfloat16_mapper_serves_bfloat16_models_as_well_as_a_float32_one(tiny_model, identity_mapper):
    """Identity weights are exact in bfloat16, so that all that is left is the rounding of the cache itself."""
    half = tiny_model("qwen3", 3).bfloat16()
    whole, rows = identity_mapper(half, SELECTED["ascending"]), prompts([12, 9])
    span = Span.of(rows, half.device)
    found = {}
    for name, system in {
        "own": Native(half),
        "float32": Handoff(half, half, whole),
        "bfloat16": Handoff(half, half, whole.astype(torch.bfloat16)),
    }.items():
        prefix = system.extend(system.start(2), span)
        assert {part.dtype for pair in cache_layers(prefix.cache) for part in pair} == {torch.bfloat16}
        found[name] = read(half, prefix, Span.of([[7], [8]], half.device))[0].float()
    size = found["own"].norm()
    assert (found["float32"] - found["own"]).norm() / size < 0.05
    assert (found["bfloat16"] - found["own"]).norm() / size < 0.05
