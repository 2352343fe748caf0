"""Tables made from made-up records: values, undefined cases, order of rows, and what is refused."""

import csv
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest
from test_report_inputs import (
    CHANCE,
    CONFIG,
    NATS,
    PAIRS,
    PAPER_PAIRS,
    accuracy_items,
    build,
    only,
    perplexity_items,
    write_native,
    write_transfer,
)

from kvferry.errors import KvferryError
from kvferry.records import Item
from kvferry.report import compare
from kvferry.report.inputs import Results
from kvferry.report.items import TARGET
from kvferry.report.paper import Paper
from kvferry.report.summary import headline
from kvferry.report.tables import TABLES, write_table
from kvferry.report.tables.render import readable
from kvferry.report.wanted import tables_of

PAIR = "small-to-big"


def load(root, config=CONFIG, pairs=PAIRS):
    return Results.load(root, config, pairs)


def row(frame, **wanted):
    (found,) = (frame[(frame[list(wanted)] == pd.Series(wanted)).all(axis=1)]).to_dict("records")
    return found


def test_every_table_is_made_and_written(tmp_path):
    results = load(build(tmp_path), pairs=PAPER_PAIRS)
    for name in tables_of(CONFIG):
        frame = TABLES[name](results)
        write_table(frame, tmp_path / "tables" / name, caption=f"About {name}")
        written = list(csv.reader((tmp_path / f"tables/{name}.csv").open()))
        assert written[0] == list(frame.columns)
        assert len(written) == len(frame) + 1
        markdown = (tmp_path / f"tables/{name}.md").read_text()
        assert not re.search(r"\bnan\b", markdown.lower())
        assert markdown.startswith(f"About {name}\n")
        latex = (tmp_path / f"tables/{name}.tex").read_text()
        assert latex.count(r"\\") == len(frame) + 1
        assert "→" not in latex


def test_retention_has_source_alone_first_then_the_transfer(tmp_path):
    frame = TABLES["table1_retention"](load(build(tmp_path)))
    assert frame["system"].tolist() == ["source alone", "ridge_k8"]
    assert frame["k"].tolist() == [None, 8]


def test_retention_and_averages_by_hand(tmp_path):
    found = row(TABLES["table1_retention"](load(build(tmp_path))), system="ridge_k8")
    assert found["mmlu"] == pytest.approx(100 * 75 / 90)
    assert found["avg"] == pytest.approx(100 * 75 / 90)
    floors = [100 * (0.75 - c) / (0.9 - c) for c in CHANCE.values()]
    assert found["avg_floor_normalised"] == pytest.approx(np.mean(floors))
    assert found["gap_recovered"] == pytest.approx(50)
    assert found["gap_recovered_perplexity"] == pytest.approx(100 * (3.2 - 2.6) / (3.2 - 2.5))
    assert found["mmlu_n"] == 100


def test_intervals_hold_the_value_and_averaging_narrows_them(tmp_path):
    found = row(TABLES["table1_retention"](load(build(tmp_path))), system="ridge_k8")
    for name in (*CHANCE, "avg", "avg_floor_normalised", "gap_recovered"):
        assert found[f"{name}_low"] < found[name] < found[f"{name}_high"]
    assert found["avg_high"] - found["avg_low"] < found["mmlu_high"] - found["mmlu_low"]


def test_retention_interval_is_that_of_drawing_items_one_by_one(tmp_path):
    config = CONFIG | {"statistics": {"bootstrap": 20_000, "seed": 3}}
    found = row(TABLES["table1_retention"](load(build(tmp_path), config)), system="ridge_k8")
    taken = np.random.default_rng(9).integers(100, size=(20_000, 100))
    low, high = np.percentile(100 * (taken < 75).sum(1) / (taken < 90).sum(1), [2.5, 97.5])
    assert (found["mmlu_low"], found["mmlu_high"]) == pytest.approx((low, high), abs=0.7)


