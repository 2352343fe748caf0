"""A hand-off goes on as the internals do; through an exact mapper as the target itself, token by token."""

import pytest
import torch
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

from kvferry.api import Handoff, load_mapper
from kvferry.evaluate.decode import decode, read_to_end
from kvferry.kv import handoff as internals
from kvferry.kv.prefill import Span

LIMIT = 16
HOLD_BACKS = (1, 2, 16, 500)


@pytest.fixture(scope="module")
def results(tmp_path_factory, tiny_model, tokenizer, save_prepared, identity_mapper):
    return build_family(tmp_path_factory.mktemp("results"), tiny_model, tokenizer, save_prepared, identity_mapper)


@pytest.fixture(scope="module")
def models(results):
    return {name: loaded(results, name) for name in (SMALL, LARGE)}


@pytest.fixture(scope="module")
def handoffs(results, models):
    """By source and variant; the target is the large model."""
    wanted = [(SMALL, FITTED), (SMALL, HEADED), (LARGE, EXACT), (LARGE, HEADED)]
    return {
        (source, variant): Handoff(models[source], models[LARGE], mapper_of(results, source, LARGE, variant))
        for source, variant in wanted
    }


@pytest.fixture(scope="module")
def prompt(models):
    return models[LARGE].tokenizer(TEXT)["input_ids"]


def through_internals(handoff, tokens, limit, hold_back, ends):
    """The same by the hand-off that is evaluated."""
    own = handoff.mapper
    system = internals.Handoff(own.source.model, own.target.model, own.mapper, own.native_head)
    prefix = system.start(1)
    if len(tokens) > hold_back:
        prefix = system.extend(prefix, Span.of([tokens[:-hold_back]], own.target.model.device))
    logits, prefix = read_to_end(own.target.model, prefix, Span.of([tokens[-hold_back:]], own.target.model.device))
    written = decode(own.target.model, prefix, logits, lambda so_far: so_far[-1] in ends, limit)
    return tuple(written[0])


@pytest.mark.parametrize("hold_back", HOLD_BACKS)
@pytest.mark.parametrize("variant", [EXACT, HEADED])
def test_through_an_exact_mapper_the_target_writes_what_its_own_generate_does(variant, hold_back, handoffs, prompt):
    handoff = handoffs[LARGE, variant]
    made = handoff.generate(TEXT, LIMIT, hold_back=hold_back)
    assert made.tokens == native(handoff.target.model, prompt, LIMIT)
    assert made.tokens == handoff.alone(TEXT, LIMIT).tokens


@pytest.mark.parametrize("hold_back", HOLD_BACKS)
@pytest.mark.parametrize("variant", [FITTED, HEADED])
def test_a_fitted_mapper_writes_what_the_evaluated_hand_off_does(variant, hold_back, handoffs, prompt):
    handoff = handoffs[SMALL, variant]
    made = handoff.generate(prompt, LIMIT, hold_back=hold_back)
    assert made.tokens == through_internals(handoff, prompt, LIMIT, hold_back, {0})


def test_a_fitted_mapper_is_used(handoffs, prompt):
    handoff = handoffs[SMALL, FITTED]
    assert handoff.generate(prompt, LIMIT).tokens != native(handoff.target.model, prompt, LIMIT)


def test_a_prompt_of_no_more_than_the_held_back_tokens_is_the_targets_alone(handoffs, prompt):
    handoff = handoffs[SMALL, FITTED]
    for hold_back in (len(prompt), len(prompt) + 3):
        made = handoff.generate(prompt, LIMIT, hold_back=hold_back)
        assert made.tokens == native(handoff.target.model, prompt, LIMIT)
        assert (made.switch.prefill_tokens, made.switch.mapped_tokens) == (0, 0)
        assert "cache" not in handoff.inputs(torch.tensor([prompt]), hold_back=hold_back)


@pytest.mark.parametrize("hold_back", [1, 5])
def test_what_it_took_is_told_by_step(hold_back, handoffs, prompt):
    made = handoffs[SMALL, FITTED].generate(prompt, LIMIT, hold_back=hold_back)
    assert made.switch.to == LARGE
    assert made.switch.prefill_tokens == made.switch.mapped_tokens == len(prompt) - hold_back
    assert made.switch.held_back == made.read_tokens == hold_back
    assert made.switch.reprefill_ms is None
    assert len(made.token_ms) == len(made.tokens) - 1
    assert all(taken > 0 for taken in (made.switch.prefill_ms, made.switch.mapping_ms, made.read_ms, *made.token_ms))


def test_all_forms_of_a_prompt_are_the_same(handoffs, prompt):
    handoff = handoffs[SMALL, FITTED]
    forms = [TEXT, prompt, tuple(prompt), torch.tensor(prompt), torch.tensor([prompt])]
    assert len({handoff.generate(form, LIMIT).tokens for form in forms}) == 1


