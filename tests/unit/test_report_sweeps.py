"""Sweeps: what is loaded for them and on which items they are compared; `build_swept` writes results that other tests use too."""

import itertools
import shutil
from dataclasses import replace

import numpy as np
import pytest
from test_report_inputs import (
    CONFIG,
    PAIRS,
    accuracy_items,
    build,
    manifest,
    write_json,
    write_measures,
    write_native,
    write_transfer,
)

from kvferry.errors import KvferryError
from kvferry.records import Item, read_record
from kvferry.report import compare
from kvferry.report.inputs import Results
from kvferry.report.items import TARGET, aligned_scores, every_other_chunk, limited, record_of, shared_items

PAIR = "small-to-big"
FULL = 24  # layers of the source
PAPERS_MLP = {"width": 1024, "epochs": 20, "batch": 4096, "learning_rate": 0.001, "patience": 0, "seed": 0}
# name: (k, other parts of the recipe, right answers of 20, nats a token, KL in even chunks, KL in odd chunks)
SWEPT = {
    "k2": (2, {}, 13, 2.8, 0.3, 0.3),
    "all": (FULL, {}, 15, 2.7, 0.25, 0.25),
    "unturned": (8, {"rope": "not_reapplied"}, 5, 4.0, 1.5, 1.5),
    "unturned_k1_ols": (1, {"rope": "not_reapplied", "method": "ols", "lambda": 0.0}, 2, 5.0, 2.5, 2.5),
    "mlp_k8": (8, {"method": "mlp", "lambda": 0.0, "mlp": PAPERS_MLP}, 17, 2.55, 0.15, 0.15),
    "lambda_0": (8, {"lambda": 0.0, "lambda_scale": "sum"}, 15, 2.6, 0.2, 0.2),
    "lambda_tiny": (8, {"lambda": 1e-4, "lambda_scale": "trace"}, 15, 2.6, 0.2, 0.2),
    "few": (8, {"sequences": 100}, 14, 2.7, 0.3, 0.3),
    "code": (8, {"corpus": "CodeAlpaca"}, 12, 2.9, 0.4, 0.4),
    "head4": (8, {"native_head": 4, "row_weights": "sink"}, 16, 2.5, 0.1, 0.12),
    "small": (1, {"native_head": 4, "support": "same_head"}, 14, 2.6, 0.18, 0.3),
    "tempting": (8, {"native_head": 16}, 18, 2.4, 0.19, 0.01),
}


def sweep(*variants, **limits):
    return {"pairs": [PAIR], "variants": list(variants), "benchmarks": {n: {"limit": m} for n, m in limits.items()}}


THREE = {"arc_challenge": 20, "hellaswag": 20, "mmlu": 20}
SWEPT_CONFIG = CONFIG | {
    "variants": {name: {} for name in (*CONFIG["variants"], *SWEPT)},
    "sweeps": {
        "k": sweep("all", "ridge_k1", "k2", "ridge_k8", **THREE),
        "components": sweep("ridge_k8", "unturned", "unturned_k1_ols", hellaswag=20),
        "mlp": sweep("ridge_k8", "mlp_k8", hellaswag=20),
        "lambda": sweep("lambda_0", "lambda_tiny", "ridge_k8"),
        "sequences": sweep("few", "ridge_k8", hellaswag=20),
        "domain": sweep("ridge_k8", "code", hellaswag=20, arc_challenge=20),
        "improved": sweep("head4", "small", "tempting", "mlp_k8", hellaswag=20, arc_challenge=20),
    },
    "greedy": {"pairs": [PAIR], "target_layers": 9, "steps": 8},
}


def few_items(correct, n=20):
    """Every fifth of the hundred items that others answer; the first `correct` are right."""
    return [Item(str(5 * i), float(i < correct)) for i in range(n)]