def test_items_are_paired_by_id_and_not_by_place(tmp_path):
    build(tmp_path)
    before = TABLES["table1_retention"](load(tmp_path))
    write_transfer(tmp_path, "ridge_k8", "mmlu", accuracy_items(75)[::-1])
    pd.testing.assert_frame_equal(before, TABLES["table1_retention"](load(tmp_path)))


@pytest.mark.parametrize(
    "items",
    [
        [Item(f"other-{i}", 1.0) for i in range(100)],
        accuracy_items(75, n=101),
        [*accuracy_items(75, n=99), Item("0", 1.0)],
        [Item(str(i), 1.0, weight=2.0) for i in range(100)],
    ],
)
def test_other_items_are_refused_with_both_places(tmp_path, items):
    build(tmp_path)
    write_transfer(tmp_path, "ridge_k8", "mmlu", items)
    with pytest.raises(KvferryError, match=rf"native/big/mmlu\.json and records/pairs/{PAIR}/ridge_k8/mmlu\.json"):
        TABLES["table1_retention"](load(tmp_path))


@pytest.mark.parametrize(("correct", "reason"), [(25, "at or below chance"), (28, "interval .* includes chance")])
def test_floor_normalised_is_undefined_without_a_target_above_chance(tmp_path, correct, reason):
    write_native(build(tmp_path), "big", "mmlu", accuracy_items(correct))
    found = row(TABLES["table15_floor_normalised"](load(tmp_path)), system="ridge_k8")
    assert found["mmlu"] == "undefined"
    assert found["mmlu_low"] is None
    assert pd.Series([found["mmlu_reason"]]).str.contains(reason).all()
    assert found["avg"] == "undefined"
    assert found["avg_reason"].endswith("mmlu")
    assert found["hellaswag"] == pytest.approx(100 * 50 / 65)


def test_retention_of_a_target_that_is_never_right_is_undefined(tmp_path):
    write_native(build(tmp_path), "big", "gsm8k", accuracy_items(0))
    found = row(TABLES["table1_retention"](load(tmp_path)), system="ridge_k8")
    assert (found["gsm8k"], found["gsm8k_reason"]) == ("undefined", "the target scores 0")
    assert found["avg"] == "undefined"


def test_an_average_of_benchmarks_that_were_not_run_is_undefined(tmp_path):
    found = row(TABLES["table1_retention"](load(build(tmp_path), only("mmlu"))), system="ridge_k8")
    assert "not run: arc_challenge, hellaswag, winogrande, gsm8k" in found["avg_reason"]
    assert found["gap_recovered"] == "undefined"
    assert found["mmlu"] == pytest.approx(100 * 75 / 90)


def test_gap_on_both_scales_of_perplexity(tmp_path):
    frame = TABLES["gap_recovered"](load(build(tmp_path)))
    found = row(frame, system="zero_cache", benchmark="prefix_perplexity")
    source, target, zero = (found[name] for name in ("source", "target", "value"))
    assert found["gap_recovered"] == pytest.approx(100 * (source - zero) / (source - target))
    assert found["gap_recovered_log"] == pytest.approx(100 * np.log(source / zero) / np.log(source / target))
    assert found["gap_recovered"] < found["gap_recovered_log"] < 0


def test_gap_rows_are_systems_in_order_and_only_what_was_run(tmp_path):
    frame = TABLES["gap_recovered"](load(build(tmp_path)))
    assert list(zip(frame["system"], frame["benchmark"], strict=True)) == [
        *(("ridge_k8", name) for name in (*CHANCE, "prefix_perplexity")),
        ("ridge_k1", "prefix_perplexity"),
        ("zero_cache", "prefix_perplexity"),
    ]


@pytest.mark.parametrize(
    ("source", "reason"), [(90, "not better than the source"), (95, "not better"), (89, "includes 0")]
)
def test_no_share_of_a_gap_that_is_not_there(tmp_path, source, reason):
    write_native(build(tmp_path), "small", "mmlu", accuracy_items(source))
    found = row(TABLES["gap_recovered"](load(tmp_path)), system="ridge_k8", benchmark="mmlu")
    assert found["gap_recovered"] == "undefined"
    assert reason in found["gap_recovered_reason"]


