"""Which tables and figures a config gives. Works on the checked config alone, so that a workflow can ask before anything is run.

Knows which sweep or section a table or figure is made from. Does not know how one is made, and imports nothing that is slow
to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COMPONENTS, MLP, BY_K, IMPROVED = "components", "mlp", "k", "improved"
LAMBDA, SEQUENCES, DOMAIN = "lambda", "sequences", "domain"
# Sweeps whose tables print the scores of their variants, so that tables of all systems need not repeat them.
SHOWN_APART = (LAMBDA, SEQUENCES, DOMAIN, IMPROVED)
FIVE = ("arc_challenge", "hellaswag", "winogrande", "mmlu", "gsm8k")  # benchmarks of the paper's averages
BARS = ("arc_challenge", "hellaswag", "mmlu")

# Optional sections of the config, which tables and figures are also made from.
CONTROLS, DIAGNOSTICS, COQA, LATENCY, NATIVE_TOKENS = "controls", "diagnostics", "coqa", "latency", "native_tokens"
SECTIONS = (CONTROLS, DIAGNOSTICS, COQA, LATENCY, NATIVE_TOKENS)
HELD_OUT = ("piqa", "boolq", "arc_easy")  # benchmarks that no choice was made on: table 18

# Tables in the order of the report, with the sweeps, sections or benchmarks of which any one is enough; () is always there.
TABLES: dict[str, tuple[str, ...]] = {
    "table1_retention": (),
    "table2_ablation": (COMPONENTS,),
    "table3_mlp": (MLP,),
    "table4_error_placement": (DIAGNOSTICS,),
    "table5_latency": (LATENCY,),
    "table6_methods": (),
    "table7_r2_vs_k": (BY_K,),
    "table8_calibration": (LAMBDA, SEQUENCES, DOMAIN),
    "table9_domain": (DOMAIN,),
    "table10_pairs": (),
    "table11_benchmarks": (),
    "table12_size": (),
    "table13_accuracy": (),
    "table14_anchors": FIVE,
    "table15_floor_normalised": (),
    "table16_latency_range": (LATENCY,),
    "table17_loo_k": (BY_K,),
    "table18_held_out": HELD_OUT,
    "gap_recovered": (),
    "improved": (IMPROVED,),
    "k_choice": (BY_K,),
    "controls": (CONTROLS,),
    "correlations": (DIAGNOSTICS,),
    "diagnostics_by_layer": (DIAGNOSTICS,),
    "coqa_drift": (COQA,),
    "native_tokens": (NATIVE_TOKENS,),
    "verdict": (),
    "reproduction": (),
    "provenance": (),
}


def tables_of(config: Mapping[str, Any]) -> list[str]:
    """Names of the tables; table 9 consists of benchmarks, so it needs a domain sweep that runs one."""
    there = _there(config)
    tables = [name for name, needed in TABLES.items() if not needed or not there.isdisjoint(needed)]
    has_domains = bool(config.get("sweeps", {}).get(DOMAIN, {}).get("benchmarks"))
    return [name for name in tables if name != "table9_domain" or has_domains]


def figures_of(config: Mapping[str, Any]) -> list[str]:
    """Names of the figures without a suffix: figure 2 once a pair, the others once a run."""
    there = _there(config)
    wanted = {
        "fig1_pipeline": True,
        "fig3_mapper": True,
        "fig4_coqa_drift": COQA in there,
        "fig5_greedy_r2": bool(config.get("greedy")),
        "fig6_accuracy_vs_k": BY_K in there,
        "fig7_component_removal": COMPONENTS in there,
        "fig8_retention": any(name in BARS for name in config["evaluation"]["benchmarks"]),
        "fig9_latency": LATENCY in there,
        "fig10_correlation": DIAGNOSTICS in there,
        "fig11_native_tokens": NATIVE_TOKENS in there,
    }
    return [f"fig2_r2_heatmap_{pair}" for pair in config["pairs"]] + [name for name, own in wanted.items() if own]


def _there(config: Mapping[str, Any]) -> set[str]:
    """Sweeps, optional sections and benchmarks of a config."""
    sections = {name for name in SECTIONS if config.get(name) is not None}
    return {
        *config.get("sweeps", {}),
        *sections,
        *config["evaluation"]["benchmarks"],
    }
