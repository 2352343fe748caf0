"""Answers depend on the item alone, for a model on its own and for a hand-off; so does the memory that they take.

The reference answers one request at a time with transformers' own cache: no batch, no padding, nothing shared.
"""

import random
from weakref import WeakSet

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import DynamicCache

from kvferry.evaluate import harness, planning
from kvferry.evaluate.harness import SystemLM
from kvferry.kv.cache import GrowingLayer
from kvferry.kv.handoff import Handoff, Native
from kvferry.kv.mapper import Affine, Mapper
from kvferry.kv.prefill import Memory
from kvferry.kv.rope import rotation

TOLERANCE = 1e-4
POSITIONS = 128
SYSTEMS = ("native", "handoff")
HOLD_BACK = (1, 3)
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3", 2, seed=2, positions=POSITIONS)


@pytest.fixture(scope="module")
def source(tiny_model):
    return tiny_model("llama", 3, seed=5, positions=POSITIONS)


@pytest.fixture(scope="module")
def mapper():
    """A mapper from `source` to `model` that knows nothing: whatever it brings, it must bring it to every item alike."""
    torch.manual_seed(1)
    affines = [Affine(torch.randn(16, 16), torch.randn(16)) for _ in range(2)]
    return Mapper([[0], [2]], affines, affines, kv_heads=2)


@pytest.fixture(scope="module")
def lm(model, source, mapper, tokenizer):
    """The factory of our model by the system's name."""

    def make(name, hold_back=1, batch_tokens=300, batch_rows=None, budget=0):
        system = Native(model) if name == "native" else Handoff(source, model, mapper, memory=Memory(budget))
        return SystemLM(system, tokenizer, hold_back, batch_tokens, NEW_TOKENS, batch_rows)

    return make


@pytest.fixture(scope="module")
def logits_after(model, source, mapper):
    """Logits of the target after each of the last tokens of a context and those that follow it, by the plainest path."""

    @torch.inference_mode()
    def after(name, hold_back, context, more):
        ferried = [] if name == "native" else context[:-hold_back]
        cache = DynamicCache()
        if ferried:
            own = source(torch.tensor([ferried]), use_cache=True).cache.layers
            places = torch.arange(len(ferried))[None]
            turns = [rotation(own_model, places) for own_model in (source, model)]
            cache = DynamicCache(mapper.translate([(layer.keys, layer.values) for layer in own], *turns))
        rest = [*context[len(ferried) :], *more]
        places = torch.arange(len(ferried), len(ferried) + len(rest))[None]
        logits = model(torch.tensor([rest]), cache=cache, position_ids=places, use_cache=True).logits[0]
        return logits[len(logits) - len(more) - 1 :]

    return after


@pytest.fixture(scope="module")
def one_by_one(logits_after):
    """The reference: what each request scores, alone."""

    def score(name, hold_back, requests):
        answers = []
        for context, continuation in requests:
            scores = logits_after(name, hold_back, context, continuation[:-1]).log_softmax(-1)
            wanted = torch.tensor(continuation)
            greedy = bool((scores.argmax(-1) == wanted).all())
            answers.append((float(scores.gather(1, wanted[:, None]).sum()), greedy))
        return answers

    return score


def tokens(length, seed):
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def requests():
    """One-token contexts, short, long and some with a common header; continuations of one token and more, some alike."""
    header = tokens(70, 0)
    contexts = [tokens(length, length) for length in (1, 2, 3, 4, 11, 12, 29, 60)]
    contexts += [header + tokens(length, 90 + length) for length in (1, 2, 3, 9, 14)] + [header]
    asked = []
    for number, context in enumerate(contexts):
        stem = tokens(4, 200 + number)
        choices = [[5], [6], [*stem, 5], [*stem, 6], stem[:2], tokens(9, 300 + number)]
        asked += [(context, choice) for choice in random.Random(number).sample(choices, 4)]
    return [*asked, asked[0]]


REQUESTS = requests()
PROMPTS = ["x", "a b", "the thing", "the thing in a box", "in the beginning there was a cat in the box and another"]
PROMPTS += [" ".join(["the same examples stand before each of these"] * 2) + f" {number}" for number in range(4)]


@pytest.fixture(scope="module")
def wanted(one_by_one):
    """What REQUESTS score one by one, by system and hold_back."""
    return {(name, held): one_by_one(name, held, REQUESTS) for name in SYSTEMS for held in HOLD_BACK}


