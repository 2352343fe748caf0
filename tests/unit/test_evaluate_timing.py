"""A mapper is timed on 1,024 tokens of the source's real cache, a fixed number of times. How long it takes is not tested."""

import pytest
import torch

from kvferry.evaluate import clock as clock_module
from kvferry.evaluate.controls import Passthrough
from kvferry.evaluate.timing import TOKENS, TRIALS, WARM_UP, make_load, time_translation
from kvferry.kv.rope import rotation


class Counting:
    """A carrier that notes what it is given, and passes the cache through."""

    def __init__(self):
        self.given = []

    def translate(self, layers, source, target):
        self.given.append((layers, source, target))
        return Passthrough().translate(layers, source, target)


@pytest.fixture(scope="module")
def models(tiny_model):
    return tiny_model("llama", 2, positions=2048), tiny_model("llama3", 3, positions=2048)


def tokens(count, length):
    torch.manual_seed(3)
    return torch.randint(3, 250, (count, length))


@pytest.mark.parametrize("shape", [(30, 40), (2, 900), (1, 1024), (3, 100), (1, 7)], ids=str)
def test_the_load_is_the_sources_own_cache_of_the_first_tokens(shape, models):
    source, target = models
    chunks = tokens(*shape)
    load = make_load(source, target, chunks)
    ids = chunks.flatten().repeat(TOKENS)[:TOKENS][None]
    with torch.inference_mode():
        own = source(ids, use_cache=True).cache.layers
    assert len(load.layers) == 2
    for (keys, values), layer in zip(load.layers, own, strict=True):
        assert keys.shape == (1, 2, TOKENS, 8)
        torch.testing.assert_close(keys, layer.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(values, layer.values, rtol=1e-4, atol=1e-4)
    positions = torch.arange(TOKENS)[None]
    for model, found in ((source, load.source), (target, load.target)):
        torch.testing.assert_close(found.cos, rotation(model, positions).cos)
        torch.testing.assert_close(found.sin, rotation(model, positions).sin)


def test_each_trial_is_an_item_and_translates_the_whole_span_once(models):
    load, carrier = make_load(*models, tokens(2, 600)), Counting()
    items = time_translation(carrier, load)
    assert [item.id for item in items] == [f"trial-{number}" for number in range(TRIALS)]
    assert len(carrier.given) == WARM_UP + TRIALS
    assert all(given == (load.layers, load.source, load.target) for given in carrier.given)


def test_scores_are_milliseconds_of_the_trials_without_the_warm_up(models, monkeypatch):
    """A clock on which the first run takes 100 s, and each later one a second more than the one before."""
    spent = iter([100_000.0, *(1000.0 * (trial + 1) for trial in range(TRIALS))])
    monkeypatch.setattr(clock_module, "milliseconds", lambda call, device: next(spent))
    items = time_translation(Counting(), make_load(*models, tokens(1, 300)))
    assert [item.score for item in items] == [1000.0 * (trial + 1) for trial in range(TRIALS)]
    assert {item.weight for item in items} == {1.0}
