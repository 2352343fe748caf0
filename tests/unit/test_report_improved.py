"""The table of recipes beyond the paper: the choice sees the even chunks alone, and nothing that is shown does."""

import numpy as np
import pytest
from test_report_inputs import write_json, write_transfer
from test_report_sweeps import PAIR, SWEPT_CONFIG, build_swept, load, sweep, swept_manifest

from kvferry.errors import KvferryError
from kvferry.records import Item
from kvferry.report.tables import TABLES
from kvferry.report.tables.render import readable


def improved(root, config=SWEPT_CONFIG):
    return TABLES["improved"](load(root, config)).set_index("system")


def chunks(even, odd, count=24):
    return [Item(f"chunk-{i}-ab", odd if i % 2 else even, 256.0) for i in range(count)]


def test_rows_are_references_first_then_the_sweep(tmp_path):
    frame = improved(build_swept(tmp_path))
    assert frame.index.tolist() == ["target", "source alone", "ridge_k8", "head4", "small", "tempting", "mlp_k8"]
    recipe = frame.loc["small", ["native_head", "row_weights", "support", "k", "head_rows", "parameters"]]
    assert recipe.tolist() == [4, "uniform", "same_head", 1, "kept", 1000]
    assert (
        frame.loc[["target", "source alone"], ["k", "parameters", "next_token_kl", "apply_time"]].isna().all(axis=None)
    )


def test_the_choice_is_made_on_even_chunks_and_reported_on_odd_ones(tmp_path):
    frame = improved(build_swept(tmp_path))
    # On odd chunks `tempting` would win and `mlp_k8` has no closed form.
    assert frame["chosen"].dropna().to_dict() == {"head4": "best", "small": "best small"}
    assert frame.loc["head4", "next_token_kl_selection"] == pytest.approx(0.1)
    assert frame.loc["head4", "next_token_kl"] == pytest.approx(0.12)
    assert set(frame["next_token_kl_n"].dropna()) == {12}
    odd = [2.5 + 0.1 * np.sin(i) for i in range(1, 24, 2)]
    assert frame.loc["head4", "prefix_perplexity"] == pytest.approx(np.exp(np.mean(odd)))
    assert frame.loc["target", "prefix_perplexity"] == pytest.approx(np.exp(np.mean(odd)))
    assert frame.loc["head4", "next_token_kl_vs_headline"] == pytest.approx(-0.08)


def test_the_choice_ignores_odd_chunks_and_benchmarks(tmp_path):
    before = improved(build_swept(tmp_path))["chosen"].to_dict()
    write_transfer(tmp_path, "head4", "next_token_kl", chunks(0.1, 9.0))
    for benchmark in ("hellaswag", "arc_challenge"):
        write_transfer(tmp_path, "head4", benchmark, [Item(str(5 * i), 0.0) for i in range(20)])
    assert improved(tmp_path)["chosen"].to_dict() == before
    write_transfer(tmp_path, "head4", "next_token_kl", chunks(9.0, 0.1))
    assert improved(tmp_path)["chosen"].dropna().to_dict() == {"small": "best, best small"}


def test_the_headline_may_be_best_and_a_small_recipe_may_be_missing(tmp_path):
    build_swept(tmp_path)
    write_json(tmp_path / f"pairs/{PAIR}/mappers/small/manifest.json", swept_manifest(8, {"native_head": 4}))
    write_transfer(tmp_path, "ridge_k8", "next_token_kl", chunks(0.01, 0.2))
    assert improved(tmp_path)["chosen"].dropna().to_dict() == {"ridge_k8": "best"}


def test_a_quarter_of_the_parameters_is_small_and_equal_kl_goes_to_the_smaller(tmp_path):
    build_swept(tmp_path)
    for name, parameters in (("small", 6000), ("tempting", 6001)):
        own = swept_manifest(8, {"native_head": 4}) | {"parameters": parameters}
        write_json(tmp_path / f"pairs/{PAIR}/mappers/{name}/manifest.json", own)
    for name in ("small", "tempting", "head4"):
        write_transfer(tmp_path, name, "next_token_kl", chunks(0.1, 0.1))
    assert improved(tmp_path)["chosen"].dropna().to_dict() == {"small": "best, best small"}
    write_transfer(tmp_path, "small", "next_token_kl", chunks(0.11, 0.1))
    assert improved(tmp_path)["chosen"].dropna().to_dict() == {"tempting": "best", "small": "best small"}


def test_gains_are_paired_differences_to_the_headline_on_the_same_items(tmp_path):
    frame = improved(build_swept(tmp_path))
    assert set(frame["hellaswag_n"]) == {20}
    assert frame.loc["ridge_k8", "hellaswag"] == pytest.approx(75)
    assert frame.loc["head4", "hellaswag_vs_headline"] == pytest.approx(5)
    assert frame.loc["head4", "hellaswag_vs_headline_low"] == 0
    assert frame.loc["ridge_k8", "hellaswag_vs_headline"] is None
    assert frame.loc["small", "arc_challenge_vs_headline"] == pytest.approx(-5)


def test_apply_time_is_the_median_over_trials(tmp_path):
    frame = improved(build_swept(tmp_path))
    assert (frame.loc["head4", "apply_time"], frame.loc["head4", "apply_time_n"]) == (3.0, 3)
    shown, _ = readable(frame.reset_index())
    assert "apply, ms/1,024 tokens (n=3)" in shown.columns
    assert "ARC-C − headline" in shown.columns


def test_one_chunk_cannot_be_halved(tmp_path):
    build_swept(tmp_path)
    for name in ("ridge_k8", "head4"):
        write_transfer(tmp_path, name, "next_token_kl", chunks(0.1, 0.1, count=1))
    config = SWEPT_CONFIG | {"sweeps": SWEPT_CONFIG["sweeps"] | {"improved": sweep("head4")}}
    with pytest.raises(KvferryError, match=r"perplexity\.chunks"):
        improved(tmp_path, config)
