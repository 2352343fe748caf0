"""A system on its own scores and writes as lm-eval's own HFLM does, however its work is batched and shared."""

import random

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from kvferry.errors import KvferryError
from kvferry.evaluate import harness, planning
from kvferry.evaluate.controls import Passthrough
from kvferry.evaluate.harness import SystemLM
from kvferry.kv.handoff import Handoff, Native
from kvferry.kv.mapper import Affine, Mapper
from kvferry.kv.prefill import Memory

TOLERANCE = 1e-4
POSITIONS = 128
WORDS = ["the", "thing", "in", "a", "box", "and", "another", "one", "☃", "Q:", "A:", "12", "+", "5", "=", "naïve\n"]
HEADER = "the same examples stand before each of these questions, and they are long enough to be shared by all: "


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3", 2, seed=2, positions=POSITIONS)


@pytest.fixture(scope="module")
def reference(model, tokenizer):
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)


@pytest.fixture(scope="module")
def ours(model, tokenizer):
    """The factory of our model: system (the model on its own), hold_back and budget."""

    def make(system=None, hold_back=1, batch_tokens=300, max_new_tokens=256):
        return SystemLM(system or Native(model), tokenizer, hold_back, batch_tokens, max_new_tokens)

    return make


def text(generator, words):
    return " ".join(generator.choice(WORDS) for _ in range(words)).strip() or "x"


def questions():
    """(context, continuation) pairs: no context, short, long, with a shared header; several continuations each."""
    generator = random.Random(3)
    contexts = ["", "x", "th", *(text(generator, n) for n in (1, 2, 5, 9, 14)), *(HEADER + str(n) for n in range(4))]
    contexts += [HEADER.strip(), HEADER + text(generator, 5)]
    pairs = []
    for context in contexts:
        endings = [" a", " the", " in", "z", *(" " + text(generator, n) for n in (1, 3))]
        pairs += [(context, ending) for ending in generator.sample(endings, 4)]
    return [*pairs, *pairs[:3]]


@pytest.fixture(scope="module")
def pairs():
    return questions()


@pytest.fixture(scope="module")
def wanted(reference, pairs):
    return asked(reference, pairs)


def asked(lm, pairs):
    return lm.loglikelihood([Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)], disable_tqdm=True)


def scored(lm, pairs):
    return lm._loglikelihood_tokens(
        [(("", ""), list(context), list(rest)) for context, rest in pairs], disable_tqdm=True
    )


def assert_same(found, wanted):
    assert [score for score, _ in found] == pytest.approx([score for score, _ in wanted], abs=TOLERANCE)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]


def tokens(length, seed):
    torch.manual_seed(seed)
    return torch.randint(3, 250, (length,)).tolist()


@torch.inference_mode()
def most_likely(model, context, count):
    ids = list(context)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(context) :]


@pytest.mark.parametrize("hold_back", [1, 3, 1000])
def test_log_likelihoods_are_those_of_hflm(hold_back, ours, pairs, wanted):
    assert_same(asked(ours(hold_back=hold_back), pairs), wanted)


@pytest.mark.parametrize("head", [0, 2, 1000])
@pytest.mark.parametrize("hold_back", [1, 3])
def test_the_targets_own_cache_handed_over_answers_as_the_target(head, hold_back, model, ours, pairs, wanted):
    system = Handoff(model, model, Passthrough(), native_head=head)
    assert_same(asked(ours(system, hold_back), pairs), wanted)


@pytest.mark.parametrize("hold_back", [1, 3])
def test_a_continuation_is_greedy_where_each_of_its_tokens_is_the_most_likely(hold_back, model, ours, reference):
    requests = []
    for number, length in enumerate((1, 2, 3, 4, 20, 40)):
        context = tokens(length, number)
        best = most_likely(model, context, 4)
        requests += [(context, best[:1]), (context, best), (context, [*best[:3], (best[3] + 1) % 250])]
    found = scored(ours(hold_back=hold_back), requests)
    assert [greedy for _, greedy in found] == [True, True, False] * 6
    assert_same(found, scored(reference, requests))


@pytest.mark.parametrize("hold_back", [1, 3])
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_prompts_of_about_as_many_tokens_as_are_held_back_are_scored_alike(length, hold_back, ours, reference):
    requests = [(tokens(length, seed), tokens(rest, 50 + rest)) for seed in range(3) for rest in (1, 2, 5)]
    assert_same(scored(ours(hold_back=hold_back), requests), scored(reference, requests))


