"""What is timed and what is not, which lengths are skipped and what is said of it. How long anything takes is not tested."""

import logging

import pytest
import torch
from small_pairs import PAIR, mapped_pair, save_random_mapper, timing_config

from kvferry.errors import KvferryError
from kvferry.evaluate import clock, latency
from kvferry.evaluate.latency import Bench, drawn, measure_latency, needed_mb, run_latency
from kvferry.evaluate.mapped import Mapped
from kvferry.kv.cache import cache_layers
from kvferry.kv.handoff import Handoff
from kvferry.kv.mapper import WEIGHTS, Mapper
from kvferry.prepare.models import load_model
from kvferry.records import LATENCY, read_record

LENGTHS = [8, 32, 64]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, tiny_model, tokenizer, save_prepared):
    """Three models: one has fewer positions than the others."""
    place = tmp_path_factory.mktemp("models")
    models = {
        "small": tiny_model("llama", 2, seed=3),
        "large": tiny_model("llama", 3, seed=4),
        "short": tiny_model("llama", 2, seed=5, positions=48),
    }
    return {name: load_model(save_prepared(place, model, tokenizer, name)[0]) for name, model in models.items()}


@pytest.fixture(scope="module")
def mapper(tmp_path_factory, loaded):
    return save_random_mapper(tmp_path_factory.mktemp("mappers") / "one", loaded["small"], loaded["large"])


@pytest.fixture
def one(loaded, mapper, tmp_path):
    return mapped_pair(loaded["small"], loaded["large"], mapper, {LATENCY: tmp_path / "out" / f"{LATENCY}.json"})


@pytest.fixture
def back(loaded, tmp_path_factory, tmp_path):
    """The same pair the other way round."""
    place = save_random_mapper(tmp_path_factory.mktemp("mappers") / "back", loaded["large"], loaded["small"])
    return Mapped("back", "one", loaded["large"], loaded["small"], place, {LATENCY: tmp_path / "back.json"})


@pytest.fixture
def reads(monkeypatch):
    """Names of the models that read, and lengths that were mapped, in order."""
    seen = []
    prefill, carry = Bench.prefill, Handoff.ferry

    def noted(self, loaded):
        seen.append((loaded.card["model"], self.span.ids.shape[1]))
        prefill(self, loaded)

    def carried(self, prefix, span, own):
        seen.append(("mapper", own[0][0].shape[2]))
        return carry(self, prefix, span, own)

    monkeypatch.setattr(Bench, "prefill", noted)
    monkeypatch.setattr(Handoff, "ferry", carried)
    return seen


def ids(times):
    return [item.id for item in times.items]


def how(**changes):
    return timing_config(**({"lengths": LENGTHS} | changes))[LATENCY]


def test_every_length_has_as_many_trials_of_each_of_the_three(one):
    (times,) = measure_latency([one], how(lengths=[32, 8, 8], trials=4))
    wanted = [f"load/0/{n}" for n in range(4)]
    wanted += [
        f"{what}/{length}/{n}"
        for length in (8, 32)
        for what in ("mapper", "source_prefill", "target_prefill")
        for n in range(4)
    ]
    assert ids(times) == wanted
    assert times.skipped == {}
    assert all(item.score > 0 for item in times.items)


def test_a_round_is_each_prefill_and_each_mapper_once(one, back, reads):
    measure_latency([one, back], how(lengths=[8], warm_up=1, trials=2))
    assert reads == [("small", 8), ("large", 8), ("mapper", 8), ("mapper", 8)] * 3


def test_the_prefill_of_a_model_is_the_sources_time_of_one_pair_and_the_targets_of_the_other(one, back):
    there, again = measure_latency([one, back], how(lengths=[8, 16]))

    def scores(times, what):
        return [item.score for item in times.items if item.id.startswith(what)]

    assert scores(there, "source_prefill") == scores(again, "target_prefill")
    assert scores(there, "target_prefill") == scores(again, "source_prefill")
    assert scores(there, "mapper") != scores(again, "mapper")


