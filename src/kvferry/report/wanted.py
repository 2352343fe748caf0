"""Which tables and figures a config gives. Works on the checked config alone, so that a workflow can ask before anything is run.

Knows which sweep a table or figure is made from. Does not know how one is made, and imports nothing that is slow to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COMPONENTS, MLP, BY_K, IMPROVED = "components", "mlp", "k", "improved"
LAMBDA, SEQUENCES, DOMAIN = "lambda", "sequences", "domain"
# Sweeps whose tables print the scores of their variants, so that tables of all systems need not repeat them.
SHOWN_APART = (LAMBDA, SEQUENCES, DOMAIN, IMPROVED)
BARS = ("arc_challenge", "hellaswag", "mmlu")

# Tables in the order of the report, with the sweeps of which any one is enough; a table that needs none is always there.
TABLES: dict[str, tuple[str, ...]] = {
    "table1_retention": (),
    "table2_ablation": (COMPONENTS,),
    "table3_mlp": (MLP,),
    "table7_r2_vs_k": (BY_K,),
    "table8_calibration": (LAMBDA, SEQUENCES, DOMAIN),
    "table9_domain": (DOMAIN,),
    "table10_pairs": (),
    "table11_benchmarks": (),
    "table12_size": (),
    "table13_accuracy": (),
    "table15_floor_normalised": (),
    "table17_loo_k": (BY_K,),
    "gap_recovered": (),
    "improved": (IMPROVED,),
}


def tables_of(config: Mapping[str, Any]) -> list[str]:
    """Names of the tables; table 9 consists of benchmarks, so it needs a domain sweep that runs one."""
    sweeps = config.get("sweeps", {})
    tables = [name for name, needed in TABLES.items() if not needed or any(sweep in sweeps for sweep in needed)]
    has_domains = bool(sweeps.get(DOMAIN, {}).get("benchmarks"))
    return [name for name in tables if name != "table9_domain" or has_domains]


def figures_of(config: Mapping[str, Any]) -> list[str]:
    """Names of the figures without a suffix: figure 2 once a pair, the others once a run."""
    sweeps = config.get("sweeps", {})
    there = {
        "fig5_greedy_r2": bool(config.get("greedy")),
        "fig6_accuracy_vs_k": BY_K in sweeps,
        "fig7_component_removal": COMPONENTS in sweeps,
        "fig8_retention": any(name in BARS for name in config["evaluation"]["benchmarks"]),
    }
    return [f"fig2_r2_heatmap_{pair}" for pair in config["pairs"]] + [name for name, wanted in there.items() if wanted]
