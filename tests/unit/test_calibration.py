"""Calibration sequences: sides that share no document, draws that nest, and packing that keeps documents apart."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import KvferryError
from kvferry.prepare.calibration import Draw, draw_sequences, pack, side_of
from kvferry.prepare.corpora import Document

LENGTH = 8
seeds = st.integers(0, 2**32 - 1)
SIDES = ("fit", "held_out", "perplexity")
sides = st.sampled_from(SIDES)


@pytest.fixture(scope="module")
def documents():
    """200 documents of which each says its own number, in characters that are one token each."""
    return [Document(f"doc-{number}", f"{number:04d} " * 8) for number in range(200)]


@pytest.fixture(scope="module")
def available(documents, tokenizer):
    """How many sequences each side holds."""
    return {
        side: len(pack([each.text for each in documents if side_of(each) == side], tokenizer, LENGTH)) for side in SIDES
    }


def rows(sequences):
    return [tuple(row) for row in sequences.tolist()]


def drawn(documents, tokenizer, *how):
    return draw_sequences(documents, tokenizer, Draw(*how), "prose")


def numbers_in(sequences, tokenizer):
    """The numbers of the documents that have a whole number in these sequences."""
    return {int(number) for row in tokenizer.batch_decode(sequences) for number in re.findall(r"\b\d{4}\b", row)}


def test_one_document_in_five_is_not_fitted_on_and_half_of_these_are_for_perplexity():
    found = [side_of(Document(f"paper-{number}", "")) for number in range(5000)]
    for side in ("held_out", "perplexity"):
        # 52 of 256 first bytes are multiples of 5, half of all second bytes are odd: binomial with p = .1016,
        # five standard deviations of sqrt(n·p·(1 − p)).
        assert abs(found.count(side) - 5000 * 26 / 256) < 5 * (5000 * 0.1016 * 0.8984) ** 0.5


@given(st.text(), st.text(), st.text())
def test_the_side_depends_on_the_id_alone(identity, one, other):
    assert side_of(Document(identity, one)) == side_of(Document(identity, other))


@given(seeds, seeds)
def test_no_document_is_on_two_sides_whatever_the_seeds(documents, tokenizer, available, one, other):
    seeds_of = {"fit": one, "held_out": other, "perplexity": one}
    for side in SIDES:
        found = numbers_in(drawn(documents, tokenizer, side, available[side], LENGTH, seeds_of[side]), tokenizer)
        assert found
        assert {side_of(documents[number]) for number in found} == {side}


def test_all_takes_the_documents_of_every_side(documents, tokenizer):
    count = len(pack([document.text for document in documents], tokenizer, LENGTH))
    assert len(numbers_in(drawn(documents, tokenizer, "all", count, LENGTH, 1), tokenizer)) > 0.9 * len(documents)


@given(seeds, sides, st.data())
def test_the_first_n_of_m_are_the_n_drawn_alone(documents, tokenizer, available, seed, side, data):
    more = data.draw(st.integers(1, available[side]))
    fewer = data.draw(st.integers(1, more))
    large = drawn(documents, tokenizer, side, more, LENGTH, seed)
    small = drawn(documents, tokenizer, side, fewer, LENGTH, seed)
    assert small.shape == (fewer, LENGTH)
    assert torch.equal(large[:fewer], small)


def test_a_full_draw_takes_every_sequence_once(documents, tokenizer, available):
    texts = [document.text for document in documents if side_of(document) == "fit"]
    every = drawn(documents, tokenizer, "fit", available["fit"], LENGTH, 1)
    assert sorted(rows(every)) == sorted(rows(pack(texts, tokenizer, LENGTH)))


def test_another_seed_draws_in_another_order(documents, tokenizer):
    one, other = (drawn(documents, tokenizer, "fit", 20, LENGTH, seed) for seed in (1, 2))
    assert not torch.equal(one, other)


def test_a_seed_draws_the_same_today_and_tomorrow(documents, tokenizer):
    one, other = (drawn(documents, tokenizer, "fit", 20, LENGTH, 1) for _ in range(2))
    assert torch.equal(one, other)


@pytest.mark.parametrize("side", SIDES)
def test_too_few_sequences_are_refused_with_numbers(documents, tokenizer, available, side):
    held = available[side]
    with pytest.raises(
        KvferryError,
        match=f"corpus prose: its {side} documents hold {held} sequences of 8 tokens, {held + 1} are asked for",
    ):
        drawn(documents, tokenizer, side, held + 1, LENGTH, 1)


def test_a_corpus_without_documents_of_a_side_holds_none(tokenizer):
    with pytest.raises(KvferryError, match="hold 0 sequences of 8 tokens, 1 are asked for"):
        drawn([], tokenizer, "fit", 1, LENGTH, 1)


@given(st.lists(st.text("the cat in a hat", max_size=12), max_size=5), st.integers(1, 9))
def test_packing_joins_the_documents_with_an_end_token_after_each_and_drops_the_rest(tokenizer, texts, length):
    stream = [token for text in texts for token in [*tokenizer.encode(text), tokenizer.eos_token_id]]
    packed = pack(texts, tokenizer, length)
    assert packed.dtype == torch.long
    assert packed.shape == (len(stream) // length, length)
    assert packed.flatten().tolist() == stream[: packed.numel()]


def test_there_are_as_many_end_tokens_as_documents(tokenizer):
    assert pack(["in the hat", "a cat"], tokenizer, 1).flatten().tolist().count(tokenizer.eos_token_id) == 2