def swept_manifest(k, changes):
    """R² rises with k in sample, and held out falls beyond 8."""
    quality = {"in_sample": {"k": [k / 30], "v": [k / 40]}, "held_out": {"k": [min(k, 8) / 30], "v": [-0.5]}}
    own = manifest(k, **changes) | {"r2": quality}
    return own | ({"parameters": own["parameters"] // 3} if changes.get("support") == "same_head" else {})


def build_swept(root):
    """The results of `build` and of every variant of the sweeps above, which answered 20 of the 100 items."""
    build(root)
    for name, (k, changes, correct, nats, even, odd) in SWEPT.items():
        write_json(root / f"pairs/{PAIR}/mappers/{name}/manifest.json", swept_manifest(k, changes))
        write_measures(root, name, nats, [Item(f"chunk-{i}-ab", odd if i % 2 else even, 256.0) for i in range(24)])
        for benchmark in THREE:
            write_transfer(root, name, benchmark, few_items(correct))
    for benchmark in THREE:
        write_transfer(root, "ridge_k1", benchmark, few_items(10))
    for name in ("ridge_k8", "ridge_k1"):
        k = int(name.removeprefix("ridge_k"))
        write_json(root / f"pairs/{PAIR}/mappers/{name}/manifest.json", swept_manifest(k, {}))
    return root


def load(root, config=SWEPT_CONFIG, pairs=PAIRS):
    return Results.load(root, config, pairs)


def test_sweeps_have_their_records_and_manifests(tmp_path):
    results = load(build_swept(tmp_path))
    assert results.sweep("components").variants == ["ridge_k8", "unturned", "unturned_k1_ols"]
    assert results.sweep("domain").benchmarks == ["arc_challenge", "hellaswag"]
    assert results.transfers[PAIR, "code", "hellaswag"].n == 20
    assert results.transfers[PAIR, "head4", "apply_time"].n == 3
    assert (PAIR, "code", "mmlu") not in results.transfers
    assert results.variants_of(PAIR) == list(SWEPT_CONFIG["variants"])


def test_a_variant_is_loaded_for_the_pairs_of_its_sweeps_alone(tmp_path):
    pairs = PAIRS | {"again": PAIRS[PAIR]}
    config = SWEPT_CONFIG | {"pairs": [PAIR, "again"]}
    build_swept(tmp_path)
    shutil.copytree(tmp_path / "pairs" / PAIR / "mappers/ridge_k8", tmp_path / "pairs/again/mappers/ridge_k8")
    own = tmp_path / "records/pairs" / PAIR
    for path in (*own.glob("ridge_k8/*.json"), *own.glob("zero_cache/*.json")):
        replace(read_record(path), pair="again").write(own.with_name("again") / path.relative_to(own))
    results = load(tmp_path, config, pairs)
    assert results.variants_of("again") == ["ridge_k8"]
    assert results.systems("again") == ["ridge_k8", "zero_cache"]
    assert [pair.name for pair in results.pairs_of(results.sweep("k"))] == [PAIR]


@pytest.mark.parametrize(
    "place",
    [
        f"records/pairs/{PAIR}/few/hellaswag.json",
        f"records/pairs/{PAIR}/few/next_token_kl.json",
        f"records/pairs/{PAIR}/head4/apply_time.json",
        f"records/pairs/{PAIR}/ridge_k8/top1_agreement.json",
    ],
)
def test_a_missing_record_is_named(tmp_path, place):
    (build_swept(tmp_path) / place).unlink()
    with pytest.raises(KvferryError, match=f"{place}: the record is missing; run its evaluation first"):
        load(tmp_path)


def test_a_sweep_that_is_not_configured_is_refused(tmp_path):
    with pytest.raises(KvferryError, match=r"sweeps\.mlp: this configuration has no such sweep"):
        load(build(tmp_path), CONFIG).sweep("mlp")


def test_a_sweep_without_variants_is_refused_when_it_is_asked_for(tmp_path):
    results = load(build(tmp_path), CONFIG | {"sweeps": {"k": sweep(hellaswag=20)}})
    with pytest.raises(KvferryError, match=r"sweeps\.k: names no variants"):
        results.sweep("k")


def test_tables_of_all_systems_leave_out_what_has_a_table_of_its_own(tmp_path):
    found = load(build_swept(tmp_path)).systems(PAIR)
    assert found == ["ridge_k8", "ridge_k1", "k2", "all", "unturned", "unturned_k1_ols", "mlp_k8", "zero_cache"]


@pytest.mark.parametrize("name", ["others", "unlisted", "of_any_name"])
def test_variants_of_a_sweep_without_a_table_are_among_all_systems(tmp_path, name):
    config = SWEPT_CONFIG | {"sweeps": SWEPT_CONFIG["sweeps"] | {name: sweep("few", "head4")}}
    found = load(build_swept(tmp_path), config).systems(PAIR)
    assert set(found) - set(load(tmp_path).systems(PAIR)) == {"few", "head4"}
    assert found.index("few") < found.index("head4") < found.index("zero_cache")


def test_a_sweep_of_other_pairs_brings_nothing_into_the_tables_of_a_pair(tmp_path):
    elsewhere = sweep("few") | {"pairs": ["another"]}
    config = SWEPT_CONFIG | {"sweeps": SWEPT_CONFIG["sweeps"] | {"others": elsewhere}}
    assert "few" not in load(build_swept(tmp_path), config).systems(PAIR)


def test_a_smaller_sample_is_compared_on_its_own_items(tmp_path):
    results = load(build_swept(tmp_path))
    (pair,) = results.pairs
    target, source, own = compare.paired(results, pair, "code", "hellaswag")
    assert (target.value, source.value, own.value) == (18 / 20, 12 / 20, 12 / 20)
    assert compare.retention(results, pair, "code", "hellaswag").value == pytest.approx(12 / 18)


def test_shared_items_are_those_of_the_smallest_sample(tmp_path):
    build_swept(tmp_path)
    write_transfer(tmp_path, "few", "hellaswag", few_items(14, n=10))
    results = load(tmp_path)
    (pair,) = results.pairs
    items = shared_items(results, pair, ["ridge_k8", "few", TARGET, "code"], "hellaswag")
    assert items == {str(5 * i) for i in range(10)}
    assert limited(record_of(results, pair, "ridge_k8", "hellaswag")[1], items).n == 10


def test_samples_that_are_not_nested_are_refused_with_both_places(tmp_path):
    build_swept(tmp_path)
    write_transfer(tmp_path, "few", "hellaswag", accuracy_items(5, n=10))
    results = load(tmp_path)
    with pytest.raises(
        KvferryError, match=r"code/hellaswag\.json and .*few/hellaswag\.json: hellaswag was answered on"
    ):
        shared_items(results, results.pairs[0], ["ridge_k8", "code", "few"], "hellaswag")


def test_an_item_that_the_target_did_not_answer_is_refused(tmp_path):
    build_swept(tmp_path)
    write_native(tmp_path, "big", "hellaswag", accuracy_items(90, n=60))
    results = load(tmp_path)
    with pytest.raises(KvferryError, match=r"native/big/hellaswag\.json and .*few/hellaswag\.json"):
        compare.paired(results, results.pairs[0], "few", "hellaswag")


def test_scores_are_aligned_in_the_order_of_the_first_record(tmp_path):
    results = load(build_swept(tmp_path))
    (pair,) = results.pairs
    named = [record_of(results, pair, name, "hellaswag") for name in (TARGET, "few")]
    scores, weights = aligned_scores(named)
    assert scores.tolist() == [[1.0] * 18 + [0.0] * 2, [1.0] * 14 + [0.0] * 6]
    scores, _ = aligned_scores(named, frozenset({"95", "0"}))
    assert scores.tolist() == [[1.0, 0.0], [1.0, 0.0]]
    assert weights.tolist() == [1.0] * 20


def test_chunks_are_halved_by_their_number():
    items = frozenset(f"chunk-{i}-{i:02x}" for i in range(12))
    odd, even = every_other_chunk(items, 1), every_other_chunk(items, 0)
    assert odd | even == items
    assert odd == {f"chunk-{i}-{i:02x}" for i in (1, 3, 5, 7, 9, 11)}
    with pytest.raises(KvferryError, match=r"perplexity\.chunks: .* at least two"):
        every_other_chunk(frozenset({"chunk-0-a"}), 1)
    with pytest.raises(KvferryError, match="item '17' of a record is no chunk"):
        every_other_chunk(frozenset({"17"}), 1)


def test_what_is_gained_is_paired(tmp_path):
    results = load(build_swept(tmp_path))
    (pair,) = results.pairs
    same = compare.gained(results, pair, "lambda_0", "lambda_tiny", "next_token_kl")
    assert (same.value, same.interval()) == (0.0, (0.0, 0.0))
    items = frozenset(str(5 * i) for i in range(20))
    more = compare.gained(results, pair, "head4", "ridge_k8", "hellaswag", items)
    assert more.value == pytest.approx(1 / 20)
    # Head4 is right wherever the headline is, so no draw has it behind, however few items it is ahead on.
    assert more.interval()[0] == 0.0


def test_draws_do_not_depend_on_the_order_of_systems(tmp_path):
    results = load(build_swept(tmp_path))
    (pair,) = results.pairs
    draws = {
        names: dict(
            zip(names, compare.together(results, pair, names, "hellaswag", frozenset({"0", "95", "60"})), strict=True)
        )
        for names in itertools.permutations(("few", "code", "head4"))
    }
    first, *others = draws.values()
    assert all(np.array_equal(first[name].draws, other[name].draws) for other in others for name in first)