@pytest.mark.parametrize("hold_back", [1, 3])
@pytest.mark.parametrize(
    ("context", "continuation"),
    [
        (POSITIONS - 5, 5),
        (POSITIONS - 4, 5),
        (POSITIONS - 3, 5),
        (3 * POSITIONS, 5),
        (3 * POSITIONS, 1),
        (10, POSITIONS - 1),
        (10, POSITIONS),
        (1, POSITIONS),
    ],
)
def test_requests_longer_than_the_positions_are_cut_as_hflm_cuts_them(
    context, continuation, hold_back, ours, reference
):
    requests = [(tokens(context, 1), tokens(continuation, 2)), (tokens(9, 3), tokens(4, 4))]
    assert_same(scored(ours(hold_back=hold_back), requests), scored(reference, requests))


def test_a_continuation_longer_than_the_positions_is_refused(ours):
    with pytest.raises(KvferryError, match=f"{POSITIONS + 1} tokens is longer than the model's {POSITIONS} positions"):
        scored(ours(), [(tokens(3, 1), tokens(POSITIONS + 1, 2))])


@pytest.mark.parametrize("batch_tokens", [1, 70, 10**6])
@pytest.mark.parametrize("logit_tokens", [1, 40, 10**6])
def test_scores_do_not_depend_on_the_size_of_batches(batch_tokens, logit_tokens, ours, pairs, wanted, monkeypatch):
    monkeypatch.setattr(harness, "LOGIT_TOKENS", logit_tokens)
    assert_same(asked(ours(batch_tokens=batch_tokens), pairs), wanted)


@pytest.mark.parametrize("shared", [1, 16, 10**6])
def test_scores_do_not_depend_on_what_is_shared(shared, ours, pairs, wanted, monkeypatch):
    monkeypatch.setattr(planning, "SHARED_TOKENS", shared)
    assert_same(asked(ours(hold_back=2), pairs), wanted)


@pytest.mark.parametrize("seed", range(2))
def test_answers_stand_in_the_order_of_the_requests(seed, ours, pairs, wanted):
    order = list(range(len(pairs)))
    random.Random(seed).shuffle(order)
    assert_same(asked(ours(), [pairs[n] for n in order]), [wanted[n] for n in order])


def test_a_request_alone_scores_as_among_others(ours, pairs, wanted):
    for number in (0, 7, len(pairs) - 5):
        assert_same(asked(ours(), [pairs[number]]), [wanted[number]])


def test_no_requests_are_no_answers(ours):
    assert scored(ours(), []) == []
    assert asked(ours(), []) == []
    assert ours().generate_until([]) == []


def tokens_read(model, work):
    """Number of token slots that the model is run over."""
    sizes = []
    hook = model.register_forward_pre_hook(
        lambda _m, _a, words: sizes.append(words["input_ids"].numel()), with_kwargs=True
    )
    work()
    hook.remove()
    return sum(sizes)


def test_a_shared_header_and_a_shared_context_are_read_once(model, ours):
    header = tokens(90, 1)
    contexts = [[*header, *tokens(6, seed)] for seed in range(2, 7)]
    requests = [(context, [choice]) for context in contexts for choice in (10, 11, 12, 13)]
    assert tokens_read(model, lambda: scored(ours(batch_tokens=10**6), requests)) == 90 + 5 * (5 + 1)


def generated(lm, contexts, **settings):
    words = {"until": [], "max_gen_toks": 20, "do_sample": False} | settings
    requests = [Instance("generate_until", {}, (context, words), n) for n, context in enumerate(contexts)]
    return lm.generate_until(requests, disable_tqdm=True)


@pytest.fixture(scope="module")
def prompts():
    generator = random.Random(5)
    starts = ["x", "ab", "abc", *(text(generator, n) for n in (2, 5, 8, 12, 15))]
    return [*starts, *(HEADER + str(n) for n in range(3)), "x"]


@pytest.fixture(scope="module")
def free(reference, prompts):
    """What HFLM writes where nothing but the limit stops it."""
    return generated(reference, prompts)


@pytest.fixture(scope="module")
def stops(free):
    """Pairs of characters from the middle of some of those texts."""
    pairs = [
        written[at : at + 2]
        for written in free
        for at in range(2, len(written) - 3)
        if written[at : at + 2].isascii() and written[at : at + 2].isprintable()
    ]
    chosen = sorted(set(pairs))[:3]
    assert chosen
    return chosen