def test_accuracy_marks_what_is_not_above_chance(tmp_path):
    write_native(build(tmp_path), "small", "winogrande", accuracy_items(55))
    frame = TABLES["table13_accuracy"](load(tmp_path))
    assert frame["system"].tolist() == ["alone", "own cache injected", "alone", "ridge_k8", "ridge_k1", "zero_cache"]
    assert row(frame, name="small")["winogrande_at_chance"] == "yes"
    assert row(frame, name="big", system="alone")["winogrande_at_chance"] == "no"
    shown, notes = readable(frame)
    assert shown.loc[2, "WinoGrande (n=100)"] == "55.0 [45.2, 64.4]*"
    assert any("not above chance" in note for note in notes)


def test_perplexity_is_weighted_by_tokens(tmp_path):
    items = [Item("0", 1.0, 300.0), Item("1", 2.0, 100.0)]
    for model in ("big", "small"):
        write_native(build(tmp_path) if model == "big" else tmp_path, model, "prefix_perplexity", items)
    found = row(TABLES["table13_accuracy"](load(tmp_path)), name="big", system="alone")
    assert found["prefix_perplexity"] == pytest.approx(np.exp(1.25))
    assert found["prefix_perplexity_low"] == pytest.approx(np.exp(1.0))
    assert found["prefix_perplexity_high"] == pytest.approx(np.exp(2.0))


def test_sizes_and_geometry(tmp_path):
    results = load(build(tmp_path))
    size = row(TABLES["table12_size"](results), system="ridge_k8")
    assert size["p_over_n"] == 192 * 8 / 32768
    assert size["share_of_target"] == pytest.approx(16.0)
    assert (size["r2_k_in_sample"], size["r2_v_held_out"]) == pytest.approx((0.7, 0.3))
    pair = row(TABLES["table10_pairs"](results), pair=PAIR)
    assert (pair["source_layers"], pair["target_layers"], pair["k"]) == (24, 30, 8)
    assert pair["parameter_ratio"] == 1.5
    assert pair["matched_kv"] == "yes"


def test_benchmarks_have_a_row_each_unless_models_were_asked_differently(tmp_path):
    results = load(build(tmp_path))
    assert TABLES["table11_benchmarks"](results)["benchmark"].tolist() == [*CHANCE, "prefix_perplexity"]
    write_native(tmp_path, "small", "mmlu", accuracy_items(40, n=50))
    assert TABLES["table11_benchmarks"](load(tmp_path))["n"].tolist().count(50) == 1


def test_the_paper_stands_beside_a_pair_that_is_in_it(tmp_path):
    results = load(build(tmp_path), pairs=PAPER_PAIRS)
    frame = TABLES["table1_retention"](results)
    assert row(frame, system="ridge_k8")["avg_paper"] == 97.6
    assert row(frame, system="source alone")["avg_paper"] == pytest.approx(97.9, abs=0.05)
    assert "Avg, paper" in readable(frame)[0].columns
    assert row(TABLES["table13_accuracy"](results), name="small")["mmlu_paper"] == 78.86
    assert row(TABLES["table12_size"](results), system="ridge_k8")["parameters_paper"] == 1.07e9
    assert row(TABLES["table12_size"](results), system="ridge_k1")["parameters_paper"] is None


def test_the_papers_transfer_does_not_stand_beside_one_with_another_k(tmp_path):
    results = replace(load(build(tmp_path), pairs=PAPER_PAIRS), headlines={PAIR: "ridge_k1"})
    assert results.comparable(results.pairs[0]) is None
    assert replace(results, headlines={PAIR: "ridge_k8"}).comparable(results.pairs[0]) == "Qwen3 14B→32B"


def test_no_column_of_the_paper_for_other_pairs(tmp_path):
    shown, _ = readable(TABLES["table1_retention"](load(build(tmp_path))))
    assert not [name for name in shown.columns if "paper" in name]


def test_an_unknown_name_of_the_paper_is_refused(tmp_path):
    pairs = {PAIR: PAIRS[PAIR] | {"paper": "Qwen3 1B→2B"}}
    with pytest.raises(KvferryError, match="the paper has no pair 'Qwen3 1B→2B'"):
        TABLES["table1_retention"](load(build(tmp_path), pairs=pairs))