def test_no_call_is_both_a_prefill_and_a_mapping(one, reads, monkeypatch):
    """On a clock that counts what a call does, each takes one: nothing is in two times."""

    def done(call, device):
        before = len(reads)
        call()
        return float(len(reads) - before)

    monkeypatch.setattr(clock, "milliseconds", done)
    (times,) = measure_latency([one], how(lengths=[8]))
    assert {item.score for item in times.items if not item.id.startswith("load")} == {1.0}
    assert {item.score for item in times.items if item.id.startswith("load")} == {0.0}


def test_a_prefill_reads_all_tokens_and_makes_the_logits_of_the_last_alone(one):
    bench, seen = Bench(drawn(2, 16, 250), ["small"], [torch.device("cpu")]), []
    hook = one.source.model.register_forward_hook(lambda _m, _a, out: seen.append(out.logits.shape))
    bench.prefill(one.source)
    hook.remove()
    assert [tuple(shape[:2]) for shape in seen] == [(2, 1)]
    with torch.inference_mode():
        own = cache_layers(one.source.model(bench.span.ids, use_cache=True).cache)
    for found, wanted in zip(bench.caches["small"], own, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    bench.prefill(one.target)
    assert list(bench.caches) == ["small"]


@pytest.mark.parametrize("head", [0, 3])
def test_what_is_timed_makes_the_cache_that_an_evaluation_reads_on_from(head, one, monkeypatch):
    system, made = Handoff(one.source.model, one.target.model, one.load(), head), []
    carry = Handoff.ferry
    monkeypatch.setattr(Handoff, "ferry", lambda *given: made.append(carry(*given)) or made[-1])
    bench = Bench(drawn(2, 16, 250), ["small"], [torch.device("cpu")])
    bench.prefill(one.source)
    bench.carry(one, system)
    system.extend(system.start(2), bench.span)
    timed, evaluated = made
    assert timed.mask.shape == (2, 16 + head)
    assert torch.equal(timed.mask, evaluated.mask)
    assert timed.lengths.tolist() == [16, 16]
    for found, wanted in zip(cache_layers(timed.cache), cache_layers(evaluated.cache), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_lengths_beyond_the_positions_of_one_model_are_skipped_and_the_reason_is_stated(loaded, tmp_path, caplog):
    place = save_random_mapper(tmp_path / "mapper", loaded["short"], loaded["large"])
    with caplog.at_level(logging.INFO):
        (times,) = measure_latency([mapped_pair(loaded["short"], loaded["large"], place, {})], how())
    assert times.skipped == {"64": "the models have 48 positions"}
    assert {name.split("/")[1] for name in ids(times)} == {"0", "8", "32"}
    assert "64 tokens are skipped: the models have 48 positions" in caplog.text


def test_each_pair_goes_as_far_as_its_own_models_do(one, loaded, tmp_path):
    place = save_random_mapper(tmp_path / "mapper", loaded["short"], loaded["large"])
    short, full = measure_latency([mapped_pair(loaded["short"], loaded["large"], place, {}), one], how())
    assert list(short.skipped) == ["64"]
    assert full.skipped == {}
    assert "mapper/64/0" in ids(full)
    assert "mapper/64/0" not in ids(short)


def test_lengths_beyond_the_memory_are_skipped(one, monkeypatch):
    monkeypatch.setattr(latency, "MEGABYTE", 1)

    def needed(length, batch):
        (found,) = needed_mb(one, length, batch).values()
        return found

    card, config = one.target.card, one.target.model.config
    caches = 4 * 2 * 2 * 8 * (2 + 3 + 2 * 3)
    assert needed(10, 2) == 20 * (caches + 4 * (3 * config.intermediate_size + 7 * card["hidden_size"]))
    (times,) = measure_latency([one], how(memory_mb=needed(32, 1)))
    assert list(times.skipped) == ["64"]
    assert (
        times.skipped["64"] == f"it would take about {needed(64, 1):,} MB of memory, and {needed(32, 1):,} MB are there"
    )


def test_without_a_limit_the_free_memory_bounds_the_length(one, monkeypatch):
    monkeypatch.setattr(latency, "free_mb", lambda device: -1)
    (times,) = measure_latency([one], how())
    assert list(times.skipped) == [str(length) for length in LENGTHS]
    assert {name.split("/")[0] for name in ids(times)} == {"load"}


def test_lengths_that_would_take_far_longer_than_their_seconds_are_skipped(one, monkeypatch):
    """A clock on which a call takes 0.1 s a token: 64 tokens 6.4 s, which is more than twice 3 s."""
    now = []
    prefill = Bench.prefill

    def noted(self, loaded):
        now.append(self.span.ids.shape[1])
        prefill(self, loaded)

    def ticked(call, device):
        call()
        return 100.0 * (now[-1] if now else 0)

    monkeypatch.setattr(Bench, "prefill", noted)
    monkeypatch.setattr(clock, "milliseconds", ticked)
    (times,) = measure_latency([one], how(seconds=3))
    assert times.skipped == {"64": "one trial would take 6 s or more, and latency.seconds is 3"}
    (times,) = measure_latency([one], how(seconds=4))
    assert times.skipped == {}


class TestRecords:
    def test_the_record_states_how_it_was_measured(self, one):
        run_latency(timing_config(lengths=[8, 1000]), [one])
        record = read_record(one.outputs[LATENCY])
        assert (record.pair, record.system, record.source, record.target) == (PAIR, "random", "small", "large")
        assert (record.benchmark, record.metric) == ("latency", "ms")
        told = record.settings
        assert told["skipped"] == {"1000": "the models have 256 positions"}
        assert told["device_name"]
        assert (told["batch"], told["threads"], told["dtype"]) == (1, torch.get_num_threads(), "float32")
        assert (told["lengths"], told["trials"], told["native_head"]) == ([8, 1000], 3, 0)

    def test_what_is_there_is_not_measured_again(self, one, back, reads):
        run_latency(timing_config(), [one])
        first = read_record(one.outputs[LATENCY])
        assert reads
        reads.clear()
        run_latency(timing_config(), [one])
        assert not reads
        assert read_record(one.outputs[LATENCY]) == first
        run_latency(timing_config(), [one, back])
        assert reads.count(("mapper", 8)) == 3
        assert read_record(one.outputs[LATENCY]) == first
        assert read_record(back.outputs[LATENCY]).pair == "back"

    def test_other_settings_are_measured_again(self, one, reads):
        run_latency(timing_config(), [one])
        reads.clear()
        run_latency(timing_config(trials=4), [one])
        assert len(reads) == 12

    def test_an_altered_mapper_is_refused(self, one, tmp_path, loaded):
        place = save_random_mapper(tmp_path / "mapper", loaded["small"], loaded["large"])
        (place / WEIGHTS).write_bytes((place / WEIGHTS).read_bytes()[:-8])
        broken = mapped_pair(loaded["small"], loaded["large"], place, {LATENCY: tmp_path / "broken.json"})
        with pytest.raises(KvferryError, match="truncated or altered"):
            run_latency(timing_config(), [broken])
        assert not (tmp_path / "broken.json").exists()


def test_loading_checks_the_weights_every_time(one, monkeypatch):
    loads = []
    load = Mapped.load
    monkeypatch.setattr(Mapped, "load", lambda self: loads.append(load(self)) or loads[-1])
    measure_latency([one], how(lengths=[8], warm_up=1, trials=3))
    assert len(loads) == 1 + 1 + 3
    assert all(isinstance(mapper, Mapper) for mapper in loads)
