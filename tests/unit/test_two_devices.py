"""Source and target on devices of their own, or spread over several: nothing meets on two devices, and all comes out the same.

The GPUs are pretended (see `pretended`); models are spread as they are when they are loaded, hooks included.
"""

from dataclasses import replace

import pytest
import torch
from accelerate import dispatch_model
from conftest import build_model, build_tokenizer
from pretended import GPUS, pretended_devices
from small_pairs import PAIR, VARIANT

from kvferry.devices import devices_in
from kvferry.evaluate import clock
from kvferry.evaluate.clock import Effort
from kvferry.evaluate.controls import Passthrough, WrongDocument, ZeroCache, random_like
from kvferry.evaluate.conversations import Conversation, Turn
from kvferry.evaluate.diagnostics import Ferry, diagnose
from kvferry.evaluate.dialogue import Voice, alternate, make_dialogue
from kvferry.evaluate.harness import SystemLM
from kvferry.evaluate.latency import measure_latency, needed_mb
from kvferry.evaluate.mapped import Mapped
from kvferry.evaluate.native_tokens import points, time_points
from kvferry.evaluate.perplexity import Cut, measure_chunks
from kvferry.evaluate.timing import make_load, time_translation
from kvferry.kv.cache import layer_devices
from kvferry.kv.dump import read_shards, write_dump
from kvferry.kv.handoff import Handoff, Native, select
from kvferry.kv.mapper import Affine, HeadLocal, Mapper
from kvferry.kv.prefill import Memory, SourcePrefill, Span, Text
from kvferry.kv.rope import rotation
from kvferry.prepare.models import Loaded
from kvferry.prepare.placement import spread

PLENTY = 10**9
PLACES = {
    "apart": ("cuda:0", "cuda:1"),
    "target spread": ("cuda:2", ["cuda:0", "cuda:1"]),
    "source spread": (["cuda:1", "cuda:2"], "cuda:0"),
    "both spread": (["cuda:2", "cuda:3"], ["cuda:0", "cuda:1", "cuda:2"]),
    "source on the CPU": ("cpu", "cuda:0"),
}
TOKENIZER = build_tokenizer()
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def models(places=("cpu", "cpu"), dtype=torch.float32):
    """Source and target, of other depths and layouts; fresh, since placing a model changes it."""
    pair = build_model("llama", 4, seed=3), build_model("qwen3", 5, seed=4)
    return [placed(model.to(dtype), place) for model, place in zip(pair, places, strict=True)]


def placed(model, place):
    devices = devices_in(place)
    if devices == ["cpu"]:
        return model
    where = spread(model, devices) if len(devices) > 1 else {"": devices[0]}
    skipped = model._skip_keys_device_placement
    return dispatch_model(model, where, main_device=devices[0], skip_keys=skipped, force_hooks=len(devices) > 1)


def some_mapper(target, local=False, dtype=torch.float32):
    """Of every target layer, from two source layers that lie apart."""
    torch.manual_seed(5)
    made = []
    for _ in range(10):
        weight = torch.randn(2, 16, 8) if local else torch.randn(32, 16)
        made.append((HeadLocal if local else Affine)(0.3 * weight.to(dtype), torch.randn(16).to(dtype)))
    mapper = Mapper([[layer % 4, (layer + 2) % 4] for layer in range(5)], made[:5], made[5:], 2)
    return mapper.onto(layer_devices(target))


def tokens(count, length, seed=8):
    torch.manual_seed(seed)
    return torch.randint(3, 250, (count, length))


