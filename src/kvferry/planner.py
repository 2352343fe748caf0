"""What a run will need, before it is run: rows, disk, memory, arithmetic and mapper sizes of every pair of a config.

`python -m kvferry.planner [CONFIG] [--tflops N] [--fit-tflops N]` prints it, and what the run takes (plan_run); `--paper` prints
it for the paper's pairs with its own k and calibration, beside the sizes that it prints (Table 12), without the run.
From geometries alone: loads no model, and does not know how long a machine takes for the arithmetic. Moments are planned as the
run sums them: once over all columns for every recipe that can be cut from them, or else once for all recipes that share systems.
Solutions and mappers are those of a recipe alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from kvferry.columns import aligned, figure
from kvferry.config import Geometry, Project, load_project, read_yaml
from kvferry.devices import SIZE_OF
from kvferry.errors import KvferryError
from kvferry.fit.budget import MB, Choice, Sums, choice_of, fits_full, rows_in
from kvferry.plan_run import ASSUMED, Rates, plan_run, written_run
from kvferry.report.paper import Paper
from kvferry.size import KEYS_AND_VALUES, features_of, layers_read, parameters_of
from kvferry.sums import apart_sums, left_out, way_of, whole_sums
from kvferry.work import calibration_on, rows_of, variants_of

GIB, TERA, GIGA = 2**30, 1e12, 1e9
PAPER_CALIBRATION = {"corpus": "fineweb-edu", "sequences": 500, "held_out": 0, "length": 1024, "stride": 4}
PAPER_RUN = {
    "calibration": PAPER_CALIBRATION,
    "compute": {"dtype": "bfloat16"},
    "headline": "paper",
    "sweeps": {},
    "greedy": {},
    "coqa": {},
}
PAPER_RECIPE = {
    "method": "ridge",
    "rope": "stripped",
    "support": "all_heads",
    "row_weights": "uniform",
    "corpus": PAPER_CALIBRATION["corpus"],
    "sequences": PAPER_CALIBRATION["sequences"],
    "native_head": 0,
    "head_rows": "kept",
    "dtype": "float32",
}


@dataclass(frozen=True)
class Wish:
    """What is to be planned: a recipe on a pair, on sequences of a calibration, within `budget_bytes` for the moments.

    whole: the moments of the pair over all columns, if the recipe can be cut from them. apart: what is summed for it otherwise.
    """

    pair: str
    paper: str | None
    variant: str
    source: Geometry
    target: Geometry
    recipe: dict[str, Any]
    calibration: dict[str, Any]
    dtype: str
    whole: Sums | None
    apart: Sums
    budget_bytes: int


@dataclass(frozen=True)
class Plan:
    """What one recipe needs on one pair.

    features: of one target head (p). *_dump_bytes: keys and values of the kept rows, held-out ones too. sums: equal for recipes
    of a pair whose rows are summed once for all of them. moments: how they are summed for all heads, or None where the budget is
    too small, and `note` says so. *_flops: floating-point operations; apply_flops a token. storage_bytes: of the weights in the
    recipe's dtype, biases aside like `parameters`. paper_*: of the same pair and k in the paper.
    """

    pair: str
    variant: str
    k: int
    source_layers: int
    rows: int
    features: int
    source_dump_bytes: int
    target_dump_bytes: int
    sums: Hashable
    moments: Choice | None
    moments_flops: int | None
    solve_flops: int
    apply_flops: int
    parameters: int
    storage_bytes: int
    paper_parameters: float | None = None
    paper_storage_gib: float | None = None
    note: str | None = None

    @property
    def p_over_n(self) -> float:
        """Features a row: about the in-sample R² of pure noise."""
        return self.features / self.rows


class Unplanned(NamedTuple):
    """A recipe on a pair that cannot be planned, and why."""

    pair: str
    variant: str
    reason: str


Outcome = Plan | Unplanned


def plan_config(project: Project) -> list[Outcome]:
    """For every pair of the config: the headline, and the closed-form recipe that reads most source layers."""
    return [_outcome(project, pair, name) for pair in project.config["pairs"] for name in _planned(project, pair)]


def plan_variants(project: Project, pair: str) -> list[Plan]:
    """Every variant of a pair that can be planned."""
    outcomes = [_outcome(project, pair, name) for name in variants_of(project, pair)]
    return [outcome for outcome in outcomes if isinstance(outcome, Plan)]


def plan_paper(project: Project) -> list[Outcome]:
    """The paper's pairs as it ran them: its k, its calibration, bfloat16 dumps and float32 mappers."""
    names = {entry["paper"]: name for name, entry in project.pairs.items()}
    table = Paper().table("table10")
    runs = [_paper_run(project, names[pair], int(k)) for pair, k in table["k"].items() if pair in names]
    return [outcome for run in runs for outcome in plan_config(run)]


