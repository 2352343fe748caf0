"""A translated cache is what the internals map, slot by slot, and transformers' own generation goes on from it."""

import pytest
import torch
from small_family import EXACT, FITTED, HEADED, LARGE, SMALL, build_family, counted, loaded, mapper_of, read_by

from kvferry.api import load_mapper
from kvferry.kv.cache import cache_layers
from kvferry.kv.handoff import Handoff
from kvferry.kv.prefill import Span
from kvferry.kv.rope import rotation

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
EQUAL = {"rtol": 0, "atol": 0}
HEAD = 3


@pytest.fixture(scope="module")
def results(tmp_path_factory, tiny_model, tokenizer, save_prepared, identity_mapper):
    return build_family(tmp_path_factory.mktemp("results"), tiny_model, tokenizer, save_prepared, identity_mapper)


@pytest.fixture(scope="module")
def models(results):
    return {name: loaded(results, name) for name in (SMALL, LARGE)}


@pytest.fixture(scope="module")
def ferry(results, models):
    return load_mapper(mapper_of(results, SMALL, LARGE), models[SMALL], models[LARGE])


@pytest.fixture(scope="module")
def headed(results, models):
    return load_mapper(mapper_of(results, SMALL, LARGE, HEADED), models[SMALL], models[LARGE])


@pytest.fixture(scope="module")
def exact(results, models):
    return load_mapper(mapper_of(results, LARGE, LARGE, EXACT), models[LARGE], models[LARGE])


