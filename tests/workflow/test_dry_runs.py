"""The workflow as a user meets it, without running a job: every config resolves, and a wrong one stops with one sentence."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(file.name for file in (ROOT / "config").glob("*.yaml") if "pairs" in yaml.safe_load(file.read_text()))
# What the design promises of the paper's six pairs: every figure and table of the paper, and what stands beside it.
SIX = ("qwen3-14b-to-32b", "qwen3-8b-to-32b", "llama-3.1-8b-to-70b")
SIX += ("ministral-3-3b-to-8b", "ministral-3-3b-to-14b", "ministral-3-8b-to-14b")
FIGURES = ["fig1_pipeline", "fig3_mapper", "fig4_coqa_drift", "fig5_greedy_r2", "fig6_accuracy_vs_k"]
FIGURES += ["fig7_component_removal", "fig8_retention", "fig9_latency", *(f"fig2_r2_heatmap_{pair}" for pair in SIX)]
TABLES = ["table1_retention", "table2_ablation", "table3_mlp", "table4_error_placement", "table5_latency"]
TABLES += ["table6_methods", "table7_r2_vs_k", "table8_calibration", "table9_domain", "table10_pairs"]
TABLES += ["table11_benchmarks", "table12_size", "table13_accuracy", "table14_anchors", "table15_floor_normalised"]
TABLES += ["table16_latency_range", "table17_loo_k", "table18_held_out"]
TABLES += ["gap_recovered", "controls", "verdict", "reproduction", "provenance"]
PAPERS = {f"figures/paper/{name}.{kind}" for name in FIGURES for kind in ("pdf", "png", "csv")}
PAPERS |= {f"results/paper/tables/{name}.{kind}" for name in TABLES for kind in ("csv", "md", "tex")}
PAPERS |= {f"results/paper/verdict/{pair}.md" for pair in SIX} | {"results/paper/headline.txt"}
RUNS = [name for name in CONFIGS if name != "pairs.yaml"]


def dry_run(config: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "snakemake", "-n", "--cores", "2", "--configfile", str(config)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", RUNS)
def test_every_config_resolves(name):
    done = dry_run(ROOT / "config" / name)
    assert done.returncode == 0, done.stderr[-2000:]
    if name == "paper.yaml":
        assert outputs(done.stdout) >= PAPERS


def outputs(said: str) -> set[str]:
    """Every file that a dry run says it would write."""
    lines = [line.split(":", 1)[1] for line in said.splitlines() if line.strip().startswith("output:")]
    return {path.strip() for line in lines for path in line.split(",")}


def test_jobs_ask_for_the_gpus_and_the_memory_of_their_models(tmp_path):
    config = yaml.safe_load((ROOT / "config" / "small.yaml").read_text())
    config["compute"] |= {"source_device": "cuda:2", "target_device": ["cuda:0", "cuda:1"]}
    file = tmp_path / "apart.yaml"
    file.write_text(yaml.safe_dump(config))
    asked = {}
    for name, resources in re.findall(
        r"^rule (\S+):.*?^ +resources: (.*?)$", dry_run(file).stdout, re.DOTALL | re.MULTILINE
    ):
        numbers = dict(re.findall(r"(mem_mb|gpu)=(\d+)", resources))
        if len(numbers) == 2:
            asked.setdefault(name, []).append((int(numbers["mem_mb"]), int(numbers["gpu"])))
    gpus = {name: {count for _, count in own} for name, own in asked.items()}
    assert gpus["dump"] == gpus["evaluate_model_qwen3_8b_0"] == gpus["fit_qwen3_4b_to_8b_fineweb_edu_500"] == {1}
    assert gpus["evaluate_pair_qwen3_4b_to_8b_0"] == gpus["latency_qwen3_4b_to_8b"] == {3}
    weights = {"0_6b": 1200, "1_7b": 3400, "4b": 8000, "8b": 16400}
    for model, needed in weights.items():
        ((memory, _),) = asked[f"evaluate_model_qwen3_{model}_0"]
        assert max(needed, 1999) < memory < max(needed, 1999) + 1000
    assert sorted(memory for memory, _ in asked["dump"])[-1] > weights["8b"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pairs": ["24l-to-31l"]}, ["pairs", "24l-to-31l", "24l-to-30l"]),
        ({"variants": {"ridge_k8": {"method": "ridge", "k": 25, "lambda": 0.01}}}, ["variants.ridge_k8.k", "25"]),
        ({"variants": {"ridge_k8": {"method": "ridge", "k": 8, "lambda": -1}}}, ["variants.ridge_k8.lambda", "-1"]),
        (
            {"variants": {"ridge_k8": {"method": "ridge", "k": "eight", "lambda": 0.01}}},
            ["variants.ridge_k8.k", "eight"],
        ),
        ({"registries": {"models": "config/absent.yaml"}}, ["absent.yaml"]),
    ],
)
def test_a_wrong_config_stops_before_any_work_with_one_sentence(tmp_path, change, words):
    shipped = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
    apart = ("sweeps", "greedy", "controls", "coqa", "diagnostics", "latency", "native_tokens")
    config = {key: value for key, value in shipped.items() if key not in apart} | change
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump(config))
    done = dry_run(file)
    lines = [line for line in done.stderr.strip().splitlines() if "profile" not in line]
    assert done.returncode == 1
    assert len(lines) == 1, done.stderr
    assert all(word in lines[0] for word in words), lines[0]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["absent.yaml"]),
        ("pairs: [24l-to-30l", ["line"]),
        ("pairs: [a]\npairs: [b]\n", ["line 2", "'pairs'", "twice"]),
        ("", ["empty"]),
        ("- a list\n", ["list"]),
    ],
)
def test_make_asks_for_a_config_that_can_be_read_before_it_starts(tmp_path, text, words):
    file = tmp_path / "absent.yaml"
    if text is not None:
        file.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.config", str(file)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert str(file) in done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def test_a_config_that_is_right_names_its_results():
    command = [sys.executable, "-m", "kvferry.config", "config/ci.yaml"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout == "results/ci\n"