def _paper_run(project: Project, pair: str, k: int) -> Project:
    """A run of one pair with the paper's recipe alone."""
    own = {"pairs": [pair], "variants": {PAPER_RUN["headline"]: {**PAPER_RECIPE, "k": k}}}
    return replace(project, config=project.config | PAPER_RUN | own)


def _planned(project: Project, pair: str) -> list[str]:
    """The headline, and of the pair's other recipes the one with the largest k."""
    source = project.geometry(project.pair(pair)["source"])
    names = variants_of(project, pair)
    closed = [name for name in names if project.variant(name)["method"] != "mlp"]
    largest = max(closed, key=lambda name: layers_read(project.recipe(pair, name), source), default=names[0])
    return list(dict.fromkeys([project.headline(pair), largest]))


def _outcome(project: Project, pair: str, variant: str) -> Outcome:
    entry, recipe = project.pair(pair), project.recipe(pair, variant)
    source, target = (project.geometry(entry[role]) for role in ("source", "target"))
    if source is None or target is None:
        unknown = [entry[role] for role, known in (("source", source), ("target", target)) if known is None]
        what = f"the geometry of {' and '.join(dict.fromkeys(unknown))} is not known"
        return Unplanned(
            pair, variant, f"{what}; add `geometry` to its entry in {project.config['registries']['models']}"
        )
    if recipe["method"] == "mlp":
        return Unplanned(pair, variant, "method mlp is trained, not solved; only closed-form recipes are planned")
    calibration = calibration_on(project, recipe["corpus"])
    dtype, budget = project.config["compute"]["dtype"], project.config["fit"]["memory_mb"] * MB
    own = project, pair, recipe, source, target
    sums = whole_sums(*own), apart_sums(*own)
    return plan(Wish(pair, entry["paper"], variant, source, target, recipe, calibration, dtype, *sums, budget))


def plan(wish: Wish) -> Plan:
    """Work out what one recipe needs."""
    source, target, recipe = wish.source, wish.target, wish.recipe
    k, local = int(layers_read(recipe, source)), recipe["support"] == "same_head"
    features, parameters = features_of(recipe, source), parameters_of(recipe, source, target)
    dropped = rows_in(recipe["sequences"], wish.calibration, left_out(recipe))
    rows = rows_in(recipe["sequences"], wish.calibration) - dropped
    dumped = rows_in(wish.calibration["sequences"] + wish.calibration["held_out"], wish.calibration)
    sums, moments, flops, note = _moments(wish)
    return Plan(
        pair=wish.pair,
        variant=wish.variant,
        k=k,
        source_layers=source.layers,
        rows=rows,
        features=features,
        source_dump_bytes=dumped * source.token_bytes(SIZE_OF[wish.dtype]),
        target_dump_bytes=dumped * target.token_bytes(SIZE_OF[wish.dtype]),
        sums=sums,
        moments=moments,
        moments_flops=flops,
        solve_flops=_solve_flops(target, features, target.kv_heads if local else 1),
        apply_flops=2 * parameters,
        parameters=parameters,
        storage_bytes=parameters * SIZE_OF[recipe["dtype"]],
        note=note,
        **_paper_size(None if local else wish.paper, k),
    )


def _moments(wish: Wish) -> tuple[Hashable, Choice | None, int | None, str | None]:
    """Who shares the moments, how they are summed, their operations, and what is to be said where the budget is too small."""
    sums = wish.whole if wish.whole and fits_full(wish.whole, wish.budget_bytes) else wish.apart
    shared = None if sums is wish.whole else (rows_of(wish.recipe), way_of(wish.recipe))
    try:
        choice = choice_of(sums, wish.budget_bytes, per_layer_only=sums is wish.apart)
    except KvferryError as error:
        return shared, None, None, str(error)
    return shared, choice, sums.flops(choice.way), None


