"""Tables of the sweeps: values that follow from made-up numbers, the paper's beside them, and cases without a value."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from test_report_inputs import PAPER_PAIRS, accuracy_items, perplexity_items, write_native, write_transfer
from test_report_sweeps import FULL, PAIR, SWEPT_CONFIG, build_swept, few_items, load, sweep

from kvferry.errors import KvferryError
from kvferry.records import Item
from kvferry.report.paper import Paper
from kvferry.report.stats import wilson
from kvferry.report.tables import TABLES, write_table
from kvferry.report.tables.render import readable
from kvferry.report.wanted import tables_of


def row(frame, **wanted):
    (found,) = (frame[(frame[list(wanted)] == pd.Series(wanted)).all(axis=1)]).to_dict("records")
    return found


def with_sweep(name, entry):
    return SWEPT_CONFIG | {"sweeps": SWEPT_CONFIG["sweeps"] | {name: entry}}


def test_every_table_is_the_same_twice_and_written_without_nan(tmp_path):
    results = load(build_swept(tmp_path), pairs=PAPER_PAIRS)
    for name in tables_of(SWEPT_CONFIG):
        frame = TABLES[name](results)
        pd.testing.assert_frame_equal(frame, TABLES[name](load(tmp_path, pairs=PAPER_PAIRS)))
        write_table(frame, tmp_path / "tables" / name)
        assert "nan" not in (tmp_path / f"tables/{name}.md").read_text().lower()
        latex = (tmp_path / f"tables/{name}.tex").read_text()
        assert not set("λ→²×−–") & set(latex)


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ("table2_ablation", "components"),
        ("table3_mlp", "mlp"),
        ("table7_r2_vs_k", "k"),
        ("table9_domain", "domain"),
        ("table17_loo_k", "k"),
        ("improved", "improved"),
    ],
)
def test_a_table_without_its_sweep_is_refused(tmp_path, table, name):
    left = {key: value for key, value in SWEPT_CONFIG["sweeps"].items() if key != name}
    results = replace(load(build_swept(tmp_path)), sweeps=left)
    with pytest.raises(KvferryError, match=rf"sweeps\.{name}: "):
        TABLES[table](results)


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ("table2_ablation", "components"),
        ("table3_mlp", "mlp"),
        ("table7_r2_vs_k", "k"),
        ("table8_calibration", "lambda"),
        ("table8_calibration", "sequences"),
        ("table8_calibration", "domain"),
        ("table9_domain", "domain"),
        ("table17_loo_k", "k"),
        ("improved", "improved"),
    ],
)
def test_a_table_of_a_sweep_without_variants_is_refused(tmp_path, table, name):
    results = load(build_swept(tmp_path), with_sweep(name, sweep(hellaswag=20)))
    with pytest.raises(KvferryError, match=rf"sweeps\.{name}: names no variants"):
        TABLES[table](results)


def test_ablation_goes_from_the_whole_recipe_to_the_source(tmp_path):
    frame = TABLES["table2_ablation"](load(build_swept(tmp_path)))
    assert frame["configuration"].tolist() == [
        "k=8, ridge, RoPE stripped",
        "RoPE not re-applied",
        "RoPE not re-applied, k=1, OLS",
        "target's own cache (ceiling)",
        "source alone",
    ]
    assert set(frame["hellaswag_n"]) == {20}
    assert frame["hellaswag"].tolist() == pytest.approx([75, 25, 10, 90, 60])
    low, high = wilson(5, 20)
    assert (frame.loc[1, "hellaswag_low"], frame.loc[1, "hellaswag_high"]) == pytest.approx((100 * low, 100 * high))
    assert frame.loc[1, "next_token_kl"] == pytest.approx(1.5)
    assert frame.loc[1, "top1_agreement"] == pytest.approx(75)
    mean = np.mean([item.score for item in perplexity_items(4.0)])
    assert frame.loc[1, "prefix_perplexity"] == pytest.approx(np.exp(mean))
    assert frame.loc[3:, ["next_token_kl", "top1_agreement"]].isna().all(axis=None)


def test_the_papers_ablation_stands_beside_its_own_pair_alone(tmp_path):
    frame = TABLES["table2_ablation"](load(build_swept(tmp_path), pairs=PAPER_PAIRS))
    assert frame["hellaswag_paper"].tolist() == [80.70, 75.39, 62.26, 82.65, 78.87]
    assert frame["prefix_perplexity_paper"].tolist() == [7.33, 7.70, 9.86, 6.79, 7.63]
    others = {PAIR: PAPER_PAIRS[PAIR] | {"paper": "Qwen3 8B→32B"}}
    assert TABLES["table2_ablation"](load(tmp_path, pairs=others))["hellaswag_paper"].isna().all()


def test_mlp_against_ridge_with_the_same_k(tmp_path):
    frame = TABLES["table3_mlp"](load(build_swept(tmp_path), pairs=PAPER_PAIRS))
    assert frame["system"].tolist() == ["ridge_k8", "mlp_k8"]
    assert frame["hellaswag_retention"].tolist() == pytest.approx([100 * 15 / 18, 100 * 17 / 18])
    assert frame["hellaswag_retention_paper"].tolist() == [97.6, 97.3]
    assert frame["hellaswag_retention_n"].tolist() == [20, 20]
    assert frame.loc[0, "hellaswag_vs_ridge"] is None
    assert frame.loc[1, "hellaswag_vs_ridge"] == pytest.approx(100 * 2 / 18)
    assert frame.loc[1, "hellaswag_vs_ridge_low"] >= 0
    assert frame.loc[1, "next_token_kl_vs_ridge"] == pytest.approx(-0.05)
    assert frame["r2_v_held_out"].tolist() == [-0.5, -0.5]


def test_retention_of_a_target_that_is_never_right_is_undefined_in_both_rows(tmp_path):
    write_native(build_swept(tmp_path), "big", "hellaswag", accuracy_items(0))
    frame = TABLES["table3_mlp"](load(tmp_path))
    assert frame["hellaswag_retention"].tolist() == ["undefined"] * 2
    assert (frame.loc[1, "hellaswag_vs_ridge"], frame.loc[1, "hellaswag_vs_ridge_low"]) == ("undefined", None)
    assert frame.loc[1, "hellaswag_vs_ridge_reason"] == "the target scores 0"


def test_mlp_takes_the_headline_where_the_sweep_has_no_ridge_and_refuses_a_sweep_without_mlp(tmp_path):
    build_swept(tmp_path)
    frame = TABLES["table3_mlp"](load(tmp_path, with_sweep("mlp", sweep("mlp_k8", hellaswag=20))))
    assert frame["system"].tolist() == ["ridge_k8", "mlp_k8"]
    frame = TABLES["table3_mlp"](load(tmp_path, with_sweep("mlp", sweep("k2", "mlp_k8"))))
    assert (frame["system"].tolist(), "hellaswag_retention" in frame) == (["ridge_k8", "mlp_k8"], False)
    with pytest.raises(KvferryError, match=r"sweeps\.mlp: compares ridge with method mlp"):
        TABLES["table3_mlp"](load(tmp_path, with_sweep("mlp", sweep("ridge_k8", "k2"))))


def test_r2_by_ascending_k_with_its_share_of_all_layers(tmp_path):
    frame = TABLES["table7_r2_vs_k"](load(build_swept(tmp_path), pairs=PAPER_PAIRS))
    assert frame["k"].tolist() == [1, 2, 8, FULL]
    assert frame["r2_k_in_sample"].tolist() == pytest.approx([1 / 30, 2 / 30, 8 / 30, 24 / 30])
    assert frame["r2_k_in_sample_of_all"].tolist() == pytest.approx([100 / 24, 200 / 24, 800 / 24, 100])
    assert frame["r2_k_held_out_of_all"].tolist() == pytest.approx([12.5, 25, 100, 100])
    assert frame["r2_v_held_out_of_all"].tolist() == ["undefined"] * 4
    assert set(frame["r2_v_held_out_of_all_reason"]) == {"the R² with all source layers is not above 0"}
    assert frame["p_over_n"].tolist() == [192 * k / 32768 for k in (1, 2, 8, FULL)]
    assert frame["r2_v_in_sample_paper"].tolist() == [0.3249, None, 0.6541, None]


def test_no_share_without_a_mapper_of_all_layers(tmp_path):
    config = with_sweep("k", sweep("ridge_k8", "k2"))
    frame = TABLES["table7_r2_vs_k"](load(build_swept(tmp_path), config))
    assert frame["k"].tolist() == [2, 8]
    assert set(frame["r2_k_in_sample_of_all"]) == {"undefined"}
    shown, notes = readable(frame)
    assert shown["R² K in sample, % of all layers"].tolist() == ["undefined (a)"] * 2
    assert notes == ["(a) undefined: the sweep has no variant with all source layers."]


def test_settings_are_shown_in_full_with_the_scale_that_matters(tmp_path):
    frame = TABLES["table8_calibration"](load(build_swept(tmp_path), pairs=PAPER_PAIRS))
    assert list(zip(frame["varied"], frame["setting"], frame["scale"], strict=True)) == [
        ("lambda", "0", "none"),
        ("lambda", "0.0001", "trace"),
        ("lambda", "0.01", "token"),
        ("sequences", "100", "token"),
        ("sequences", "64", "token"),
        ("domain", "prose", "token"),
        ("domain", "CodeAlpaca", "token"),
    ]
    assert frame["hellaswag_paper"].tolist() == [80.86, 80.88, 80.73, 79.72, None, None, 75.46]
    assert frame["hellaswag"][:3].isna().all()
    assert frame["hellaswag"][3:].tolist() == pytest.approx([70, 75, 75, 60])
    assert row(frame, varied="domain", system="code")["next_token_kl"] == pytest.approx(0.4)


def test_the_papers_calibration_needs_the_same_k(tmp_path):
    others = {PAIR: PAPER_PAIRS[PAIR] | {"paper": "Qwen3 8B→32B"}}
    frame = TABLES["table8_calibration"](load(build_swept(tmp_path), pairs=others))
    assert frame["hellaswag_paper"].isna().all()


def test_domains_without_a_benchmark_have_no_mean(tmp_path):
    results = load(build_swept(tmp_path), with_sweep("domain", sweep("ridge_k8", "code")), pairs=PAPER_PAIRS)
    frame = TABLES["table9_domain"](results)
    assert (frame["mean"].tolist(), frame["mean_paper"].tolist()) == (["undefined"] * 2, [None] * 2)


def test_domains_with_their_mean(tmp_path):
    frame = TABLES["table9_domain"](load(build_swept(tmp_path), pairs=PAPER_PAIRS))
    code = row(frame, domain="CodeAlpaca")
    assert (code["arc_challenge"], code["hellaswag"], code["mean"]) == pytest.approx((60, 60, 60))
    assert code["mean_low"] < 60 < code["mean_high"]
    assert (code["arc_challenge_paper"], code["mean_paper"]) == (56.23, pytest.approx((56.23 + 75.46) / 2))
    assert row(frame, domain="prose")["mean_paper"] is None


def by_k(root, **scores):
    """Right answers of 20 by benchmark, for k = 1, 2, 8 and all."""
    for benchmark, correct in scores.items():
        for name, right in zip(("ridge_k1", "k2", "ridge_k8", "all"), correct, strict=True):
            write_transfer(root, name, benchmark, few_items(right))


def test_k_is_chosen_by_the_mean_with_near_ties_to_the_larger(tmp_path):
    build_swept(tmp_path)
    # Means: 40, 60, 60 and 50 percent; without MMLU k = 2 leads, without HellaSwag k = 8, without ARC-C both are equal.
    by_k(tmp_path, arc_challenge=(8, 12, 12, 10), hellaswag=(8, 14, 10, 10), mmlu=(8, 10, 14, 10))
    (found,) = TABLES["table17_loo_k"](load(tmp_path)).to_dict("records")
    assert [found[name] for name in ("k", "k_without_hellaswag", "k_without_mmlu", "k_without_arc_challenge")] == [
        8,
        8,
        2,
        8,
    ]
    assert found["largest_move_pp"] == 0
    assert found["k_by_kl"] == 8
    assert found["items"] == "HellaSwag 20, MMLU 20, ARC-C 20"
    assert found["chunks"] == 24
    assert found["mean_accuracy"] == pytest.approx(60)
    assert found["mean_accuracy_low"] < 60 < found["mean_accuracy_high"]


def test_the_largest_move_is_of_the_mean_over_all_benchmarks(tmp_path):
    build_swept(tmp_path)
    by_k(tmp_path, arc_challenge=(10, 10, 10, 10), hellaswag=(4, 4, 16, 4), mmlu=(10, 12, 8, 9))
    write_transfer(tmp_path, "k2", "next_token_kl", [Item(f"chunk-{i}-ab", 0.05, 256.0) for i in range(24)])
    (found,) = TABLES["table17_loo_k"](load(tmp_path)).to_dict("records")
    assert (found["k"], found["k_without_hellaswag"]) == (8, 2)
    assert found["largest_move_pp"] == pytest.approx(100 * (34 - 26) / 60)
    assert found["k_by_kl"] == 2
    assert found["mean_accuracy_by_kl"] == pytest.approx(100 * 26 / 60)


def test_choices_without_their_benchmarks_are_undefined(tmp_path):
    build_swept(tmp_path)
    config = with_sweep("k", sweep("ridge_k8", "k2", hellaswag=20))
    (found,) = TABLES["table17_loo_k"](load(tmp_path, config)).to_dict("records")
    assert found["k"] == 8
    for name, reason in (
        ("k_without_hellaswag", "no benchmark is left to choose by"),
        ("k_without_mmlu", "the sweep did not run MMLU"),
        ("largest_move_pp", "no benchmark is left to choose by"),
    ):
        assert (found[name], found[f"{name}_reason"]) == ("undefined", reason)
    (found,) = TABLES["table17_loo_k"](load(tmp_path, with_sweep("k", sweep("ridge_k8", "k2")))).to_dict("records")
    assert (found["k"], found["k_by_kl"], found["mean_accuracy"]) == ("undefined", 8, "undefined")


def test_the_papers_choice_stands_beside_ours(tmp_path):
    (found,) = TABLES["table17_loo_k"](load(build_swept(tmp_path), pairs=PAPER_PAIRS)).to_dict("records")
    assert (found["k_paper"], found["k_without_mmlu_paper"], found["largest_move_pp_paper"]) == (8, 10, 0.61)


def test_tables_of_all_systems_have_variants_on_their_own_items(tmp_path):
    results = load(build_swept(tmp_path))
    assert TABLES["table12_size"](results)["system"].tolist() == list(SWEPT_CONFIG["variants"])
    gap = row(TABLES["gap_recovered"](results), system="k2", benchmark="hellaswag")
    assert (gap["n"], gap["value"], gap["source"], gap["target"]) == (20, 65, 60, 90)
    assert gap["gap_recovered"] == pytest.approx(100 / 6)
    assert row(TABLES["gap_recovered"](results), system="ridge_k8", benchmark="hellaswag")["n"] == 100
    score = row(TABLES["table13_accuracy"](results), system="unturned")
    assert (score["hellaswag"], score["hellaswag_n"], score["mmlu"]) == (25, 20, None)


def test_accuracy_and_gap_show_the_same_systems(tmp_path):
    results = load(build_swept(tmp_path))
    shown = results.systems(PAIR)
    assert TABLES["table13_accuracy"](results)["system"].tolist() == ["alone", "own cache injected", "alone", *shown]
    assert list(dict.fromkeys(TABLES["gap_recovered"](results)["system"])) == shown
    left_out = [name for name in results.variants_of(PAIR) if name not in shown]
    elsewhere = [TABLES[table](results)["system"] for table in ("table8_calibration", "table9_domain", "improved")]
    assert set(left_out) == {"lambda_0", "lambda_tiny", "few", "code", "head4", "small", "tempting"}
    assert set(left_out) <= set(pd.concat(elsewhere))


def test_the_paper_is_looked_up_by_numbers_and_words():
    paper = Paper()
    assert paper.where("table8", "hellaswag", pair="Qwen3 14B→32B", varied="lambda", setting="0.0001") == 80.88
    assert paper.where("table9", "mmlu", domain="fineweb-edu") == 78.07
    assert paper.where("table9", "mmlu", domain="prose") is None
    assert paper.where("table7", "r2_k", pair="Qwen3 14B→32B", k=8) == 0.7914
