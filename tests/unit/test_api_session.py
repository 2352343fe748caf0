"""A session maps each token once at most, whatever is added, written and switched; exact mappers give one model's own text."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_family import (
    EXACT,
    FITTED,
    HEADED,
    LARGE,
    SMALL,
    TEXT,
    build_family,
    counted,
    loaded,
    mapper_of,
    native,
)

from kvferry.api import Session, load_mapper
from kvferry.kv.cache import cache_layers

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
WRITTEN = 4


@dataclass
class Pair:
    """Mappers of both directions."""

    forth: object
    back: object

    def counting(self):
        return Pair(counted(self.forth), counted(self.back))

    def session(self, hold_back=1):
        return Session(self.forth, self.back, hold_back)


@pytest.fixture(scope="module")
def results(tmp_path_factory, tiny_model, tokenizer, save_prepared, identity_mapper):
    return build_family(tmp_path_factory.mktemp("results"), tiny_model, tokenizer, save_prepared, identity_mapper)


@pytest.fixture(scope="module")
def pairs(results):
    """By variant; the exact one is of a model and a copy of it."""
    small, large, copy = (loaded(results, name) for name in (SMALL, LARGE, LARGE))
    return {
        variant: Pair(
            load_mapper(mapper_of(results, one.card["model"], other.card["model"], variant), one, other),
            load_mapper(mapper_of(results, other.card["model"], one.card["model"], variant), other, one),
        )
        for variant, one, other in ((FITTED, small, large), (HEADED, small, large), (EXACT, large, copy))
    }


def drawn(count, seed=0):
    return torch.randint(3, 260, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def played(session, steps):
    """Add (a number of tokens), go on ("go") or switch ("switch"); the costs of the switches."""
    costs = []
    for number, step in enumerate(steps):
        if step == "switch":
            costs.append(session.switch())
        elif step != "go":
            session.add(drawn(step, number))
        elif session.tokens:
            session.generate(WRITTEN)
    return costs


STEPS = st.lists(st.one_of(st.integers(1, 9), st.just("go"), st.just("switch")), max_size=9)


@given(steps=STEPS, hold_back=st.integers(1, 6), variant=st.sampled_from([FITTED, HEADED, EXACT]))
@settings(max_examples=40, deadline=None)
def test_each_token_is_mapped_once_at_most_and_none_is_read_that_was_mapped(pairs, steps, hold_back, variant):
    pair = pairs[variant].counting()
    session = pair.session(hold_back)
    read = {id(side.model): 0 for side in (pair.forth.source, pair.forth.target)}
    hooks = [
        side.model.register_forward_pre_hook(_count(read, side.model), with_kwargs=True)
        for side in (pair.forth.source, pair.forth.target)
    ]
    costs = played(session, steps)
    for hook in hooks:
        hook.remove()
    forth, back = (sum(own.mapper.spans) for own in (pair.forth, pair.back))
    assert forth + back <= len(session.tokens)
    heads = pair.forth.native_head + pair.back.native_head
    assert 0 <= sum(cost.mapped_tokens for cost in costs) - forth - back <= heads
    # what a side holds was read by it or mapped into it, once
    for reader, mapped in zip(session._readers, (back, forth), strict=True):
        assert reader.length == read[id(reader.loaded.model)] + mapped
        assert reader.length <= len(session.tokens)


def _count(read, model):
    def hook(_module, _args, kwargs):
        read[id(model)] += kwargs["input_ids"].shape[1]

    return hook


@given(steps=STEPS, hold_back=st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_through_exact_mappers_every_reply_is_what_one_model_alone_would_write(pairs, steps, hold_back):
    session = pairs[EXACT].session(hold_back)
    for number, step in enumerate(steps):
        before = session.tokens
        if step == "go" and before:
            made = session.generate(WRITTEN)
            assert made.tokens == native(pairs[EXACT].forth.target.model, before, WRITTEN)
            assert session.tokens == before + made.tokens
        elif step == "switch":
            session.switch()
            assert session.tokens == before
        elif step != "go":
            session.add(drawn(step, number))


def test_what_a_model_had_of_the_conversation_stays_as_it_was(pairs):
    session = pairs[FITTED].session()
    session.add(TEXT)
    session.generate(WRITTEN)
    session.switch()
    session.add(drawn(7))
    session.generate(WRITTEN)
    for reader in session._readers:
        reader.before = [(keys.clone(), values.clone()) for keys, values in cache_layers(reader.prefix.cache)]
    session.switch()
    session.add(drawn(3))
    session.generate(WRITTEN)
    session.switch()
    for reader in session._readers:
        kept = reader.before[0][0].shape[2]
        assert reader.length > kept
        for pair, wanted in zip(cache_layers(reader.prefix.cache), reader.before, strict=True):
            for part, own in zip(pair, wanted, strict=True):
                torch.testing.assert_close(part[:, :, :kept], own, rtol=0, atol=0)


def test_a_switch_tells_what_it_took(pairs):
    session = pairs[FITTED].session(hold_back=2)
    session.add(drawn(10))
    first = session.switch()
    assert (first.to, first.prefill_tokens, first.mapped_tokens, first.held_back) == (LARGE, 8, 8, 2)
    assert first.reprefill_ms is None
    session.generate(WRITTEN)  # reads 2, writes 4, the last of which it does not read
    session.add(drawn(5))
    second = session.switch(measure=True)
    # the large model has read 13 of 19 tokens; the small one has 8; 2 are held back
    assert (second.to, second.prefill_tokens, second.mapped_tokens, second.held_back) == (SMALL, 4, 9, 2)
    assert second.reprefill_ms > 0


def test_measuring_what_reading_anew_would_take_changes_nothing(pairs):
    told = []
    for measure in (False, True):
        session = pairs[FITTED].session()
        session.add(TEXT)
        session.generate(WRITTEN)
        session.switch(measure)
        session.add(drawn(5))
        session.generate(WRITTEN)
        session.switch(measure)
        session.generate(WRITTEN)
        told.append(session.tokens)
    assert told[0] == told[1]


def test_switching_to_and_fro_without_a_word_maps_nothing_twice(pairs):
    pair = pairs[FITTED].counting()
    session = pair.session()
    session.add(drawn(12))
    costs = [session.switch() for _ in range(6)]
    assert [cost.mapped_tokens for cost in costs] == [11, 0, 0, 0, 0, 0]
    assert (pair.forth.mapper.spans, pair.back.mapper.spans) == ([11], [])


def test_a_conversation_that_is_interrupted_goes_on(pairs):
    def interrupt(_piece):
        if len(session.tokens) > 14:
            raise KeyboardInterrupt

    session = pairs[EXACT].session()
    session.add(drawn(12))
    with pytest.raises(KeyboardInterrupt):
        session.generate(20, stream=interrupt)
    before = session.tokens
    assert 14 < len(before) < 32
    assert session.generate(WRITTEN).tokens == native(pairs[EXACT].forth.target.model, before, WRITTEN)


@pytest.mark.parametrize("layer", [0, 2, None], ids=["first layer", "last layer", "head"])
def test_a_conversation_that_is_interrupted_within_a_pass_goes_on(pairs, layer):
    session = pairs[EXACT].session()
    model = pairs[EXACT].forth.source.model

    def interrupt(*_):
        raise KeyboardInterrupt

    session.add(drawn(12))
    session.generate(WRITTEN)
    before = session.tokens
    place = model.lm_head if layer is None else model.model.layers[layer]
    hook = place.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.generate(WRITTEN)
    hook.remove()
    assert session.tokens == before
    assert session.generate(WRITTEN).tokens == native(model, before, WRITTEN)


def test_a_switch_that_is_interrupted_can_be_tried_again(pairs, monkeypatch):
    pair = pairs[EXACT]
    session = pair.session()
    session.add(drawn(12))
    append = type(pair.forth).append

    def interrupted(self, cache, *arguments):
        append(self, cache, *arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(pair.forth), "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.switch()
    assert session.switch().mapped_tokens == 11
    assert session.generate(WRITTEN).tokens == native(pair.forth.target.model, session.tokens[:12], WRITTEN)


def test_only_a_first_text_gets_the_begin_token(pairs, monkeypatch):
    session = pairs[FITTED].session()
    asked = []
    tokenizer = pairs[FITTED].forth.source.tokenizer
    monkeypatch.setattr(
        type(tokenizer),
        "__call__",
        lambda _self, text, add_special_tokens: asked.append(add_special_tokens) or {"input_ids": [5]},
    )
    for text in ("one", "two", "three"):
        session.add(text)
    assert asked == [True, False, False]


def test_the_room_that_is_left_is_that_of_the_model_whose_turn_it_is(pairs):
    session = pairs[FITTED].session()
    assert session.room == 256
    session.add(drawn(200))
    assert (session.model, session.room) == (SMALL, 56)
