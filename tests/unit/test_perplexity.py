"""The measures of the next token are the plain ones where the prefix is the target's own, and what float64 gives elsewhere."""

import copy
import math

import pytest
import torch

from kvferry.errors import KvferryError
from kvferry.evaluate.controls import Passthrough, ZeroCache
from kvferry.evaluate.perplexity import BATCH, METRICS, Cut, measure_chunks
from kvferry.kv.handoff import Handoff, Native
from kvferry.kv.mapper import Affine, Mapper
from kvferry.kv.prefill import Memory
from kvferry.records import NEXT_TOKEN_KL, PERPLEXITY, TOP1_AGREEMENT, Record

PREFIX, SCORED = 18, 9
COUNT = 2 * BATCH + 1
PLENTY = 10**9


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture(scope="module")
def source(tiny_model):
    return tiny_model("qwen3", 2, seed=7)


@pytest.fixture(scope="module")
def mappers():
    """Three mappers from `source` to `model` that know nothing."""

    def make(seed):
        torch.manual_seed(seed)
        affines = [Affine(torch.randn(16, 16), torch.randn(16)) for _ in range(3)]
        return Mapper([[0], [1], [0]], affines, affines, kv_heads=2)

    return {f"mapper{seed}": make(seed) for seed in range(3)}


@pytest.fixture(scope="module")
def chunks():
    torch.manual_seed(14)
    return torch.randint(3, 250, (COUNT, PREFIX + SCORED))


@pytest.fixture(scope="module")
def plain(model, chunks):
    """Mean nats a scored token of each chunk, by one plain forward."""
    with torch.inference_mode():
        losses = torch.nn.functional.cross_entropy(
            model(chunks).logits[:, :-1].transpose(1, 2), chunks[:, 1:], reduction="none"
        )
    return losses[:, PREFIX - 1 :].mean(1).tolist()


def measured(systems, chunks, hold_back=1, memory=None):
    """Items by system and measure; the model on its own is that of the first system."""
    own = Native(next(iter(systems.values())).target)
    return measure_chunks(own, systems, chunks, Cut(PREFIX, hold_back), memory or Memory())


def scores(system, chunks, hold_back=1, measure=PERPLEXITY):
    return values(measured({"it": system}, chunks, hold_back)["it"][measure])


def values(items):
    return [item.score for item in items]


@pytest.mark.parametrize("hold_back", [1, 3, PREFIX - 1, PREFIX, PREFIX + 5])
@pytest.mark.parametrize("head", [None, 0, 4, 50])
def test_the_targets_own_prefix_gives_the_plain_negative_log_likelihood(hold_back, head, model, chunks, plain):
    system = Native(model) if head is None else Handoff(model, model, Passthrough(), native_head=head)
    assert scores(system, chunks, hold_back) == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize("hold_back", [1, 3, PREFIX])
@pytest.mark.parametrize("head", [0, 4])
def test_the_targets_own_cache_handed_over_diverges_from_the_target_by_nothing(hold_back, head, model, chunks):
    found = measured({"it": Handoff(model, model, Passthrough(), native_head=head)}, chunks, hold_back)["it"]
    assert values(found[NEXT_TOKEN_KL]) == pytest.approx([0.0] * COUNT, abs=1e-6)
    assert values(found[TOP1_AGREEMENT]) == [1.0] * COUNT
    assert min(values(found[NEXT_TOKEN_KL])) >= 0


def test_the_target_itself_is_measured_from_the_one_reading(model, chunks, plain):
    own, sizes = Native(model), []
    hook = model.register_forward_pre_hook(
        lambda _m, _a, words: sizes.append(words["input_ids"].numel()), with_kwargs=True
    )
    found = measure_chunks(own, {"native": own}, chunks, Cut(PREFIX, 1), Memory())["native"]
    hook.remove()
    assert sum(sizes) == COUNT * (PREFIX + SCORED - 1)
    assert values(found[PERPLEXITY]) == pytest.approx(plain, abs=1e-5)
    assert values(found[NEXT_TOKEN_KL]) == [0.0] * COUNT
    assert values(found[TOP1_AGREEMENT]) == [1.0] * COUNT


def test_each_chunk_is_one_item_of_every_measure_and_weighs_its_scored_tokens(model, chunks):
    found = measured({"it": Native(model)}, chunks)["it"]
    assert list(found) == list(METRICS)
    for items in found.values():
        assert [item.id.rsplit("-", 1)[0] for item in items] == [f"chunk-{number}" for number in range(COUNT)]
        assert [item.id for item in items] == [item.id for item in found[PERPLEXITY]]
        assert {item.weight for item in items} == {float(SCORED)}


def test_other_tokens_make_another_item(model, chunks):
    other = chunks.clone()
    other[3, 2] += 1
    first, second = (measured({"it": Native(model)}, ids)["it"][PERPLEXITY] for ids in (chunks, other))
    assert [number for number in range(COUNT) if first[number].id != second[number].id] == [3]


def test_the_record_of_the_items_states_the_exponential_of_the_mean(model, chunks, plain):
    items = measured({"it": Native(model)}, chunks)["it"][PERPLEXITY]
    record = Record("native", "tiny", PERPLEXITY, METRICS[PERPLEXITY], items)
    assert record.value == pytest.approx(math.exp(sum(plain) / COUNT), rel=1e-5)


