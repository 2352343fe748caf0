"""What a model has read is the same whether it was read or remembered, and what is remembered never changes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.evaluate.controls import Passthrough, ZeroCache
from kvferry.evaluate.harness import SystemLM
from kvferry.kv.handoff import Handoff, Native, closed, read, select
from kvferry.kv.prefill import Key, Memory, SourcePrefill, Span, Text

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
PLENTY = 10**9
LAYERS = 3
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama", LAYERS)


@pytest.fixture
def reads(model):
    """The number of token slots, padding included, of each run of the model so far; runs of `plain` do not count."""
    sizes = []
    hook = model.register_forward_pre_hook(
        lambda _m, _a, words: sizes.extend(ids.numel() for name, ids in words.items() if name == "input_ids"),
        with_kwargs=True,
    )
    yield sizes
    hook.remove()


def prompts(lengths, seed=5):
    torch.manual_seed(seed)
    return [tuple(torch.randint(3, 250, (length,)).tolist()) for length in lengths]


def prefilled(prefill, *spans):
    """The texts after all spans, each a list of rows, and the layers of the last one."""
    texts = (Text(),) * len(spans[0])
    for rows in spans:
        layers, texts = prefill.extend(texts, Span.of(rows, CPU))
    return layers, texts


@torch.inference_mode()
def plain(model, row):
    """Keys and values `[layers, 2, kv_heads, tokens, head_dim]` of a row by one plain forward."""
    cache = model(torch.tensor([row]), use_cache=True).cache
    return torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers])


def held(text):
    """What a text holds; all layers are on one device, so each part is one tensor."""
    return torch.cat([tensor for (tensor,) in text.parts], dim=3)


SPANS = [
    [[4, 9, 1]],
    [[4, 9, 1], [3, 2, 7]],
    [[4, 0, 1], [0, 5, 2], [6, 3, 0]],
]


def cut(lengths, seed=5):
    """Spans of rows with the given lengths."""
    return [prompts(own, seed + number) for number, own in enumerate(lengths)]


@pytest.mark.parametrize("budget", [0, 4000, PLENTY])
@pytest.mark.parametrize("lengths", SPANS, ids=str)
def test_texts_hold_what_one_plain_forward_of_each_row_gives(lengths, budget, model):
    spans, memory = cut(lengths), Memory(budget)
    for _ in range(2):
        layers, texts = prefilled(SourcePrefill(model, memory), *spans)
        for number, text in enumerate(texts):
            row = sum((span[number] for span in spans), ())
            assert text.tokens == row
            torch.testing.assert_close(held(text), plain(model, row), **CLOSE)
            width = len(spans[-1][number])
            for layer, pair in enumerate(layers):
                for kind, part in enumerate(pair):
                    torch.testing.assert_close(part[number, :, :width], held(text)[layer, kind, :, len(row) - width :])
                    assert not part[number, :, width:].any()


@given(
    st.integers(1, 3).flatmap(lambda spans: st.lists(st.tuples(*[st.integers(0, 6)] * spans), min_size=1, max_size=4)),
    st.integers(0, 3),
    st.integers(0, 20000),
)
@settings(max_examples=25, deadline=None)
def test_any_spans_of_any_rows_are_remembered_as_they_were_read(model, rows, seed, budget):
    spans = [prompts(own, seed + number) for number, own in enumerate(zip(*rows, strict=True))]
    if not all(any(span) for span in spans):
        return
    memory = Memory(budget)
    first, again = (prefilled(SourcePrefill(model, memory), *spans) for _ in range(2))
    fresh = prefilled(SourcePrefill(model), *spans)
    for layers, texts in (first, again):
        torch.testing.assert_close(layers, fresh[0], **CLOSE)
        assert [text.tokens for text in texts] == [text.tokens for text in fresh[1]]
    assert memory.used <= budget


def test_what_is_remembered_is_not_read_again_and_is_the_same_to_the_last_bit(model, reads):
    spans, memory = cut([[4, 9, 1], [3, 2, 7]]), Memory(PLENTY)
    first, _ = prefilled(SourcePrefill(model, memory), *spans)
    assert reads == [3 * 9, 3 * 7]
    again, _ = prefilled(SourcePrefill(model, memory), *spans)
    assert reads == [3 * 9, 3 * 7]
    torch.testing.assert_close(again, first, rtol=0, atol=0)


def test_a_row_is_found_whatever_stands_beside_it_and_only_the_others_are_read(model, reads):
    (a, b, c), memory = prompts([8, 5, 6]), Memory(PLENTY)
    prefilled(SourcePrefill(model, memory), [a, b])
    reads.clear()
    layers, _ = prefilled(SourcePrefill(model, memory), [c, b, c])
    assert reads == [6]
    alone, _ = prefilled(SourcePrefill(model), [c, b, c])
    torch.testing.assert_close(layers, alone, **CLOSE)


def test_a_shared_header_is_read_once_for_all_that_go_on_from_it(model, reads):
    (header, *rows), memory = prompts([20, 3, 5]), Memory(PLENTY)
    for _ in range(2):
        _, (text,) = prefilled(SourcePrefill(model, memory), [header])
        _, texts = SourcePrefill(model, memory).extend([text] * 2, Span.of(rows, CPU))
        for row, own in zip(rows, texts, strict=True):
            torch.testing.assert_close(held(own), plain(model, header + row), **CLOSE)
    assert reads == [20, 2 * 5]


def test_the_same_tokens_after_others_are_not_taken_for_them(model, reads):
    (a, b, c), memory = prompts([6, 6, 4]), Memory(PLENTY)
    for before in (a, b):
        _, (text,) = prefilled(SourcePrefill(model, memory), [before], [c])
        torch.testing.assert_close(held(text), plain(model, before + c), **CLOSE)
    prefilled(SourcePrefill(model, memory), [c])
    assert len(reads) == 5


def test_a_span_that_begins_elsewhere_is_another(model, reads):
    (row,), memory = prompts([9]), Memory(PLENTY)
    for at in (3, 5):
        _, (text,) = prefilled(SourcePrefill(model, memory), [row[:at]], [row[at:]])
        torch.testing.assert_close(held(text), plain(model, row), **CLOSE)
    assert reads == [3, 6, 5, 4]


def test_two_models_that_share_a_memory_are_kept_apart(model, tiny_model):
    other, (row,), memory = tiny_model("llama", LAYERS, seed=9), prompts([7]), Memory(PLENTY)
    for own in (model, other):
        _, (text,) = prefilled(SourcePrefill(own, memory), [row])
        torch.testing.assert_close(held(text), plain(own, row), **CLOSE)


class TestMemory:
    def test_what_does_not_fit_is_not_kept_and_what_is_smaller_still_is(self, model):
        memory = Memory(100)
        large, small = (torch.zeros(10), torch.zeros(10)), (torch.zeros(5),)
        keys = [Key(model, (number,), 0) for number in range(4)]
        for key, part in zip(keys, (large, large, small, small), strict=True):
            memory.keep(key, part)
        assert [memory.find(key) is not None for key in keys] == [True, False, True, False]
        assert memory.used == 100

    def test_a_part_that_is_kept_twice_counts_once(self, model):
        memory, key = Memory(100), Key(model, (1, 2), 0)
        for _ in range(3):
            memory.keep(key, (torch.ones(10),))
        assert memory.used == 40

    def test_after_clearing_there_is_room_again(self, model):
        memory, key = Memory(100), Key(model, (1, 2), 0)
        memory.keep(key, (torch.ones(25),))
        memory.clear()
        assert memory.find(key) is None
        assert memory.used == 0
        memory.keep(key, (torch.zeros(25),))
        assert memory.find(key) is not None

    def test_only_the_parts_themselves_are_held(self, model):
        """No view that would keep a whole batch, or a buffer with spare room, from being freed."""
        memory = Memory(PLENTY)
        prefilled(SourcePrefill(model, memory), *cut([[4, 9, 1], [3, 2, 7]]))
        Native(model, memory).extend(Native(model).start(2), Span.of(prompts([7, 2], 31), CPU))
        parts = [tensor for (tensor,) in memory._parts.values()]
        assert len(parts) == 8
        assert all(part.untyped_storage().nbytes() == part.nbytes for part in parts)
        assert memory.used == sum(part.nbytes for part in parts)


@pytest.fixture
def lm(model, tokenizer):
    """The factory of lm-eval models on a memory, by carrier and native head."""

    def make(memory, carrier=None, head=0):
        system = Handoff(model, model, carrier or Passthrough(), head, memory)
        return SystemLM(system, tokenizer, 2, 200, 256)

    return make


def test_no_use_of_a_remembered_prefill_changes_it(model, lm):
    """Longer prompts, forked prefixes, decoding, and injected layers that are the very tensors of the memory."""
    memory = Memory(PLENTY)
    header, requests = prompts([70])[0], []
    for number, length in enumerate((0, 3, 9, 9)):
        context = header + prompts([length], number)[0]
        requests += [("", list(context), list(rest)) for rest in prompts([1, 4, 6], number)]
    lm(memory)._loglikelihood_tokens(requests)
    before = {key: tensor.clone() for key, (tensor,) in memory._parts.items()}
    assert len(before) == 4
    for carrier, head in ((Passthrough(), 0), (AsItIs(), 0), (ZeroCache(LAYERS, 2, 8), 5), (AsItIs(), 100)):
        answering = lm(memory, carrier, head)
        answering._loglikelihood_tokens(requests)
        grow_and_fork(answering.system, header)
    assert before.keys() <= memory._parts.keys()
    for key, part in before.items():
        torch.testing.assert_close(memory.find(key), (part,), rtol=0, atol=0)


class AsItIs:
    """A carrier that hands on the tensors that it is given."""

    def translate(self, layers, source, target):
        return layers


def grow_and_fork(system, header):
    """Extend a prefix twice, let rows leave, and decode over more tokens than a buffer's spare room."""
    prefix = system.extend(system.start(1), Span.of([header], CPU))
    prefix = system.extend(select(system, prefix, torch.tensor([0, 0])), Span.of(prompts([5, 2], 77), CPU))
    prefix = closed(select(system, prefix, torch.tensor([1, 0, 1])))
    for step in range(70):
        prefix = read(system.target, prefix, Span.of([[step + 3]] * 3, CPU))[1]


