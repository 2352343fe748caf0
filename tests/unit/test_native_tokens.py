"""Both curves are what the plain measures give with another hold_back or another native head, from one prefill of the source."""

import pytest
import torch
from small_pairs import mapped_pair, save_random_mapper, timing_config

from kvferry.evaluate.clock import Effort
from kvferry.evaluate.native_tokens import HeldBack, distinct, points, run_native_tokens, time_points
from kvferry.evaluate.perplexity import Cut, measure_chunks
from kvferry.evaluate.setting import Setting
from kvferry.evaluate.tasks import Questions
from kvferry.kv.cache import cache_layers
from kvferry.kv.handoff import Handoff, Native
from kvferry.kv.prefill import Memory, Span
from kvferry.prepare.models import load_model
from kvferry.records import NATIVE_TOKENS, NATIVE_TOKENS_TIME, NEXT_TOKEN_KL, read_record

PREFIX, SCORED, CHUNKS = 24, 6, 5
COUNTS = [1, 4, 30]
PLENTY = 10**9


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, tiny_model, tokenizer, save_prepared):
    place = tmp_path_factory.mktemp("models")
    models = {"small": tiny_model("llama", 2, seed=3), "large": tiny_model("qwen3", 3, seed=4)}
    return {name: load_model(save_prepared(place, model, tokenizer, name)[0]) for name, model in models.items()}


@pytest.fixture(scope="module")
def mapper(tmp_path_factory, loaded):
    return save_random_mapper(tmp_path_factory.mktemp("mappers") / "one", loaded["small"], loaded["large"])


@pytest.fixture
def make(loaded, mapper, tmp_path):
    """The mapper, with a native head of its own."""
    outputs = {name: tmp_path / f"{name}.json" for name in (NATIVE_TOKENS, NATIVE_TOKENS_TIME)}
    return lambda head=0: mapped_pair(loaded["small"], loaded["large"], mapper, outputs, head)


@pytest.fixture
def setting(loaded):
    """The factory of settings with a hold_back."""

    def go(hold_back=1, **changes):
        config = timing_config()
        config["evaluation"]["hold_back"] = hold_back
        config |= {"native_tokens": {"counts": COUNTS, "length": 16, "trials": 3} | changes}
        config |= {"perplexity": {"corpus": "prose", "prefix": PREFIX, "scored": SCORED, "seed": 0}}
        torch.manual_seed(8)
        chunks = torch.randint(3, 250, (CHUNKS, PREFIX + SCORED))
        return Setting(config, loaded["large"], Questions(None), chunks, Memory(PLENTY))

    return go


def curve(record, name):
    """Scores of a point, in order, and the ids of its chunks."""
    items = [item for item in record.items if item.id.startswith(f"{name}/")]
    return [item.score for item in items], [item.id.removeprefix(f"{name}/") for item in items]


def plain(setting, one, native_head, hold_back):
    """The same by `measure_chunks` alone."""
    system = Handoff(one.source.model, one.target.model, one.load(), native_head)
    own = Native(one.target.model)
    found = measure_chunks(own, {"it": system}, setting.chunks, Cut(PREFIX, hold_back), Memory())
    items = found["it"][NEXT_TOKEN_KL]
    return pytest.approx([item.score for item in items], rel=1e-3, abs=1e-6), [item.id for item in items]


@pytest.mark.parametrize(("head", "hold_back"), [(0, 1), (0, 3), (2, 1)])
def test_every_point_is_what_measure_chunks_gives(head, hold_back, make, setting):
    one, how = make(head), setting(hold_back)
    run_native_tokens(how, [one])
    record = read_record(one.outputs[NATIVE_TOKENS])
    for count in (1, 4, 30):
        assert curve(record, f"last/{count}") == plain(how, one, head, count)
    for count in (0, 1, 4, 30):
        assert curve(record, f"first/{count}") == plain(how, one, count, hold_back)
    assert record.n == 7 * CHUNKS
    assert {item.weight for item in record.items} == {float(SCORED)}
    assert max(curve(record, "last/1")[0]) > 0.01


def test_a_prefix_that_the_target_reads_whole_diverges_by_nothing(make, setting):
    one = make()
    run_native_tokens(setting(), [one])
    record = read_record(one.outputs[NATIVE_TOKENS])
    assert curve(record, "last/30")[0] == pytest.approx([0.0] * CHUNKS, abs=1e-6)
    assert curve(record, "first/30")[0] == pytest.approx([0.0] * CHUNKS, abs=1e-6)