@pytest.fixture(scope="module")
def texts(logits_after, tokenizer):
    """What PROMPTS are answered one by one, by system and hold_back: so many tokens, nothing stops them."""

    def write(name, hold_back, prompt):
        context, written = tokenizer.encode(prompt), []
        for _ in range(NEW_TOKENS):
            written.append(int(logits_after(name, hold_back, context, written)[-1].argmax()))
        return tokenizer.decode(written, skip_special_tokens=True)

    return {(name, held): [write(name, held, prompt) for prompt in PROMPTS] for name in SYSTEMS for held in HOLD_BACK}


def scored(lm, pairs):
    return lm._loglikelihood_tokens([(("", ""), list(context), list(rest)) for context, rest in pairs])


def generated(lm, prompts):
    words = {"until": [], "max_gen_toks": NEW_TOKENS, "do_sample": False}
    return lm.generate_until([Instance("generate_until", {}, (prompt, words), n) for n, prompt in enumerate(prompts)])


def assert_same(found, wanted):
    assert [score for score, _ in found] == pytest.approx([score for score, _ in wanted], abs=TOLERANCE)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]


@st.composite
def plans(draw, count):
    """How work may be cut: bounds of a batch, what is worth sharing, what a pass costs, an order, and shards of it."""
    bounds = {
        "hold_back": draw(st.sampled_from(HOLD_BACK)),
        "batch_tokens": draw(st.sampled_from([1, 90, 400, 10**6])),
        "batch_rows": draw(st.sampled_from([None, 1, 3])),
        "budget": draw(st.sampled_from([0, 30_000, 10**9])),
    }
    constants = {
        (harness, "LOGIT_TOKENS"): draw(st.sampled_from([1, 7, 1024])),
        (harness, "PASS_TOKENS"): draw(st.sampled_from([{"cpu": 0}, {"cpu": 24}, {"cpu": 10**6}])),
        (planning, "SHARED_TOKENS"): draw(st.sampled_from([1, 64, 10**6])),
    }
    order = draw(st.permutations(range(count)))
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=3)))
    shards = [order[start:stop] for start, stop in zip([0, *cuts], [*cuts, count], strict=True)]
    return bounds, constants, shards


def in_shards(answer, lm, name, plan, items):
    """Answers in the order of the items, whatever the plan."""
    bounds, constants, shards = plan
    found = [None] * len(items)
    with pytest.MonkeyPatch.context() as patch:
        for (module, constant), value in constants.items():
            patch.setattr(module, constant, value)
        ours = lm(name, **bounds)
        for shard in shards:
            for number, one in zip(shard, answer(ours, [items[n] for n in shard]), strict=True):
                found[number] = one
    return found


@pytest.mark.parametrize("name", SYSTEMS)
@given(plan=plans(len(REQUESTS)))
@settings(max_examples=15, deadline=None)
def test_scores_depend_on_no_batch_order_shard_or_shared_prefix(name, plan, lm, wanted):
    assert_same(in_shards(scored, lm, name, plan, REQUESTS), wanted[name, plan[0]["hold_back"]])


@pytest.mark.parametrize("name", SYSTEMS)
@given(plan=plans(len(PROMPTS)))
@settings(max_examples=6, deadline=None)
def test_texts_depend_on_no_batch_order_shard_or_shared_prefix(name, plan, lm, texts):
    assert in_shards(generated, lm, name, plan, PROMPTS) == texts[name, plan[0]["hold_back"]]


def test_the_hand_off_of_the_reference_is_not_the_target_on_its_own(wanted, texts):
    """Else the tests above would not see what a hand-off does."""
    for held in HOLD_BACK:
        assert_same(wanted["native", held], wanted["native", 1])
        both = zip(wanted["native", held], wanted["handoff", held], strict=True)
        assert max(abs(own - other) for (own, _), (other, _) in both) > 1
        assert texts["native", held] == texts["native", 1] != texts["handoff", held]


