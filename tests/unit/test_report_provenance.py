"""Provenance: every fact is that of the records, and records that differ are seen to."""

import json

import pytest
from test_report_inputs import CONFIG, PAIRS, build, write_json

from kvferry.records import APPLY_TIME
from kvferry.report.inputs import Results
from kvferry.report.tables.provenance import provenance


def edit(root, place, **fields):
    path = root / place
    write_json(path, json.loads(path.read_text()) | fields)


def facts(root, config=CONFIG):
    frame = provenance(Results.load(root, config, PAIRS))
    return {(row["what"], row["name"], row["value"]): row for row in frame.to_dict("records")}


def test_records_that_differ_have_a_row_each(tmp_path):
    # Without a sweep that shows times, none is read.
    records = sorted(path for path in (build(tmp_path) / "records").rglob("*.json") if path.stem != APPLY_TIME)
    for path in records:
        edit(tmp_path, path, versions={"torch": "2.1"}, commit="abc", settings={"device": "cpu"}, seeds={"items": 3})
    edit(tmp_path, "records/native/big/mmlu.json", versions={"torch": "2.2"}, commit="abc+changes")
    found = facts(tmp_path)
    for key in (("package", "torch", "2.1"), ("code", "commit", "abc")):
        assert found[key]["records"] == len(records) - 1
    assert found["package", "torch", "2.2"]["records"] == found["code", "commit", "abc+changes"]["records"] == 1
    assert found["machine and arithmetic", "device", "cpu"]["records"] == len(records)
    assert found["seed", "items", "3"]["records"] == len(records)
    assert found["machine and arithmetic", "threads", "not recorded"]["records"] == len(records)


def test_seconds_are_the_sum_of_a_stage_and_memory_its_peak(tmp_path):
    build(tmp_path)
    edit(tmp_path, "records/native/big/mmlu.json", seconds=2.5, peak_memory_bytes=3 * 2**30)
    edit(tmp_path, "records/pairs/small-to-big/ridge_k8/mmlu.json", seconds=4.0, peak_memory_bytes=2**30)
    edit(tmp_path, "records/pairs/small-to-big/ridge_k8/apply_time.json", seconds=1.0)
    improved = {"improved": {"pairs": ["small-to-big"], "variants": ["ridge_k1"], "benchmarks": {}}}
    found = facts(tmp_path, CONFIG | {"sweeps": improved})
    assert found["seconds", "benchmarks", 6.5]["detail"] == "peak memory of a process 3.0 GiB"
    assert found["seconds", "time of the mapper", 1.0]["records"] == 2


def test_models_data_and_calibration_are_named_by_their_hashes(tmp_path):
    build(tmp_path)
    edit(tmp_path, "models/big/card.json", weights_id="w1", origin="org/big at main", tokenizer_sha256="t1")
    edit(tmp_path, "records/native/big/mmlu.json", data={"origin": "rows", "sha256": "d1"})
    edit(tmp_path, "records/native/big/prefix_perplexity.json", data={"origin": "text", "tokens_sha256": "d2"})
    how = {"corpus": "prose", "sequences": 3, "held_out": 1, "length": 8, "stride": 2, "seed": 5}
    for name in ("ridge_k8", "ridge_k1"):
        edit(tmp_path, f"pairs/small-to-big/mappers/{name}/manifest.json", calibration=how, calibration_sha256="c1")
    found = facts(tmp_path)
    assert found["model", "big", "w1"]["detail"] == "org/big at main; 150,000 parameters, tokenizer t1"
    assert ("model", "small", "not recorded") in found
    assert found["data", "rows", "d1"]["detail"] == "mmlu"
    assert found["data", "text", "d2"]["detail"] == "prefix_perplexity"
    said = "prose, 3 + 1 held-out sequences of 8 tokens, stride 2, seed 5"
    assert found["calibration", "small-to-big", "c1"]["detail"] == said


@pytest.mark.parametrize("missing", ["calibration", "calibration_sha256"])
def test_a_manifest_that_does_not_say_has_no_row(tmp_path, missing):
    build(tmp_path)
    both = {"calibration": {"corpus": "x"}, "calibration_sha256": "c"}
    edit(
        tmp_path, "pairs/small-to-big/mappers/ridge_k8/manifest.json", **{k: v for k, v in both.items() if k != missing}
    )
    assert not [key for key in facts(tmp_path) if key[0] == "calibration"]