class Case:
    """One thing that is done with a pair of models; `run` gives what must not depend on where they are."""

    @staticmethod
    def chunks(source, target):
        """Perplexity and KL of mappers and controls from one memory."""
        whole = some_mapper(target)
        plain = Handoff(source, target, whole, 3, Memory(PLENTY))
        systems = {
            "whole": plain,
            "local": replace(plain, mapper=some_mapper(target, local=True)),
            "random": replace(plain, mapper=random_like(whole, 1)),
            "zero": replace(plain, mapper=ZeroCache(5, 2, 8), native_head=0),
            "wrong": WrongDocument(plain, tokens(1, 40, 9)[0]),
            "self": Handoff(target, target, Passthrough(), memory=plain.memory),
        }
        found = measure_chunks(Native(target, plain.memory), systems, tokens(3, 24), Cut(16, 2), plain.memory)
        return {f"{name}/{key}": [i.score for i in items] for name, own in found.items() for key, items in own.items()}

    @staticmethod
    def answers(source, target):
        """Log-likelihoods of continuations on shared headers, and greedy texts."""
        system = Handoff(source, target, some_mapper(target), 2, Memory(PLENTY))
        lm = SystemLM(system, TOKENIZER, 2, 300, 12)
        header, *rows = (tuple(row) for row in tokens(4, 40).tolist())
        requests = [("", [*header, *row[: 5 + n]], list(row[-3:])) for n, row in enumerate(rows)]
        scored = lm._loglikelihood_tokens(requests)
        prompts = [(*header, *row[: 7 + n]) for n, row in enumerate(rows)]
        texts = [
            text
            for batch, prefix in lm._prefixes(prompts, 6)
            for text in lm._generate([prompts[n] for n in batch], prefix, (), 6)
        ]
        return {"scores": [score for score, _ in scored], "best": [float(best) for _, best in scored], "texts": texts}

    @staticmethod
    def conversations(source, target):
        """Two models in turn: caches go both ways."""
        turns = tuple(Turn(f"what is {n}?", (f"the {n}",)) for n in range(5))
        dialogues = [
            make_dialogue(Conversation(name, "race", "the cat in the hat", turns), 5, TOKENIZER) for name in "ab"
        ]
        back = [
            Affine(0.3 * torch.randn(16, 16, generator=torch.Generator().manual_seed(n)), torch.zeros(16))
            for n in range(4)
        ]
        way_back = Mapper([[4], [2], [0], [1]], back, back, 2).onto(layer_devices(source))
        forth, back_ = Handoff(source, target, some_mapper(target)), Handoff(target, source, way_back, 2)
        return {"said": alternate(forth, back_, dialogues, Voice(TOKENIZER, 5))}

    @staticmethod
    def diagnosis(source, target):
        """Errors in the target's attention."""
        texts = {f"t{n}": tuple(row) for n, row in enumerate(tokens(2, 12).tolist())}
        found = diagnose(source, target, {"it": Ferry(some_mapper(target), 2)}, texts)["it"]
        by_text = (found.cosine, found.k_concentration, found.v_concentration)
        return {str(n): [v for own in part.values() for v in own] for n, part in enumerate(by_text)} | {
            "r2": found.r2_k + found.r2_v
        }

    @staticmethod
    def times(source, target):
        """All that is timed, with the names of the trials for a result."""
        handoff = Handoff(source, target, some_mapper(target))
        cards = [
            {"model": name, "vocab_size": 250, "kv_heads": 2, "head_dim": 8, "hidden_size": 32, "query_heads": 4}
            for name in "st"
        ]
        own, other = (Loaded(model, TOKENIZER, card) for model, card in zip((source, target), cards, strict=True))
        one = Timed(PAIR, VARIANT, own, other, None, {})
        how = {"warm_up": 0, "trials": 3, "seconds": 1000, "lengths": [8], "batch": 2, "memory_mb": 1000}
        (latency,) = measure_latency([one], how)
        curves = time_points(points(handoff, 1, [1, 4]), 12, Effort(0, 1))
        apply = time_translation(handoff.mapper, make_load(source, target, tokens(2, 30)))
        return {"trials": [item.id for item in latency.items] + list(curves) + [item.id for item in apply]}


class Timed(Mapped):
    """A mapper that is there already."""

    def load(self):
        return some_mapper(self.target.model)


CASES = [name for name in vars(Case) if not name.startswith("_")]


@pytest.fixture(autouse=True)
def no_events(monkeypatch):
    """Pretended GPUs have no clock and no free memory."""
    monkeypatch.setattr(clock, "milliseconds", lambda call, devices: float(call() is None))