def test_what_a_model_reads_on_its_own_is_remembered_for_a_handoff(model, reads):
    memory, rows, more = Memory(PLENTY), prompts([9, 4]), prompts([3, 6], 8)
    found = []
    for system in (Native(model, memory), Handoff(model, model, Passthrough(), memory=memory)):
        reads.clear()
        prefix = system.extend(system.extend(system.start(2), Span.of(rows, CPU)), Span.of(more, CPU))
        found.append((sum(reads), read(model, closed(prefix), Span.of([[5], [6]], CPU))[0]))
    assert [tokens for tokens, _ in found] == [2 * 9 + 2 * 6, 0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-4)


def test_a_model_on_its_own_takes_nothing_from_memory(model, reads):
    memory, rows = Memory(PLENTY), prompts([9, 4])
    for _ in range(2):
        Native(model, memory).extend(Native(model).start(2), Span.of(rows, CPU))
    assert reads == [18, 18]


def test_a_closed_prefix_holds_nothing_of_the_source(model):
    system = Handoff(model, model, Passthrough())
    prefix = closed(system.extend(system.start(1), Span.of(prompts([9]), CPU)))
    assert prefix.texts == ()
    chosen = select(system, prefix, torch.tensor([0, 0]))
    assert read(model, chosen, Span.of([[5], [6]], CPU))[0].shape[0] == 2


def test_a_prefix_that_the_source_cannot_go_on_from_is_refused(model):
    system = Handoff(model, model, Passthrough())
    prefix = system.extend(system.start(1), Span.of(prompts([9]), CPU))
    read_on = read(model, select(system, prefix, torch.tensor([0])), Span.of([[5]], CPU))[1]
    for ended in (closed(prefix), read_on):
        with pytest.raises(AssertionError, match="closed, or read on by the target"):
            system.extend(ended, Span.of([[7]], CPU))


def test_rows_of_a_span_come_back_without_their_padding():
    rows = [(5, 6, 7), (8,), ()]
    assert Span.of(rows, CPU).rows() == rows