@pytest.mark.parametrize("hold_back", [1, 3])
@pytest.mark.parametrize("batch_tokens", [1, 10**6])
def test_greedy_texts_are_those_of_hflm(hold_back, batch_tokens, ours, prompts, free):
    assert len(set(free)) > 5
    assert generated(ours(hold_back=hold_back, batch_tokens=batch_tokens), prompts) == free


@pytest.mark.parametrize("head", [0, 2])
def test_greedy_texts_on_the_targets_own_cache_handed_over_are_the_same(head, model, ours, prompts, free):
    assert generated(ours(Handoff(model, model, Passthrough(), native_head=head)), prompts) == free


def test_a_text_ends_before_its_stop_string_while_others_of_the_batch_go_on(ours, reference, prompts, free, stops):
    found = generated(ours(batch_tokens=10**6), prompts, until=stops)
    assert found == generated(reference, prompts, until=stops)
    shorter = sum(len(short) < len(long) for short, long in zip(found, free, strict=True))
    assert 0 < shorter < len(prompts)


def test_a_stop_string_of_more_tokens_than_the_glance_back_still_ends_the_text(ours, free, prompts):
    stop = free[0][1:19]
    assert len(stop) == 18
    assert generated(ours(), prompts[:1], until=[stop]) == [free[0].split(stop)[0]]


def test_a_row_that_has_ended_is_computed_no_further(model, ours, prompts, free, stops):
    number = next(n for n, written in enumerate(free) if stops[0] in written)
    lm, pair = ours(batch_tokens=10**6), [prompts[number], prompts[0]]
    without = tokens_read(model, lambda: generated(lm, pair))
    assert tokens_read(model, lambda: generated(lm, pair, until=[stops[0]])) < without


def test_the_end_token_ends_a_text(model, ours, tokenizer, monkeypatch):
    """The third token that the model writes is declared to be the end."""
    prompt = "the thing in"
    wanted = most_likely(model, tokenizer.encode(prompt), 3)
    assert len(set(wanted)) == 3
    monkeypatch.setattr(SystemLM, "eot_token_id", wanted[2])
    assert generated(ours(), [prompt]) == [tokenizer.decode(wanted[:2])]


def test_different_stop_strings_and_limits_in_one_call_are_kept_apart(ours, reference, prompts, stops):
    kinds = [
        {"until": [stops[0]], "max_gen_toks": 20},
        {"until": [], "max_gen_toks": 4},
        {"until": stops, "max_gen_toks": 9},
    ]
    requests = [
        Instance("generate_until", {}, (prompt, kinds[n % 3] | {"do_sample": False}), n)
        for n, prompt in enumerate(prompts)
    ]
    assert ours().generate_until(requests) == reference.generate_until(requests, disable_tqdm=True)


def test_texts_stand_in_the_order_of_the_requests(ours, prompts, free):
    order = list(range(len(prompts)))
    random.Random(1).shuffle(order)
    assert generated(ours(), [prompts[n] for n in order]) == [free[n] for n in order]


def test_texts_do_not_depend_on_what_is_shared(ours, prompts, free, monkeypatch):
    monkeypatch.setattr(planning, "SHARED_TOKENS", 1)
    assert generated(ours(batch_tokens=10**6), prompts) == free


def test_a_limit_of_one_token_gives_one_token(ours, reference, prompts):
    assert generated(ours(), prompts, max_gen_toks=1) == generated(reference, prompts, max_gen_toks=1)


def test_where_a_task_sets_no_limit_ours_holds(ours, free, prompts):
    requests = [Instance("generate_until", {}, (prompt, {"until": [], "do_sample": False}), 0) for prompt in prompts]
    assert ours(max_new_tokens=20).generate_until(requests) == free


@pytest.mark.parametrize("limit", [5, 60])
def test_a_prompt_that_leaves_no_room_is_cut_from_the_left_as_hflm_cuts_it(limit, ours, reference):
    prompts = [HEADER * 3 + "now", "x"]
    assert generated(ours(), prompts, max_gen_toks=limit) == generated(reference, prompts, max_gen_toks=limit)


@pytest.mark.parametrize("limit", [POSITIONS, POSITIONS + 7])
def test_a_limit_that_leaves_no_position_for_the_prompt_is_refused(limit, ours):
    """HFLM refuses it too; cutting by a length below one would cut the wrong end, or nothing."""
    with pytest.raises(KvferryError, match="positions"):
        generated(ours(), [HEADER], max_gen_toks=limit)