def _solve_flops(target: Geometry, features: int, systems: int) -> int:
    """Operations of all solutions: p³/3 a Cholesky factor, 2·p² an output for its two triangular systems.

    systems: of a target layer and kind, which share the layer's outputs.
    """
    outputs = target.kv_heads * target.head_dim // systems
    return KEYS_AND_VALUES * target.layers * systems * (features**3 // 3 + 2 * features**2 * outputs)


def _paper_size(pair: str | None, k: int) -> dict[str, float | None]:
    """What the paper prints of the size of a mapper, if it has this pair with this k."""
    paper = Paper()
    if pair is None or paper.value("table12", pair, "k") != k:
        return {}
    columns = {"paper_parameters": "parameters", "paper_storage_gib": "storage_gb"}
    return {name: paper.value("table12", pair, column) for name, column in columns.items()}


def written(outcomes: Sequence[Outcome]) -> str:
    """The plans as text: tables of rows and disk, of the fit, of the mappers, then what could not be planned."""
    plans = [outcome for outcome in outcomes if isinstance(outcome, Plan)]
    notes = [f"{plan.pair}, {plan.variant}: {plan.note}" for plan in plans if plan.note]
    notes += [f"{o.pair}, {o.variant}: not planned: {o.reason}" for o in outcomes if isinstance(o, Unplanned)]
    tables = [_disk_table(plans), _fit_table(plans), _mapper_table(plans)] if plans else []
    return "\n\n".join([*tables, *(["\n".join(notes)] if notes else [])])


def _disk_table(plans: Sequence[Plan]) -> str:
    head = [["pair", "recipe", "source dump", "target dump"], ["", "", "GiB", "GiB"]]
    rows = [
        [plan.pair, plan.variant, figure(plan.source_dump_bytes, GIB), figure(plan.target_dump_bytes, GIB)]
        for plan in plans
    ]
    return aligned("Disk: keys and values of the calibration rows, held-out ones too", head, rows, names=2)


def _fit_table(plans: Sequence[Plan]) -> str:
    head = [
        ["pair", "recipe", "k", "rows n", "features p", "p/n", "sums", "passes", "memory", "moments", "solutions"],
        ["", "", "", "", "", "", "", "", "GiB", "TFLOP", "TFLOP"],
    ]
    rows = [
        [
            plan.pair,
            plan.variant,
            _k(plan),
            f"{plan.rows:,}",
            f"{plan.features:,}",
            f"{plan.p_over_n:.3f}",
            *_sums(plan),
        ]
        for plan in plans
    ]
    return aligned(
        "Fit: moments summed full (one Gram of all source layers) or per layer (one a target layer)",
        head,
        rows,
        names=2,
    )


def _k(plan: Plan) -> str:
    return f"all ({plan.k})" if plan.k == plan.source_layers else str(plan.k)


def _sums(plan: Plan) -> list[str]:
    """Cells: way, passes, memory, arithmetic of the moments and of the solutions."""
    solutions = figure(plan.solve_flops, TERA)
    if plan.moments is None or plan.moments_flops is None:
        return ["too little memory", "–", "–", "–", solutions]
    way, passes = plan.moments.way.replace("_", " "), str(plan.moments.passes)
    return [way, passes, figure(plan.moments.bytes, GIB), figure(plan.moments_flops, TERA), solutions]


def _mapper_table(plans: Sequence[Plan]) -> str:
    head = [
        ["pair", "recipe", "parameters", "paper", "storage", "paper", "apply"],
        ["", "", "10⁹", "10⁹", "GiB", "GiB", "GFLOP/token"],
    ]
    rows = [
        [
            plan.pair,
            plan.variant,
            figure(plan.parameters, GIGA),
            figure(plan.paper_parameters, GIGA),
            figure(plan.storage_bytes, GIB),
            "–" if plan.paper_storage_gib is None else f"{plan.paper_storage_gib:.0f}",
            figure(plan.apply_flops, GIGA),
        ]
        for plan in plans
    ]
    return aligned("Mapper, biases aside", head, rows, names=2)


def written_config(project: Project, rates: Rates) -> str:
    """The plans of a config's pairs, and what its whole run takes."""
    plans = {pair: plan_variants(project, pair) for pair in project.config["pairs"]}
    return "\n\n".join([written(plan_config(project)), written_run(plan_run(project, plans), rates)])


def main(arguments: Sequence[str]) -> None:
    """Print the plan of a config; what is wrong is said in one sentence, with exit status 1."""
    given = _parser().parse_args(arguments)
    name = given.config or ("config/paper.yaml" if given.paper else "config/config.yaml")
    try:
        project = load_project(read_yaml(Path(name)), name, Path("workflow/schemas"))
        rates = Rates.of(project.config["compute"]["device"], given.tflops, given.fit_tflops)
        print(written(plan_paper(project)) if given.paper else written_config(project, rates))
    except KvferryError as error:
        sys.exit(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvferry.planner", description="What a run will need.")
    parser.add_argument("config", nargs="?", help="default: config/config.yaml, or config/paper.yaml with --paper")
    parser.add_argument("--paper", action="store_true", help="the paper's pairs, with its own k and calibration")
    parser.add_argument(
        "--tflops", type=float, help=f"TFLOP/s that a device does in forward passes; assumed of {ASSUMED}"
    )
    parser.add_argument("--fit-tflops", type=float, help="TFLOP/s that a device does in fits")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