def test_the_source_reads_every_chunk_once_whatever_the_points(make, setting, monkeypatch):
    one, how, sizes = make(), setting(), []
    hook = one.source.model.register_forward_pre_hook(
        lambda _m, _a, words: sizes.append(words["input_ids"].numel()), with_kwargs=True
    )
    monkeypatch.setattr("kvferry.evaluate.native_tokens._time", lambda *_: None)
    monkeypatch.setattr("kvferry.evaluate.native_tokens.publish", lambda *_: None)
    run_native_tokens(how, [one, one])
    hook.remove()
    assert sum(sizes) == CHUNKS * (PREFIX - 1)


def test_what_both_curves_have_in_common_is_one_measurement(make):
    handoff = make().handoff()
    own, same = distinct(points(handoff, 1, [1, 4]))
    assert list(own) == ["last/1", "last/4", "first/1", "first/4"]
    assert same["first/0"] == "last/1"
    own, same = distinct(points(make(2).handoff(), 1, [1, 4]))
    assert same["first/0"] == "first/0"
    own, same = distinct(points(handoff, 4, [1, 4]))
    assert same["first/0"] == "last/4"


def test_the_timed_hand_off_ends_with_every_token_in_the_targets_cache(make, loaded):
    """At hold_back h the target reads h tokens in one pass, with a native head s also the first s."""
    source, target = loaded["small"].model, loaded["large"].model
    ids = torch.randint(3, 250, (1, 16), generator=torch.Generator().manual_seed(1))
    span = Span(ids, torch.ones_like(ids))
    with torch.inference_mode():
        own = cache_layers(source(ids, use_cache=True).cache)
    for name, point in points(make().handoff(), 1, [1, 4, 30]).items():
        sizes = []
        hook = target.register_forward_pre_hook(
            lambda _m, _a, words, sizes=sizes: sizes.append(words["input_ids"].shape[1]), with_kwargs=True
        )
        with torch.inference_mode():
            made = point.take(point.start(1), span, own, 16 - point.count)
        hook.remove()
        where, count = name.split("/")
        wanted = {"last": [min(int(count), 16)], "first": [min(int(count), 15), 1] if int(count) else [1]}[where]
        assert sizes == wanted
        assert made.lengths.tolist() == [16]
        assert int(made.mask.sum()) == 16


def test_times_are_those_of_the_hand_off_without_the_sources_prefill(make, loaded):
    curves, sizes = points(make().handoff(), 1, [4]), []
    hook = loaded["small"].model.register_forward_hook(lambda *_: sizes.append(1))
    times = time_points(curves, 16, Effort(1, 3))
    hook.remove()
    assert {name: len(trials) for name, trials in times.items()} == dict.fromkeys(
        ["last/1", "last/4", "first/0", "first/4"], 3
    )
    assert len(sizes) == 1


def test_the_record_of_the_times_has_every_point_and_states_the_length(make, setting):
    one = make()
    run_native_tokens(setting(), [one])
    record = read_record(one.outputs[NATIVE_TOKENS_TIME])
    places = [f"last/{count}" for count in (1, 4, 30)] + [f"first/{count}" for count in (0, 1, 4, 30)]
    assert [item.id for item in record.items] == [f"{place}/{n}" for place in places for n in range(3)]
    assert curve(record, "last/1")[0] == curve(record, "first/0")[0]
    assert (record.metric, record.settings["length"], record.settings["hold_back"]) == ("ms", 16, 1)


def test_a_length_beyond_the_positions_is_cut_to_them(make, setting):
    one = make()
    run_native_tokens(setting(length=10_000, counts=[1]), [one])
    assert read_record(one.outputs[NATIVE_TOKENS_TIME]).settings["length"] == 256


def test_finished_records_are_kept_each_by_what_decides_it(make, setting, monkeypatch):
    one = make()
    run_native_tokens(setting(), [one])
    before = [read_record(path) for path in one.outputs.values()]
    read_model = []
    hook = one.target.model.register_forward_hook(lambda *_: read_model.append(1))
    run_native_tokens(setting(), [one])
    assert not read_model
    assert [read_record(path) for path in one.outputs.values()] == before
    monkeypatch.setattr("kvferry.evaluate.native_tokens.measure_chunks", None)  # only the times are measured again
    run_native_tokens(setting(trials=4), [one])
    hook.remove()
    assert read_model
    assert read_record(one.outputs[NATIVE_TOKENS]) == before[0]


def test_a_held_back_prefix_is_not_extended_again(make):
    point = HeldBack(make().handoff(), 2)
    span = Span.of([[5, 6, 7, 8]], torch.device("cpu"))
    assert point.extend(point.start(1), span).texts == ()