@pytest.fixture(scope="module")
def plain():
    """What comes out on one device."""
    with torch.inference_mode():
        return {name: getattr(Case, name)(*models()) for name in CASES}


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("case", CASES)
def test_it_comes_out_the_same_wherever_the_models_are(case, places, plain):
    with pretended_devices() as mode, torch.inference_mode():
        source, target = models(places)
        found = getattr(Case, case)(source, target)
    wanted = plain[case]
    assert mode.crossed
    assert found.keys() == wanted.keys()
    for name, values in found.items():
        if values and isinstance(values[0], float):
            assert values == pytest.approx(wanted[name], rel=1e-3, abs=1e-4), name
        else:
            assert values == wanted[name]


@pytest.mark.parametrize("row_weights", [False, True])
def test_a_dump_of_a_model_that_is_spread_holds_the_same_rows(row_weights, tmp_path):
    card = {
        "model": "t",
        "layers": 5,
        "kv_heads": 2,
        "head_dim": 8,
        "config_sha256": "c",
        "tokenizer_sha256": "t",
        "weights_id": "w",
        "origin": "of a test",
    }
    ids, how = {"fit": tokens(3, 20)}, {"stride": 3, "corpus": "prose"}
    write_dump(models()[1], card, ids, how, tmp_path / "one", row_weights=row_weights)
    with pretended_devices() as mode:
        write_dump(models(PLACES["both spread"])[1], card, ids, how, tmp_path / "spread", row_weights=row_weights)
    assert mode.crossed
    (one,), (other,) = (read_shards(tmp_path / name, "fit") for name in ("one", "spread"))
    for kind in ("keys", "values", *(("key_weights", "value_weights") if row_weights else ())):
        torch.testing.assert_close(getattr(other, kind), getattr(one, kind), **CLOSE)


def test_each_map_and_each_layer_of_a_cache_is_with_its_target_layer_and_what_is_remembered_stays_with_the_source():
    with pretended_devices(), torch.inference_mode():
        source, target = models(PLACES["both spread"])
        memory = Memory(PLENTY)
        handoff = Handoff(source, target, some_mapper(target), memory=memory)
        assert [own.device for own in handoff.mapper.keys] == layer_devices(target)
        prefix = handoff.extend(handoff.start(2), Span.of(tokens(2, 9).tolist(), target.device))
        prefix = select(handoff, prefix, torch.tensor([1, 1, 0], device=target.device))
        assert [layer.values.device for layer in prefix.cache.layers] == layer_devices(target)
        assert {prefix.mask.device, prefix.lengths.device} == {target.device} == {GPUS[0]}
        (part, _) = memory._parts.values()
        assert [(len(run), run.device) for run in part] == [
            (layer_devices(source).count(device), device) for device in (GPUS[2], GPUS[3])
        ]


def test_a_source_layer_is_copied_once_to_each_device_that_reads_it():
    with pretended_devices() as mode, torch.inference_mode():
        source, target = models(PLACES["target spread"])
        mapper = some_mapper(target)
        span = Span.of(tokens(1, 9).tolist(), source.device)
        layers = SourcePrefill(source).extend([Text()], span)[0]
        positions = span.positions(torch.zeros(1, dtype=torch.long, device=source.device))
        turned = rotation(target, positions)
        mode.crossed.clear()
        mapper.translate(layers, rotation(source, positions), turned)
        read = {
            (layer, device)
            for chosen, device in zip(mapper.selected, layer_devices(target), strict=True)
            for layer in chosen
        }
        far = [device for device in layer_devices(target) if device != turned.cos.device]
    assert len(read) < sum(map(len, mapper.selected))
    # Keys and values, and cos and sin to the target layers that they are not with.
    assert len(mode.crossed) == 2 * len(read) + 2 * len(far)


def test_memory_is_counted_on_the_device_that_holds_it():
    with pretended_devices():
        source, target = models(PLACES["apart"])
        cards = [{"layers": n, "kv_heads": 2, "head_dim": 8, "hidden_size": 32, "query_heads": 4} for n in (4, 5)]
        loaded = [Loaded(model, TOKENIZER, card) for model, card in zip((source, target), cards, strict=True)]
        found = needed_mb(Timed(PAIR, VARIANT, *loaded, None, {}), 10**6, 1)
    cache, widest = 2 * 2 * 8 * 4, 4 * (3 * 48 + 2 * 32 + 5 * 32)
    assert found == {GPUS[0]: 4 * cache + widest, GPUS[1]: 5 * 3 * cache + widest}