@pytest.mark.parametrize(
    "settings", [{"do_sample": True}, {"do_sample": True, "temperature": 0.7}, {"temperature": 0.5}]
)
def test_a_task_that_asks_for_sampling_is_refused(settings, ours):
    request = Instance("generate_until", {}, ("x", {"until": [], "max_gen_toks": 3} | settings), 0)
    with pytest.raises(KvferryError, match="only greedy generation is measured"):
        ours().generate_until([request])


@pytest.fixture(scope="module")
def source(tiny_model):
    return tiny_model("llama", 3, seed=5, positions=POSITIONS)


@pytest.fixture(scope="module")
def mappers():
    """Three mappers from `source` to `model` that know nothing."""

    def make(seed):
        torch.manual_seed(seed)
        affines = [Affine(torch.randn(16, 16), torch.randn(16)) for _ in range(2)]
        return Mapper([[0], [2]], affines, affines, kv_heads=2)

    return [make(seed) for seed in range(3)]


@pytest.fixture(scope="module")
def handoffs(source, model, mappers):
    """The factory of hand-offs through each of the mappers, on one memory."""
    return lambda memory: [Handoff(source, model, mapper, 1, memory) for mapper in mappers]


@pytest.fixture(scope="module")
def each_alone(ours, handoffs, pairs, prompts):
    """What each answers and writes with a memory of its own that keeps nothing."""
    return [(asked(ours(system), pairs), generated(ours(system), prompts)) for system in handoffs(Memory())]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_systems_on_one_memory_answer_as_each_alone(order, ours, handoffs, pairs, prompts, each_alone):
    systems = handoffs(Memory(10**9))
    for number in order:
        answers, texts = each_alone[number]
        found = asked(ours(systems[number]), pairs)
        assert [score for score, _ in found] == pytest.approx([score for score, _ in answers], rel=1e-6)
        assert_same(found, answers)
        assert generated(ours(systems[number]), prompts) == texts
    assert len({tuple(answers) for answers, _ in each_alone}) == 3


@pytest.mark.parametrize("budget", [20_000, 60_000, 200_000])
def test_a_memory_that_is_too_small_changes_nothing(budget, ours, handoffs, pairs, prompts, each_alone):
    memory = Memory(budget)
    for system, (answers, texts) in reversed(list(zip(handoffs(memory), each_alone, strict=True))):
        assert_same(asked(ours(system), pairs), answers)
        assert generated(ours(system), prompts) == texts
    assert 0 < memory.used <= budget


def test_a_second_system_needs_nothing_of_the_source(source, ours, handoffs, pairs, prompts):
    first, *others = handoffs(Memory(10**9))
    assert tokens_read(source, lambda: (asked(ours(first), pairs), generated(ours(first), prompts))) > 0
    for other in others:
        assert (
            tokens_read(source, lambda other=other: (asked(ours(other), pairs), generated(ours(other), prompts))) == 0
        )


def test_fewer_items_need_nothing_of_the_source_after_more_of_them(source, ours, handoffs):
    """Prompts in other batches, beside others: their rows are found all the same."""
    pairs = [(text(random.Random(n), 3 + n), " a") for n in range(12)]
    more, less, _ = handoffs(Memory(10**9))
    asked(ours(more), pairs)
    found = []
    assert tokens_read(source, lambda: found.extend(asked(ours(less), pairs[1::3]))) == 0
    assert_same(found, asked(ours(handoffs(Memory())[1]), pairs[1::3]))


def test_the_injected_cache_takes_its_prefills_from_the_model_on_its_own(model, ours, pairs, wanted):
    memory = Memory(10**9)
    plain, alone = Native(model, memory), Handoff(model, model, Passthrough())
    assert_same(asked(ours(plain), pairs), wanted)
    injected, found = Handoff(model, model, Passthrough(), memory=memory), []
    tails = tokens_read(model, lambda: found.extend(asked(ours(injected), pairs)))
    assert_same(found, asked(ours(alone), pairs))
    assert_same(found, wanted)
    everything = tokens_read(model, lambda: asked(ours(alone), pairs))
    assert tails < 0.7 * everything


def test_a_prefix_that_is_only_read_from_now_on_holds_nothing_of_the_source(ours, handoffs):
    """Its rows are copied for every continuation, and again when one leaves a batch."""
    long = tuple(tokens(90, 1))
    prompts = [(*long, *tokens(6, 2)), (*long, *tokens(4, 3)), tuple(tokens(9, 4))]
    found = list(ours(handoffs(Memory())[0])._prefixes(prompts))
    assert sorted(number for batch, _ in found for number in batch) == [0, 1, 2]
    assert all(prefix.texts == () for _, prefix in found)
