"""Gathering results from disk; `build` writes a small made-up results root that the other report tests use as well."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvferry.errors import KvferryError
from kvferry.files import SEAL
from kvferry.records import Item, Record
from kvferry.report.inputs import Pair, Results, read_probe

CHANCE = {"arc_challenge": 0.25, "hellaswag": 0.25, "winogrande": 0.5, "mmlu": 0.25, "gsm8k": 0.0}
# Right answers out of 100: the target, a source that is clearly worse, and a transfer in between.
CORRECT = {"big": 90, "small": 60, "ridge_k8": 75}
NATS = {"big": 2.5, "small": 3.2, "ridge_k8": 2.6, "ridge_k1": 2.9, "zero_cache": 5.0}
KL = {"ridge_k8": 0.2, "ridge_k1": 0.5, "zero_cache": 2.0}
METRICS = {"prefix_perplexity": "perplexity", "next_token_kl": "kl", "top1_agreement": "agreement"}
METRICS |= {"apply_time": "ms_per_1024_tokens"}
CONFIG = {
    "pairs": ["small-to-big"],
    "variants": {"ridge_k8": {}, "ridge_k1": {}},
    "headline": "ridge_k8",
    "sweeps": {"others": {"pairs": ["small-to-big"], "variants": ["ridge_k1"], "benchmarks": {}}},
    "evaluation": {
        "full": False,
        "systems_a_job": 18,
        "benchmarks": {name: {"limit": 100, "shards": 1} for name in CHANCE},
    },
    "statistics": {"bootstrap": 400, "seed": 0},
}
PAIRS = {"small-to-big": {"source": "small", "target": "big"}}
PAPER_PAIRS = {"small-to-big": {"source": "small", "target": "big", "paper": "Qwen3 14B→32B"}}


def only(*benchmarks):
    """The configuration with these benchmarks alone."""
    return CONFIG | {
        "evaluation": CONFIG["evaluation"] | {"benchmarks": {name: {"limit": 100, "shards": 1} for name in benchmarks}}
    }


def accuracy_items(correct, n=100):
    """The first `correct` of `n` items are right, so that a better system is right wherever a worse one is."""
    return [Item(str(i), float(i < correct)) for i in range(n)]


def perplexity_items(nats, chunks=24):
    return [Item(f"chunk-{i}-ab", nats + 0.1 * np.sin(i), 256.0) for i in range(chunks)]


def chunk_items(even, odd, chunks=24):
    """One score in even-numbered chunks and another in odd ones."""
    return [Item(f"chunk-{i}-ab", odd if i % 2 else even, 256.0) for i in range(chunks)]


def write_record(root, place, items, **fields):
    benchmark = Path(place).stem
    record = Record(
        benchmark=benchmark,
        metric=METRICS.get(benchmark, "acc"),
        items=items,
        chance=CHANCE.get(benchmark),
        settings={"num_fewshot": 0, "task_version": 1.0, "items_total": 1000},
        data={"origin": "wheel", "sha256": "ab"},
        **({"system": "native", "target": "big"} | fields),
    )
    record.write(root / "records" / place)


def write_native(root, model, benchmark, items, system="native"):
    write_record(root, f"{system}/{model}/{benchmark}.json", items, system=system, target=model)


def write_transfer(root, system, benchmark, items):
    place = f"pairs/small-to-big/{system}/{benchmark}.json"
    write_record(root, place, items, system=system, source="small", pair="small-to-big")


def write_measures(root, system, nats, kl, agreement=0.75):
    """The records that every system of a pair has, and the times of a mapper."""
    write_transfer(root, system, "prefix_perplexity", perplexity_items(nats))
    for name, value in (("next_token_kl", kl), ("top1_agreement", agreement)):
        write_transfer(root, system, name, value if isinstance(value, list) else chunk_items(value, value))
    if system != "zero_cache":
        write_transfer(root, system, "apply_time", [Item(f"trial-{i}", ms) for i, ms in enumerate((2.0, 90.0, 3.0))])


def unsealed(path):
    """What a file says, without the seal that it would not bear after a change."""
    return {key: value for key, value in json.loads(path.read_text()).items() if key != SEAL}


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def build(root):
    """A results root with one pair, two variants, the zero cache and the injected control of the target."""
    for model, layers, parameters in (("small", 24, 100_000), ("big", 30, 150_000)):
        card = {"model": model, "layers": layers, "kv_heads": 3, "head_dim": 64, "parameters": parameters}
        write_json(root / f"models/{model}/card.json", card)
        write_native(root, model, "prefix_perplexity", perplexity_items(NATS[model]))
        for name in CHANCE:
            write_native(root, model, name, accuracy_items(CORRECT[model]))
    for name in CHANCE:
        write_native(root, "big", name, accuracy_items(CORRECT["big"]), system="native_injected")
        write_transfer(root, "ridge_k8", name, accuracy_items(CORRECT["ridge_k8"]))
    for name, items in (
        ("prefix_perplexity", perplexity_items(NATS["big"])),
        ("next_token_kl", chunk_items(0.0, 0.0)),
        ("top1_agreement", chunk_items(1.0, 1.0)),
    ):
        write_native(root, "big", name, items, system="native_injected")
    for system in ("ridge_k8", "ridge_k1", "zero_cache"):
        write_measures(root, system, NATS[system], KL[system])
    for k in (8, 1):
        write_json(root / f"pairs/small-to-big/mappers/ridge_k{k}/manifest.json", manifest(k))
    return root


def recipe(**changes):
    plain = {
        "method": "ridge",
        "k": 8,
        "lambda": 0.01,
        "lambda_scale": "token",
        "rope": "stripped",
        "support": "all_heads",
    }
    plain |= {"row_weights": "uniform", "sink_positions": 4, "sink_weight": 16.0, "dtype": "float32"}
    plain |= {"corpus": "prose", "sequences": 64, "native_head": 0, "head_rows": "kept"}
    return plain | changes


def manifest(k, **changes):
    return {
        "recipe": recipe(k=k, **changes),
        "selected_layers": [list(range(k))] * 30,
        "parameters": 3000 * k,
        "weights_bytes": 12000 * k,
        "rows": 32768,
        "features": 192 * k,
        "r2": {"in_sample": {"k": [0.8, 0.6], "v": [0.5, 0.3]}, "held_out": {"k": [0.7, 0.5], "v": [0.4, 0.2]}},
        "held_out_rows": 8192,
    }


def test_load_reads_all_and_keeps_the_order_of_the_configuration(tmp_path):
    results = Results.load(build(tmp_path), CONFIG, PAIRS)
    assert results.pairs == [Pair("small-to-big", "small", "big")]
    assert results.models == ["big", "small"]
    assert results.systems("small-to-big") == ["ridge_k8", "ridge_k1", "zero_cache"]
    assert results.k("small-to-big", "ridge_k8") == 8
    assert results.native["big", "mmlu"].value == 0.9


def test_what_the_configuration_does_not_name_is_left_alone(tmp_path):
    config = only("mmlu") | {"variants": {"ridge_k8": {}}, "sweeps": {}}
    results = Results.load(build(tmp_path), config, PAIRS)
    assert results.benchmarks == ["mmlu"]
    assert results.systems("small-to-big") == ["ridge_k8", "zero_cache"]


@pytest.mark.parametrize(
    "record", ["native/small/mmlu", "native_injected/big/next_token_kl", "pairs/small-to-big/zero_cache/next_token_kl"]
)
def test_no_record_may_be_absent(record, tmp_path):
    build(tmp_path)
    (tmp_path / f"records/{record}.json").unlink()
    with pytest.raises(KvferryError, match=rf"{record}\.json: the record is missing"):
        Results.load(tmp_path, CONFIG, PAIRS)


def test_a_record_in_the_wrong_place_is_refused(tmp_path):
    build(tmp_path)
    records = tmp_path / "records/native"
    (records / "small/mmlu.json").write_text((records / "big/mmlu.json").read_text())
    with pytest.raises(KvferryError, match="target 'big' where 'small' belongs"):
        Results.load(tmp_path, CONFIG, PAIRS)


def test_a_manifest_without_a_field_is_refused(tmp_path):
    path = build(tmp_path) / "pairs/small-to-big/mappers/ridge_k1/manifest.json"
    write_json(path, {key: value for key, value in manifest(1).items() if key != "rows"})
    with pytest.raises(KvferryError, match=r"ridge_k1/manifest\.json: the manifest lacks rows"):
        Results.load(tmp_path, CONFIG, PAIRS)


def test_a_probe_without_a_column_is_refused(tmp_path):
    (tmp_path / "probe.csv").write_text("kind,source_layer,target_layer,n,p\nv,0,0,10,1\n")
    with pytest.raises(KvferryError, match="lacks the columns r2"):
        read_probe(tmp_path / "probe.csv")