def drawn(rows, tokens, seed=0):
    return torch.randint(3, 260, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def assert_same(cache, other, how=EQUAL, slots=slice(None)):
    for pair, wanted in zip(cache_layers(cache), cache_layers(other), strict=True):
        for part, own in zip(pair, wanted, strict=True):
            torch.testing.assert_close(part[:, :, slots], own[:, :, slots], **how)


def test_a_translated_cache_is_what_the_mapper_makes_of_the_layers(ferry):
    ids = drawn(2, 17)
    own = read_by(ferry.source.model, ids)
    positions = torch.arange(17).expand(2, -1)
    turned = [rotation(side.model, positions) for side in (ferry.source, ferry.target)]
    wanted = ferry.mapper.translate(cache_layers(own), *turned)
    found = ferry.translate(own)
    for pair, layer in zip(cache_layers(found), wanted, strict=True):
        for part, mapped in zip(pair, layer, strict=True):
            torch.testing.assert_close(part, mapped, **EQUAL)


def test_a_translated_cache_is_that_of_the_hand_off_that_is_evaluated(ferry):
    system = Handoff(ferry.source.model, ferry.target.model, ferry.mapper)
    ids = drawn(1, 21)
    prefix = system.extend(system.start(1), Span.of(ids.tolist(), torch.device("cpu")))
    assert_same(ferry.translate(read_by(ferry.source.model, ids)), prefix.cache, CLOSE)


def test_a_fitted_mapper_is_not_the_targets_own_cache_but_an_exact_one_is(ferry, exact):
    ids = drawn(1, 21)
    own = read_by(exact.target.model, ids)
    assert_same(exact.translate(own), own, CLOSE)
    with pytest.raises(AssertionError):
        assert_same(ferry.translate(read_by(ferry.source.model, ids)), own, CLOSE)


def test_the_source_cache_is_left_as_it_is_and_shares_no_memory(exact):
    own = read_by(exact.source.model, drawn(1, 9))
    before = [(keys.clone(), values.clone()) for keys, values in cache_layers(own)]
    for keys, values in cache_layers(exact.translate(own)):
        keys.zero_()
        values.zero_()
    for pair, wanted in zip(cache_layers(own), before, strict=True):
        torch.testing.assert_close(pair, wanted, **EQUAL)


@pytest.mark.parametrize("sizes", [(5, 12), (1, 1, 15), (16, 1), (2, 2, 13)], ids=str)
@pytest.mark.parametrize("variant", [FITTED, HEADED])
def test_a_cache_that_grows_is_the_one_of_one_go_and_each_slot_is_mapped_once(sizes, variant, ferry, headed):
    own = {FITTED: ferry, HEADED: headed}[variant]
    counting, ids = counted(own), drawn(2, 17)
    whole, cache = own.translate(read_by(own.source.model, ids), input_ids=ids), None
    for end in torch.tensor(sizes).cumsum(0).tolist():
        part = read_by(own.source.model, ids[:, :end])
        cache = counting.translate(part, input_ids=ids[:, :end], into=cache)
    assert_same(cache, whole, CLOSE)
    assert sum(counting.mapper.spans) == 17 - own.native_head


def test_nothing_new_is_mapped_to_nothing(ferry):
    own, counting = read_by(ferry.source.model, drawn(1, 6)), counted(ferry)
    cache = counting.translate(own)
    assert counting.translate(own, into=cache) is cache
    assert counting.mapper.spans == [6]
    assert cache.get_seq_length() == 6


@pytest.mark.parametrize(
    ("side", "lengths", "headed_slots"),
    [("left", (11, 4, 7), 7 + HEAD), ("right", (11, 4, 7), HEAD), ("right", (11, 2, 7), HEAD)],
)
@pytest.mark.parametrize("variant", [FITTED, HEADED])
def test_padding_on_either_side_changes_no_token_of_a_row(side, lengths, headed_slots, variant, ferry, headed):
    """With a native head the target reads the slots up to where the shortest row has its head behind it."""
    own = {FITTED: ferry, HEADED: headed}[variant]
    rows, width = [drawn(1, length, seed=length)[0] for length in lengths], max(lengths)
    ids, mask = torch.zeros(3, width).long(), torch.zeros(3, width).long()
    places = [slice(width - len(row), width) if side == "left" else slice(len(row)) for row in rows]
    for number, (row, place) in enumerate(zip(rows, places, strict=True)):
        ids[number, place], mask[number, place] = row, 1
    cache = own.translate(read_by(own.source.model, ids, mask), attention_mask=mask, input_ids=ids)
    for number, (row, place) in enumerate(zip(rows, places, strict=True)):
        native = headed_slots - (place.start or 0) if variant == HEADED else 0
        mapped = ferry.translate(read_by(own.source.model, row[None]))
        read = read_by(own.target.model, row[None])
        for pair, *alone in zip(*map(cache_layers, (cache, mapped, read)), strict=True):
            for part, carried, original in zip(pair, *alone, strict=True):
                found = part[number, :, place]
                torch.testing.assert_close(found[:, :native], original[0, :, :native], **CLOSE)
                torch.testing.assert_close(found[:, native:], carried[0, :, native:], **CLOSE)


def test_the_native_head_is_the_targets_own_and_the_rest_is_mapped(ferry, headed):
    ids = drawn(2, 12)
    found = headed.translate(read_by(headed.source.model, ids), input_ids=ids)
    assert_same(found, read_by(headed.target.model, ids), CLOSE, slice(HEAD))
    assert_same(found, ferry.translate(read_by(ferry.source.model, ids)), CLOSE, slice(HEAD, None))


def test_a_text_within_the_native_head_is_read_by_the_target_alone(headed):
    ids, counting = drawn(1, HEAD), counted(headed)
    found = counting.translate(read_by(headed.source.model, ids), input_ids=ids)
    assert_same(found, read_by(headed.target.model, ids), CLOSE)
    assert not counting.mapper.spans


def test_a_cache_that_the_sources_generate_filled_can_be_translated(ferry):
    ids = drawn(1, 8)
    out = ferry.source.model.generate(
        ids, max_new_tokens=5, do_sample=False, return_dict_in_generate=True, eos_token_id=-1
    )
    cache = ferry.translate(out["cache"])
    assert cache.get_seq_length() == 12  # the last token was written and not read
    assert_same(cache, ferry.translate(read_by(ferry.source.model, out.sequences[:, :12])), CLOSE)


@pytest.mark.parametrize("beams", [1, 2, 3])
def test_transformers_generation_goes_on_from_an_exact_translation_as_from_the_prompt(beams, exact):
    ids, model = drawn(1, 15), exact.target.model
    cache = exact.translate(read_by(exact.source.model, ids[:, :-1]))
    cache.batch_repeat_interleave(beams)
    how = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, **how)
    assert torch.equal(found, model.generate(ids, attention_mask=torch.ones_like(ids), **how))


def test_a_plain_forward_with_gradients_takes_the_cache(ferry):
    """What is made under inference mode could not be saved for a backward pass."""
    ids = drawn(1, 9)
    cache = ferry.translate(read_by(ferry.source.model, ids[:, :-1]))
    out = ferry.target.model(input_ids=ids[:, -1:], cache=cache, use_cache=True)
    assert out.logits.requires_grad


def test_models_that_transformers_loaded_are_known_by_their_files(results, models):
    from transformers import AutoModelForCausalLM

    own = [AutoModelForCausalLM.from_pretrained(results / "models" / name).eval() for name in (SMALL, LARGE)]
    found = load_mapper(str(mapper_of(results, SMALL, LARGE)), *own)
    assert found.source.card == models[SMALL].card
    assert found.target.model is own[1]
    assert found.manifest["recipe"]["k"] == 2