@pytest.mark.parametrize("hold_back", [4, 1000])
def test_a_prompt_that_is_held_back_whole_is_the_targets_alone(hold_back, lm, tokenizer, one_by_one):
    short = [(tokens(length, length), tokens(rest, rest)) for length in (1, 2, 4) for rest in (1, 3)]
    assert_same(scored(lm("handoff", hold_back), short), one_by_one("native", 1, short))
    prompts = [prompt for prompt in PROMPTS if len(tokenizer.encode(prompt)) <= hold_back]
    assert prompts
    assert generated(lm("handoff", hold_back), prompts) == generated(lm("native"), prompts)


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("hold_back", HOLD_BACK)
def test_no_context_is_the_token_that_hflm_puts_there(hold_back, name, lm, one_by_one, tokenizer):
    ours, endings = lm(name, hold_back), ["a", " the thing", "in"]
    asked = [Instance("loglikelihood", {}, ("", ending), n) for n, ending in enumerate(endings)]
    alone = [([ours.prefix_token_id], tokenizer.encode(ending)) for ending in endings]
    assert_same(ours.loglikelihood(asked), one_by_one(name, hold_back, alone))


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("hold_back", HOLD_BACK)
@pytest.mark.parametrize(
    ("context", "continuation"), [(POSITIONS - 4, 5), (POSITIONS - 3, 5), (300, 1), (300, 5), (9, POSITIONS)]
)
def test_what_is_longer_than_the_positions_is_cut_where_hflm_cuts_it(
    context, continuation, hold_back, name, lm, model, tokenizer, one_by_one, monkeypatch
):
    request = (tokens(context, 1), tokens(continuation, 2))
    kept = (request[0][-(POSITIONS + 1 - continuation) :], request[1])
    hflm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    assert_same(scored(hflm, [request]), one_by_one("native", hold_back, [kept]))
    assert_same(scored(lm(name, hold_back), [request]), one_by_one(name, hold_back, [kept]))


@pytest.fixture
def logits_made(model):
    """The number of places that each forward pass of the target gives logits of."""
    sizes = []
    hook = model.register_forward_hook(lambda _m, _a, output: sizes.append(output.logits[..., 0].numel()))
    yield sizes
    hook.remove()


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("length", [8, 9, 60])
def test_a_continuation_longer_than_logits_are_held_of_is_read_in_parts(
    length, name, lm, one_by_one, logits_made, monkeypatch
):
    monkeypatch.setattr(harness, "LOGIT_TOKENS", 8)
    long = [(tokens(20, 1), tokens(length, 2)), (tokens(6, 3), tokens(length, 4)), (tokens(6, 3), [7, 8])]
    ours = lm(name)
    logits_made.clear()
    found = scored(ours, long)
    assert max(logits_made) <= 8
    assert_same(found, one_by_one(name, 1, long))


def test_logits_are_made_where_something_is_scored_and_nowhere_else(lm, logits_made):
    """Two contexts of unlike lengths; of their continuations the last tokens differ in two cases, which are one place."""
    pairs = [(tokens(30, 1), [4, 5, 6]), (tokens(30, 1), [4, 5, 7]), (tokens(21, 2), [8, 9]), (tokens(21, 2), [3])]
    scored(lm("native", hold_back=3), pairs)
    assert sum(logits_made) == 2 + 2 + 1


@pytest.fixture
def peak(model, source, monkeypatch):
    """The most bytes of caches and places of logits after any forward pass, of source and target."""
    layers, found = WeakSet(), {"bytes": 0, "logits": 0}
    make = GrowingLayer.__init__
    monkeypatch.setattr(
        GrowingLayer, "__init__", lambda self, *args, **words: (make(self, *args, **words), layers.add(self))[0]
    )

    def look(_model, _arguments, output):
        parts = [part for layer in layers if layer.is_initialized for part in (layer.keys, layer.values)]
        held = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
        found["bytes"] = max(found["bytes"], sum(held.values()))
        found["logits"] = max(found["logits"], output.logits[..., 0].numel())

    hooks = [one.register_forward_hook(look) for one in (model, source)]
    yield found
    for hook in hooks:
        hook.remove()


def slot_bytes(model):
    config = model.config
    return config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4


WORK = {
    "members of one header": [
        (tokens(70, 0) + tokens(5 + n % 5, n), [choice]) for n in range(150) for choice in (4, 5)
    ],
    "continuations of one context": [(tokens(40, 1), [3 + n % 100, 3 + n // 100, 9]) for n in range(120)],
    "contexts of few tokens": [(tokens(2 + n % 3, n), tokens(6, n)) for n in range(200)],
}


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("what", WORK)
def test_memory_of_scores_is_bounded_whatever_their_number(what, name, lm, model, source, peak):
    batch_tokens = 400
    scored(lm(name, batch_tokens=batch_tokens), WORK[what])
    assert 0 < peak["bytes"] <= (2 * batch_tokens + 70) * max(slot_bytes(model), slot_bytes(source))
    assert peak["logits"] <= batch_tokens


@pytest.mark.parametrize("name", SYSTEMS)
def test_memory_of_texts_is_bounded_with_what_they_will_grow_to(name, lm, model, source, peak):
    batch_tokens = 400
    prompts = [word * (1 + n % 3) for n in range(30) for word in ("x", "yz")]
    generated(lm(name, batch_tokens=batch_tokens), prompts)
    assert 0 < peak["bytes"] <= batch_tokens * max(slot_bytes(model), slot_bytes(source))
    assert peak["logits"] <= batch_tokens
