"""Which tables and figures a config gives, without importing what draws them."""

import subprocess
import sys

import pytest
from test_report_inputs import CONFIG
from test_report_sweeps import SWEPT_CONFIG

from kvferry.report.figures import FIGURES
from kvferry.report.tables import TABLES
from kvferry.report.wanted import figures_of, tables_of

ALWAYS = [
    "table1_retention",
    "table6_methods",
    "table10_pairs",
    "table11_benchmarks",
    "table12_size",
    "table13_accuracy",
]
ALWAYS += ["table14_anchors", "table15_floor_normalised", "gap_recovered", "verdict", "reproduction", "provenance"]
FIXED = ["fig2_r2_heatmap_small-to-big", "fig1_pipeline", "fig3_mapper"]
SECTIONS = {name: {} for name in ("controls", "diagnostics", "coqa", "latency", "native_tokens")}


def only(**sweeps):
    return CONFIG | {"sweeps": {name: {"benchmarks": {run: {} for run in runs}} for name, runs in sweeps.items()}}


def test_without_sweeps_there_are_the_fixed_ones():
    assert tables_of(CONFIG) == ALWAYS
    assert figures_of(CONFIG) == [*FIXED, "fig8_retention"]


def test_with_all_sweeps_sections_and_benchmarks_there_is_everything():
    evaluation = SWEPT_CONFIG["evaluation"]
    benchmarks = evaluation["benchmarks"] | {"piqa": {"limit": 1}}
    config = SWEPT_CONFIG | SECTIONS | {"evaluation": evaluation | {"benchmarks": benchmarks}}
    assert tables_of(config) == list(TABLES)
    apart = {"fig2_r2_heatmap_small-to-big", "fig5_greedy_r2"}
    assert set(figures_of(config)) == apart | set(FIGURES)


@pytest.mark.parametrize(
    ("sweeps", "tables", "figures"),
    [
        ({"k": []}, {"table7_r2_vs_k", "table17_loo_k", "k_choice"}, {"fig6_accuracy_vs_k"}),
        ({"components": []}, {"table2_ablation"}, {"fig7_component_removal"}),
        ({"mlp": []}, {"table3_mlp"}, set()),
        ({"lambda": []}, {"table8_calibration"}, set()),
        ({"sequences": ["hellaswag"]}, {"table8_calibration"}, set()),
        ({"domain": []}, {"table8_calibration"}, set()),
        ({"domain": ["hellaswag"]}, {"table8_calibration", "table9_domain"}, set()),
        ({"improved": []}, {"improved"}, set()),
        ({"others": []}, set(), set()),
    ],
)
def test_each_sweep_gives_its_own(sweeps, tables, figures):
    assert set(tables_of(only(**sweeps))) - set(ALWAYS) == tables
    assert set(figures_of(only(**sweeps))) - set(figures_of(CONFIG)) == figures


def test_figure_8_needs_one_of_its_benchmarks():
    config = CONFIG | {"evaluation": {"benchmarks": {"gsm8k": {}, "winogrande": {}}}}
    assert figures_of(config) == FIXED


@pytest.mark.parametrize(
    ("section", "tables", "figures"),
    [
        ("controls", {"controls"}, set()),
        ("diagnostics", {"table4_error_placement", "correlations", "diagnostics_by_layer"}, {"fig10_correlation"}),
        ("coqa", {"coqa_drift"}, {"fig4_coqa_drift"}),
        ("latency", {"table5_latency", "table16_latency_range"}, {"fig9_latency"}),
        ("native_tokens", {"native_tokens"}, {"fig11_native_tokens"}),
    ],
)
def test_each_optional_section_gives_its_own(section, tables, figures):
    assert set(tables_of(CONFIG | {section: {}})) - set(ALWAYS) == tables
    assert set(figures_of(CONFIG | {section: {}})) - set(figures_of(CONFIG)) == figures


def test_without_any_of_the_five_there_are_no_anchors():
    config = CONFIG | {"evaluation": {"benchmarks": {"boolq": {}}}}
    assert "table14_anchors" not in tables_of(config)


def test_a_held_out_benchmark_gives_its_table():
    config = CONFIG | {"evaluation": {"benchmarks": {"boolq": {}}}}
    assert "table18_held_out" in tables_of(config)


def test_asking_is_cheap():
    code = "import sys, kvferry.report.wanted; print([m for m in ('torch', 'pandas', 'numpy', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