def test_the_papers_tables_agree_with_each_other():
    paper = Paper()
    for pair in paper.table("table1").index:
        retention = [paper.value("table13", pair, name) for name in CHANCE]
        own = [paper.value("table13", paper.models(pair)[1], name) for name in CHANCE]
        mean = np.mean([100 * a / b for a, b in zip(retention, own, strict=True)])
        assert mean == pytest.approx(paper.value("table1", pair, "avg"), abs=0.15)
        assert paper.value("table15", pair, "avg") == paper.value("table1", pair, "avg_floor_normalised")


def test_the_papers_pairs_are_those_of_its_table_10_and_the_same_the_other_way():
    paper = Paper()
    forth, pairs = paper.table("table10"), paper.table("pairs")
    for pair in forth.index:
        assert paper.models(pair) == (forth.loc[pair, "source"], forth.loc[pair, "target"])
        assert paper.k(pair) == paper.value("table1", pair, "k")
    models = {paper.models(pair) for pair in pairs.index}
    assert len(models) == 2 * len(forth)
    assert models == {(target, source) for source, target in models}
    for pair in paper.table("table16").index:
        assert paper.k(pair) == paper.value("table16", pair, "k")
    assert paper.k("Qwen3 32B→8B") is None


def test_a_pair_the_other_way_has_the_papers_models_and_no_retention(tmp_path):
    pairs = {PAIR: PAIRS[PAIR] | {"paper": "Qwen3 32B→14B"}}
    results = load(build(tmp_path), pairs=pairs)
    frame = TABLES["table1_retention"](results)
    assert row(frame, system="source alone")["hellaswag_paper"] == pytest.approx(100 * 82.65 / 78.87)
    assert row(frame, system="ridge_k8")["hellaswag_paper"] is None
    assert row(TABLES["table10_pairs"](results), pair=PAIR)["k_paper"] == 20
    assert results.comparable(results.pairs[0]) is None
    k20 = {**results.manifests[PAIR, "ridge_k8"], "selected_layers": [list(range(20))] * 30}
    same = replace(results, manifests={**results.manifests, (PAIR, "ridge_k8"): k20})
    assert same.comparable(same.pairs[0]) == "Qwen3 32B→14B"


def test_csv_keeps_full_precision_and_markdown_rounds(tmp_path):
    frame = TABLES["table1_retention"](load(build(tmp_path)))
    write_table(frame, tmp_path / "t")
    (_, transfer) = csv.DictReader((tmp_path / "t.csv").open())
    assert float(transfer["mmlu"]) == 100 * (0.75 / 0.9)
    assert transfer["k"] == "8"
    assert f"83.3 [{frame.loc[1, 'mmlu_low']:.1f}, {frame.loc[1, 'mmlu_high']:.1f}]" in (tmp_path / "t.md").read_text()


def test_a_table_without_rows_is_refused(tmp_path):
    with pytest.raises(KvferryError, match="has no rows"):
        write_table(pd.DataFrame(), tmp_path / "t")


def test_headline_fits_the_screen_and_says_what_was_measured(tmp_path):
    write_native(build(tmp_path), "small", "mmlu", accuracy_items(95))
    lines = headline(load(tmp_path)).splitlines()
    assert max(map(len, lines)) <= 110
    assert lines[0] == "small-to-big: small to big, ridge_k8, k = 8"
    (mmlu,) = (line for line in lines if line.startswith("MMLU"))
    assert mmlu.split()[1:4] == ["100", "90.0", "[82.6,"]
    assert mmlu.endswith("undefined")
    mean = np.mean([item.score for item in perplexity_items(NATS["big"])])
    assert f"{np.exp(mean):.2f} [" in next(line for line in lines if line.startswith("prefix PPL"))