def test_the_pieces_that_are_streamed_are_the_text(handoffs, prompt):
    pieces = []
    made = handoffs[SMALL, FITTED].generate(TEXT, LIMIT, stream=pieces.append)
    assert len(pieces) > 1
    assert "".join(pieces) == made.text
    assert made.text == handoffs[SMALL, FITTED].target.tokenizer.decode(made.tokens, skip_special_tokens=True)


def test_characters_of_several_tokens_are_streamed_whole(models):
    from kvferry.api.reader import Text

    pieces, tokenizer = [], models[LARGE].tokenizer
    text, tokens = Text(tokenizer, pieces.append), tokenizer("aé😀b")["input_ids"]
    assert len(tokens) == 8
    for count in range(1, len(tokens) + 1):
        text.show(tokens[:count])
    assert pieces == ["a", "é", "😀", "b"]


def test_an_end_token_or_a_stop_text_ends_it(handoffs, prompt):
    handoff = handoffs[SMALL, FITTED]
    whole = handoff.generate(prompt, LIMIT)
    stop = whole.text[4:6]
    made = handoff.generate(prompt, LIMIT, stop=stop)
    assert stop in made.text
    assert made.tokens == whole.tokens[: len(made.tokens)]
    assert len(made.tokens) < LIMIT
    config = handoff.target.model.generation_config
    before, config.eos_token_id = config.eos_token_id, [0, whole.tokens[3]]
    try:
        ended = handoff.generate(prompt, LIMIT).tokens
    finally:
        config.eos_token_id = before
    assert ended == whole.tokens[: whole.tokens.index(whole.tokens[3]) + 1]


@pytest.mark.parametrize("hold_back", [1, 4])
@pytest.mark.parametrize("variant", [FITTED, HEADED])
def test_transformers_own_generate_goes_on_as_ours_does(variant, hold_back, handoffs, prompt):
    handoff = handoffs[SMALL, variant]
    inputs = handoff.inputs(TEXT, hold_back=hold_back)
    assert inputs["cache"].get_seq_length() == len(prompt) - hold_back
    out = handoff.target.model.generate(**inputs, max_new_tokens=LIMIT, do_sample=False)
    assert out[0, : len(prompt)].tolist() == prompt
    assert tuple(out[0, len(prompt) :].tolist()) == handoff.generate(TEXT, LIMIT, hold_back=hold_back).tokens


def test_a_batch_with_padding_on_the_left_goes_on_row_by_row(handoffs, prompt):
    handoff = handoffs[SMALL, FITTED]
    rows, width = [prompt, prompt[:9], prompt[:2], prompt[5:30]], len(prompt)
    ids = torch.tensor([[2] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    inputs = handoff.inputs(ids, mask, hold_back=2)
    out = handoff.target.model.generate(**inputs, max_new_tokens=LIMIT, do_sample=False, eos_token_id=-1)
    for row, found in zip(rows, out[:, width:].tolist(), strict=True):
        alone = handoff.inputs(torch.tensor([row]), hold_back=2)
        wanted = handoff.target.model.generate(**alone, max_new_tokens=LIMIT, do_sample=False, eos_token_id=-1)
        assert found == wanted[0, len(row) :].tolist()


def test_models_are_found_where_the_run_keeps_them_wherever_one_stands(results, handoffs, monkeypatch, tmp_path):
    directory = mapper_of(results, SMALL, LARGE)
    wanted = handoffs[SMALL, FITTED].generate(TEXT, LIMIT).tokens
    monkeypatch.chdir(tmp_path)
    assert Handoff.load(directory).generate(TEXT, LIMIT).tokens == wanted
    monkeypatch.chdir(directory)
    assert Handoff.load(".").generate(TEXT, LIMIT).tokens == wanted


def test_models_may_lie_elsewhere_and_in_another_dtype(results, tmp_path):
    import shutil

    directory = shutil.copytree(mapper_of(results, SMALL, LARGE), tmp_path / "mapper")
    places = [results / "models" / name for name in (SMALL, LARGE)]
    handoff = Handoff.load(directory, *places, dtype="bfloat16")
    assert handoff.target.model.dtype == torch.bfloat16
    assert handoff.inputs(TEXT)["cache"].layers[0].keys.dtype == torch.bfloat16
    assert handoff.generate(TEXT, 3).tokens


def test_a_loaded_mapper_may_be_given_and_is_used_as_it_is(results, models):
    counting = counted(load_mapper(mapper_of(results, SMALL, LARGE), models[SMALL], models[LARGE]))
    handoff = Handoff(models[SMALL].model, models[LARGE].model, counting)
    handoff.generate([5, 6, 7, 8], 2)
    assert counting.mapper.spans == [3]