def zeroed(model, chunks, hold_back):
    """Logits of the scored tokens by a plain forward on a cache of zeros."""
    cut = PREFIX - hold_back
    cache = model(chunks[:, :cut], use_cache=True).cache
    for layer in cache.layers:
        layer.keys, layer.values = torch.zeros_like(layer.keys), torch.zeros_like(layer.values)
    return model(chunks[:, cut:-1], cache=cache, use_cache=True).logits[:, hold_back - 1 :]


@pytest.mark.parametrize("hold_back", [1, 4])
def test_all_measures_on_a_zero_cache_are_those_of_a_plain_forward_on_zeros_in_float64(hold_back, model, chunks, plain):
    exact = copy.deepcopy(model).double()
    with torch.inference_mode():
        theirs = zeroed(exact, chunks, hold_back).log_softmax(-1)
        true = exact(chunks[:, :-1]).logits[:, PREFIX - 1 :].log_softmax(-1)
    found = measured({"it": Handoff(model, model, ZeroCache(3, 2, 8))}, chunks, hold_back)["it"]
    nats = -theirs.gather(-1, chunks[:, PREFIX:, None]).squeeze(-1).mean(1)
    divergence = (true.exp() * (true - theirs)).sum(-1).mean(1)
    same = (true.argmax(-1) == theirs.argmax(-1)).double().mean(1)
    assert values(found[PERPLEXITY]) == pytest.approx(nats.tolist(), abs=1e-5)
    assert values(found[NEXT_TOKEN_KL]) == pytest.approx(divergence.tolist(), abs=1e-5)
    assert values(found[TOP1_AGREEMENT]) == pytest.approx(same.tolist(), abs=1e-7)
    assert min(values(found[NEXT_TOKEN_KL])) > 0.01
    assert 0 < sum(values(found[TOP1_AGREEMENT])) < COUNT
    assert max(abs(a - b) for a, b in zip(values(found[PERPLEXITY]), plain, strict=True)) > 0.01


def test_only_the_held_back_tokens_matter_where_the_cache_says_nothing(model, chunks):
    changed = chunks.clone()
    changed[:, : PREFIX - 2] = changed[:, : PREFIX - 2].flip(0)
    system = Handoff(model, model, ZeroCache(3, 2, 8))
    found, same = (scores(system, ids, 2) for ids in (chunks, changed))
    assert found == pytest.approx(same, abs=1e-5)
    assert scores(system, changed, 3) != pytest.approx(scores(system, chunks, 3), abs=1e-3)


def test_results_do_not_depend_on_the_chunks_beside(model, chunks, plain):
    alone = [scores(Native(model), chunk[None])[0] for chunk in chunks]
    assert alone == pytest.approx(plain, abs=1e-5)


def handoffs(source, model, mappers, memory, order=None):
    return {name: Handoff(source, model, mappers[name], 2, memory) for name in order or mappers}


def alone(source, model, mappers, chunks):
    return {name: measured({name: Handoff(source, model, mapper, 2)}, chunks)[name] for name, mapper in mappers.items()}


@pytest.mark.parametrize("budget", [0, 5000, PLENTY])
@pytest.mark.parametrize("order", [None, ["mapper2", "mapper0", "mapper1"]])
def test_systems_measured_together_score_as_each_alone(budget, order, source, model, mappers, chunks):
    memory = Memory(budget)
    together = measured(handoffs(source, model, mappers, memory, order), chunks, memory=memory)
    for name, own in alone(source, model, mappers, chunks).items():
        for measure, items in own.items():
            assert values(together[name][measure]) == pytest.approx(values(items), abs=1e-6)
            assert [item.id for item in together[name][measure]] == [item.id for item in items]
    assert len({tuple(values(own[NEXT_TOKEN_KL])) for own in together.values()}) == len(mappers)


def tokens_read(model, work):
    sizes = []
    hook = model.register_forward_pre_hook(
        lambda _m, _a, words: sizes.append(words["input_ids"].numel()), with_kwargs=True
    )
    work()
    hook.remove()
    return sum(sizes)


def test_the_source_reads_each_prefix_once_and_the_target_each_chunk_once_for_itself(source, model, mappers, chunks):
    memory = Memory(PLENTY)
    systems = {name: Handoff(source, model, mapper, 0, memory) for name, mapper in mappers.items()}
    assert tokens_read(source, lambda: measured(systems, chunks, memory=memory)) == COUNT * (PREFIX - 1)
    wanted = COUNT * (PREFIX + SCORED - 1) + len(systems) * COUNT * SCORED
    assert tokens_read(model, lambda: measured(systems, chunks, memory=memory)) == wanted
    assert memory.used == 0


def test_a_prefill_that_does_not_fit_is_read_once_a_system(source, model, mappers, chunks):
    systems = handoffs(source, model, mappers, Memory(0))
    assert tokens_read(source, lambda: measured(systems, chunks)) == len(mappers) * COUNT * (PREFIX - 1)


def test_chunks_longer_than_the_targets_positions_are_refused(tiny_model):
    own = Native(tiny_model("llama", 2))
    most = own.target.config.max_position_embeddings
    with pytest.raises(KvferryError, match=r"perplexity\.prefix and perplexity\.scored together: "):
        measure_chunks(own, {"native": own}, torch.ones(1, most + 1, dtype=torch.long), Cut(most - 8, 1), Memory())