def test_systems_are_tested_against_target_and_source_on_the_same_items(tmp_path):
    build(tmp_path)
    # Right: the target on 0–89, the source on 0–59, the transfer on 50–99.
    write_transfer(tmp_path, "ridge_k8", "mmlu", [Item(str(i), float(i >= 50)) for i in range(100)][::-1])
    found = row(TABLES["gap_recovered"](load(tmp_path)), system="ridge_k8", benchmark="mmlu")
    assert (found["only_right_target"], found["only_wrong_target"]) == (10, 50)
    assert (found["only_right_source"], found["only_wrong_source"]) == (40, 50)
    assert found["p_target"] == pytest.approx(binomtest(10, 60).pvalue)
    assert found["p_source"] == pytest.approx(binomtest(40, 90).pvalue)


def test_systems_that_answer_alike_have_p_1_and_chunks_have_none(tmp_path):
    write_transfer(build(tmp_path), "ridge_k8", "mmlu", accuracy_items(90))
    frame = TABLES["gap_recovered"](load(tmp_path))
    found = row(frame, system="ridge_k8", benchmark="mmlu")
    assert (found["only_right_target"], found["only_wrong_target"], found["p_target"]) == (0, 0, 1.0)
    assert row(frame, system="zero_cache", benchmark="prefix_perplexity")["p_target"] is None
    assert "McNemar p, target" in readable(frame)[0].columns


def test_mcnemar_is_on_the_items_that_both_answered_and_of_right_and_wrong_alone(tmp_path):
    build(tmp_path)
    write_transfer(tmp_path, "ridge_k8", "mmlu", accuracy_items(5, n=10))
    results = load(tmp_path)
    (pair,) = results.pairs
    assert compare.mcnemar(results, pair, TARGET, "ridge_k8", "mmlu") == compare.McNemar(10, 5, 0)
    assert compare.mcnemar(results, pair, "ridge_k8", TARGET, "mmlu", frozenset({"0", "9"})) == compare.McNemar(2, 0, 1)
    with pytest.raises(KvferryError, match=r"ridge_k8/prefix_perplexity\.json: McNemar's test needs scores of 0 or 1"):
        compare.mcnemar(results, pair, "ridge_k8", TARGET, "prefix_perplexity")


def test_beside_every_number_of_the_paper_stands_the_difference(tmp_path):
    results = load(build(tmp_path), pairs=PAPER_PAIRS)
    frame = TABLES["table1_retention"](results)
    found = row(frame, system="ridge_k8")
    assert found["avg_difference"] == pytest.approx(found["avg"] - 97.6)
    columns = [name for name in frame.columns if name.endswith("_paper")]
    assert columns
    for name in columns:
        assert frame.columns[frame.columns.get_loc(name) + 1] == name.removesuffix("_paper") + "_difference"
    shown, _ = readable(frame)
    assert shown.loc[1, "Avg, ours − paper"] == f"{found['avg_difference']:+.1f}"
    gap = row(TABLES["gap_recovered"](results), system="ridge_k8", benchmark="prefix_perplexity")
    assert gap["gap_recovered_paper"] == pytest.approx(100 * (7.63 - 7.33) / (7.63 - 6.79))
    assert gap["value_difference"] == pytest.approx(gap["value"] - 7.33)
    assert row(TABLES["gap_recovered"](results), system="ridge_k1")["value_paper"] is None


def test_a_difference_is_undefined_without_ours_and_empty_without_the_papers(tmp_path):
    write_native(build(tmp_path), "big", "gsm8k", accuracy_items(0))
    found = row(TABLES["table1_retention"](load(tmp_path, pairs=PAPER_PAIRS)), system="ridge_k8")
    assert (found["gsm8k"], found["gsm8k_paper"], found["gsm8k_difference"]) == ("undefined", 95.6, "undefined")
    assert row(TABLES["table1_retention"](load(tmp_path)), system="ridge_k8")["mmlu_difference"] is None


def test_the_papers_settings_stand_beside_ours(tmp_path):
    found = row(TABLES["table11_benchmarks"](load(build(tmp_path))), benchmark="gsm8k")
    assert (found["shots"], found["shots_paper"], found["shots_difference"]) == (0, 8, -8)
    assert (found["metric_paper"], found["chance_difference"]) == ("acc", 0)
