"""Times as records hold them: quantiles, ratios, from where a hand-off pays, tables and figures, and what is refused."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PolyCollection
from test_report_inputs import CONFIG, PAIRS, PAPER_PAIRS, build

from kvferry.errors import KvferryError
from kvferry.records import LATENCY, NATIVE_TOKENS, NATIVE_TOKENS_TIME, Item, Record
from kvferry.report import style
from kvferry.report.figures.latency import fig9_latency
from kvferry.report.figures.native_tokens import fig11_native_tokens
from kvferry.report.inputs import Results
from kvferry.report.native_tokens import points
from kvferry.report.speed import Spread, cold_ms, load_ms, pays_from, speeds
from kvferry.report.tables import write_table
from kvferry.report.tables.render import readable
from kvferry.report.tables.speed import native_tokens, table5_latency, table16_latency_range

PAIR, VARIANT = "small-to-big", "ridge_k8"
# tokens: mapper, source prefill, target prefill of every round
TIMES = {
    8192: ([80, 90, 100], [400, 500, 600], [1000, 900, 800]),
    64: ([20, 10, 30], [5, 5, 5], [10, 20, 15]),
    512: ([10, 10, 10], [15, 45, 30], [30, 20, 40]),
}
TOLD = {"device": "cpu", "device_name": "A Processor", "threads": 2, "dtype": "float32", "batch": 1, "skipped": {}}


def record_of(benchmark, metric, items, **settings):
    return Record(
        system=VARIANT,
        target="big",
        source="small",
        pair=PAIR,
        benchmark=benchmark,
        metric=metric,
        items=items,
        settings=settings,
    )


def latency_record(times=TIMES, load=(3.0, 1.0, 2.0)):
    items = [Item(f"load/0/{n}", value) for n, value in enumerate(load)]
    items += [
        Item(f"{what}/{length}/{n}", float(value))
        for length, own in times.items()
        for what, trials in zip(("mapper", "source_prefill", "target_prefill"), own, strict=True)
        for n, value in enumerate(trials)
    ]
    return record_of(LATENCY, "ms", items, **TOLD)


CHUNKS, TRIALS = 12, 5
KL = {("last", 1): 0.4, ("last", 4): 0.35, ("first", 0): 0.4, ("first", 1): 0.2, ("first", 4): 0.1}
MS = {("last", 1): 100.0, ("last", 4): 103.0, ("first", 0): 100.0, ("first", 1): 130.0, ("first", 4): 131.0}


def native_records(kl=KL, ms=MS):
    quality = [
        Item(f"{where}/{count}/chunk-{n}-ab", value + 0.01 * n, 96.0)
        for (where, count), value in kl.items()
        for n in range(CHUNKS)
    ]
    times = [Item(f"{where}/{count}/{n}", value + n) for (where, count), value in ms.items() for n in range(TRIALS)]
    return record_of(NATIVE_TOKENS, "kl", quality), record_of(NATIVE_TOKENS_TIME, "ms", times, length=1024)


@pytest.fixture
def make(tmp_path):
    """Results with records of latency and of native tokens."""

    def go(*records, pairs=PAIRS):
        results = Results.load(build(tmp_path / "results"), CONFIG, pairs)
        transfers = dict(results.transfers)
        for record in records or (latency_record(), *native_records()):
            transfers[record.pair, record.system, record.benchmark] = record
        return replace(results, transfers=transfers)

    return go


@pytest.fixture
def saved(monkeypatch):
    """Figures as they are when they are saved."""
    figures, save = [], style.save
    monkeypatch.setattr(style, "save", lambda figure, *rest: (figures.append(figure), save(figure, *rest)))
    return figures


def row(frame, **wanted):
    (found,) = frame[(frame[list(wanted)] == pd.Series(wanted)).all(axis=1)].to_dict("records")
    return found


def test_a_spread_is_the_median_and_the_tenth_and_ninetieth_percentile():
    trials = list(np.random.default_rng(0).exponential(size=31))
    found = Spread.over(trials)
    # of 31 sorted values the 10th percentile is number 3, the median number 15, the 90th percentile number 27
    assert (found.low, found.median, found.high) == pytest.approx(tuple(sorted(trials)[n] for n in (3, 15, 27)))
    assert Spread.over([1.0, 2.0]) == Spread(1.5, pytest.approx(1.1), pytest.approx(1.9))


def test_speeds_are_by_length_with_the_ratios_of_the_medians():
    found = speeds(latency_record())
    assert [own.length for own in found] == [64, 512, 8192]
    assert [own.trials for own in found] == [3, 3, 3]
    assert [own.mapper_ms.median for own in found] == [20, 10, 90]
    assert [own.source_prefill_ms.median for own in found] == [5, 30, 500]
    assert [own.target_prefill_ms.median for own in found] == [15, 30, 900]
    assert [own.warm for own in found] == pytest.approx([0.75, 3, 10])
    assert [own.cold for own in found] == pytest.approx([15 / 25, 30 / 40, 900 / 590])


def test_the_source_and_the_mapper_of_a_round_are_added_once_and_before_quantiles():
    assert cold_ms(latency_record())[8192] == Spread.over([480, 590, 700])
    assert cold_ms(latency_record())[512] == Spread.over([25, 55, 40])


@pytest.mark.parametrize(
    ("ratios", "length"),
    [
        ([0.5, 2, 3], 512),
        ([2, 2, 3], 64),
        ([2, 0.9, 3], 8192),
        ([2, 2, 0.9], None),
        ([0.5, 1.0, 1.1], 8192),
        ([0.5, 0.9, 1.0], None),
    ],
)
def test_a_hand_off_pays_from_the_length_after_which_it_is_never_slower(ratios, length):
    times = {n: ([10], [0], [10 * ratio]) for n, ratio in zip((64, 512, 8192), ratios, strict=True)}
    measured = speeds(latency_record(times))
    assert pays_from(measured, "warm") == length
    assert pays_from(measured[::-1], "cold") == length
    assert pays_from([], "warm") is None


def test_warm_and_cold_pay_from_lengths_of_their_own():
    measured = speeds(latency_record())
    assert (pays_from(measured, "warm"), pays_from(measured, "cold")) == (512, 8192)


def test_the_time_of_loading_is_apart():
    assert load_ms(latency_record()) == Spread.over([1, 2, 3])
    with pytest.raises(KvferryError, match="no time of loading"):
        load_ms(latency_record(load=()))


def test_rounds_that_do_not_belong_together_are_refused():
    record = latency_record()
    with pytest.raises(KvferryError, match="not as many trials of mapper and prefills at 8,192 tokens"):
        speeds(replace(record, items=[item for item in record.items if item.id != "mapper/8192/2"]))
    with pytest.raises(KvferryError, match=r"item 'trial-0' .* is no trial"):
        speeds(replace(record, items=[Item("trial-0", 1.0)]))


def test_table_5_has_a_row_a_length(make):
    frame = table5_latency(make())
    assert frame["tokens"].tolist() == [64, 512, 8192]
    found = row(frame, tokens=8192)
    assert (found["pair"], found["system"], found["k"], found["trials"]) == (PAIR, VARIANT, 8, 3)
    assert (found["mapper_ms"], found["target_prefill_ms"], found["source_prefill_ms"]) == (90, 900, 500)
    assert (found["mapper_ms_low"], found["mapper_ms_high"]) == pytest.approx((82, 98))
    assert (found["warm"], found["cold"]) == pytest.approx((10, 900 / 590))
    assert frame[[name for name in frame if name.endswith("_paper")]].isna().all(axis=None)


def test_the_papers_times_stand_beside_the_same_pair_k_and_length_alone(make, tmp_path):
    frame = table5_latency(make(pairs=PAPER_PAIRS))
    found = row(frame, tokens=8192)
    assert (found["mapper_ms_paper"], found["target_prefill_ms_paper"]) == (67.8, 1154.8)
    assert found["warm_paper"] == pytest.approx(1154.8 / 67.8)
    assert row(frame, tokens=512)["mapper_ms_paper"] is None
    write_table(frame, tmp_path / "table5")
    assert "1154.8" in (tmp_path / "table5.md").read_text()
    found = table16_latency_range(make(pairs=PAPER_PAIRS)).to_dict("records")[0]
    assert (found["mapper_ms_paper"], found["warm_least_paper"], found["warm_most_paper"]) == (278, 4.4, 25.1)


def test_another_recipe_than_the_papers_has_no_time_of_the_paper_beside_it(make):
    results = make(pairs=PAPER_PAIRS)
    own = results.manifests[PAIR, VARIANT]
    changed = own | {"recipe": own["recipe"] | {"native_head": 4}}
    frame = table5_latency(replace(results, manifests={**results.manifests, (PAIR, VARIANT): changed}))
    assert frame["mapper_ms_paper"].isna().all()


def test_table_16_is_the_longest_length_and_the_ranges(make):
    (found,) = table16_latency_range(make()).to_dict("records")
    assert (found["tokens"], found["lengths"], found["mapper_ms"], found["target_prefill_ms"]) == (8192, 3, 90, 900)
    assert (found["warm_least"], found["warm_most"]) == pytest.approx((0.75, 10))
    assert (found["cold_least"], found["cold_most"]) == pytest.approx((0.6, 900 / 590))
    assert (found["warm_from"], found["cold_from"]) == (512, 8192)
    assert (found["load_ms"], found["load_ms_low"], found["load_ms_high"]) == pytest.approx((2, 1.2, 2.8))


def test_a_hand_off_that_never_pays_says_so(make):
    slow = latency_record({64: ([20], [5], [10]), 512: ([20], [5], [22])})
    shown, notes = readable(table16_latency_range(make(slow)))
    assert shown["warm pays from, tokens"].tolist() == ["512"]
    assert shown["cold pays from, tokens"].tolist() == ["none measured"]
    assert notes == []


def test_without_records_the_tables_and_figures_say_what_to_do(make, tmp_path):
    empty = replace(make(), transfers={})
    for made in (table5_latency, table16_latency_range, native_tokens):
        with pytest.raises(KvferryError, match="add the section"):
            made(empty)
    for drawn in (fig9_latency, fig11_native_tokens):
        with pytest.raises(KvferryError, match="add the section"):
            drawn(empty, tmp_path / "figure")
    with pytest.raises(KvferryError, match=r"every length of latency\.lengths was skipped"):
        table16_latency_range(make(latency_record({})))


def test_points_have_the_kl_and_what_is_gained_on_the_same_chunks(make):
    results = make()
    found = points(results, *native_records())
    assert [(own.where, own.count) for own in found] == [
        ("last", 1),
        ("last", 4),
        ("first", 0),
        ("first", 1),
        ("first", 4),
    ]
    first4 = found[-1]
    assert first4.kl.value == pytest.approx(0.1 + 0.01 * 5.5)
    low, high = first4.kl.interval()
    assert low < first4.kl.value < high
    # every chunk gains the same, so that a paired interval has no width
    assert first4.gained.interval() == pytest.approx((-0.3, -0.3))
    assert (first4.chunks, first4.trials) == (CHUNKS, TRIALS)


def test_added_time_is_over_the_median_of_the_own_base(make):
    found = {(own.where, own.count): own for own in points(make(), *native_records())}
    assert found["first", 1].ms.median == 132
    assert found["first", 1].added_ms == Spread(30, pytest.approx(28.4), pytest.approx(31.6))
    assert found["last", 4].added_ms.median == 3
    assert found["last", 1].added_ms.median == 0


def test_points_that_do_not_belong_together_are_refused(make):
    quality, times = native_records()
    without = [{key: value for key, value in own.items() if key != ("first", 0)} for own in (KL, MS)]
    for broken in ((quality, native_records(ms=without[1])[1]), native_records(*without)):
        with pytest.raises(KvferryError, match="have not the same points, or lack"):
            points(make(), *broken)
    items = [replace(item, id=item.id.replace("4/chunk-3", "4/chunk-99")) for item in quality.items]
    with pytest.raises(KvferryError, match="different chunks"):
        points(make(), replace(quality, items=items), times)
    with pytest.raises(KvferryError, match="'middle/1/chunk-0' is of no point"):
        points(make(), replace(quality, items=[Item("middle/1/chunk-0", 1.0)]), times)
    with pytest.raises(KvferryError, match=r"native_tokens_time\.json: there is no such record"):
        native_tokens(make(quality))


def test_the_table_of_native_tokens(make, tmp_path):
    frame = native_tokens(make())
    found = row(frame, native_at="start", native_count=4)
    assert found["next_token_kl"] == pytest.approx(0.155)
    assert found["next_token_kl_gained"] == pytest.approx(-0.3)
    assert (found["handoff_ms"], found["added_ms"], found["tokens"]) == (133, 31, 1024)
    write_table(frame, tmp_path / "native_tokens")
    assert "KL, nats/token (n=12)" in (tmp_path / "native_tokens.md").read_text()


def test_figure_9_is_its_csv_with_a_line_style_a_curve(make, tmp_path, saved):
    fig9_latency(make(), tmp_path / "fig9")
    drawn = pd.read_csv(tmp_path / "fig9.csv")
    (ax,) = saved[0].axes
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    lines = {line.get_linestyle(): line for line in ax.lines}
    for style_of, name in (("-", "mapper_ms"), ("--", "target_prefill_ms"), (":", "cold_ms")):
        assert lines[style_of].get_xdata() == pytest.approx(drawn["tokens"].to_numpy())
        assert lines[style_of].get_ydata() == pytest.approx(drawn[name].to_numpy())
    assert len([part for part in ax.collections if isinstance(part, PolyCollection)]) == 3
    assert "warm pays from 512 tokens; cold pays from 8,192 tokens" in ax.get_title()
    assert "3 trials" in saved[0].get_suptitle()
    assert "A Processor, 2 thread(s), float32, batch 1" in saved[0].get_suptitle().replace("\n", " ")
    assert [text.get_text() for text in saved[0].legends[0].get_texts()] == [
        "re-prefill by the target",
        "source prefill + mapper (cold)",
        "mapper (warm)",
    ]


def test_figure_11_is_its_csv(make, tmp_path, saved):
    fig11_native_tokens(make(), tmp_path / "fig11")
    drawn = pd.read_csv(tmp_path / "fig11.csv")
    quality, time = saved[0].axes
    for ax, name in ((quality, "next_token_kl"), (time, "added_ms")):
        lines = {line.get_linestyle(): line for line in ax.lines}
        for style_of, where in (("--", "last"), ("-", "first")):
            assert lines[style_of].get_ydata() == pytest.approx(drawn.loc[drawn["native_at"] == where, name].to_numpy())
        assert lines["--"].get_xdata().tolist() == [1, 2]
        assert lines["-"].get_xdata().tolist() == [0, 1, 2]
        assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1", "4"]
    assert "n = 12 chunks" in quality.get_title()
    assert time.get_title() == "1,024 tokens, 102 ms without (n = 5 trials)"


def test_files_are_equal_on_two_runs(make, tmp_path):
    for run in ("one", "two"):
        fig9_latency(make(), tmp_path / run / "fig9")
        fig11_native_tokens(make(), tmp_path / run / "fig11")
    for name in ("fig9", "fig11"):
        for kind in ("pdf", "png", "csv"):
            first, second = (tmp_path / run / f"{name}.{kind}" for run in ("one", "two"))
            assert first.read_bytes() == second.read_bytes()
