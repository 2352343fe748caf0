"""What a whole run will take: jobs, operations, hours of a device and disk, stage by stage.

Operations are those of forward passes (plan_passes) and of fits. Hours follow from two rates, which are assumptions that the user
can state better and no measurements. Knows the config and what the planner works out of closed-form recipes; does not know how
long jobs wait or load models, and takes tables and figures for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvferry import plan_jobs as jobs
from kvferry.columns import aligned, figure
from kvferry.config import Project
from kvferry.errors import KvferryError
from kvferry.fit.budget import rows_in
from kvferry.plan_passes import Passes
from kvferry.size import parameters_of
from kvferry.work import calibration_on, variants_of

if TYPE_CHECKING:
    from kvferry.planner import Plan

GIB, PETA, HOUR = 2**30, 1e15, 3600
FLOAT32, BFLOAT16 = 4, 2


@dataclass(frozen=True)
class Rates:
    """TFLOP/s that a device is taken to reach: in forward passes, and in the sums and solutions of the fit (float32, float64)."""

    device: str
    passes: float
    fit: float

    @staticmethod
    def of(device: str, passes: float | None = None, fit: float | None = None) -> Rates:
        """Of a device of the config; the rates that are assumed where none are given.

        Raises:
            KvferryError: a rate is not positive.
        """
        assumed = CORE if device == "cpu" else GPU
        rates = replace(
            assumed, passes=assumed.passes if passes is None else passes, fit=assumed.fit if fit is None else fit
        )
        if not (rates.passes > 0 and rates.fit > 0):
            raise KvferryError(
                "--tflops and --fit-tflops: a rate is a positive number of TFLOP/s; give what a device reaches"
            )
        return rates


# Of a large GPU, a fifth of what it could do in bfloat16; of a CPU, one core in float32.
GPU, CORE = Rates("GPU", 200, 20), Rates("core", 0.05, 0.05)
ASSUMED = ", ".join(f"one {own.device}: {own.passes:g} and {own.fit:g} in fits" for own in (GPU, CORE))


@dataclass(frozen=True)
class Stage:
    """Jobs, operations of forward passes and of fits, and bytes that stay on disk; None where a model's size is not known."""

    name: str
    jobs: int
    passes: float | None = 0.0
    fit: float = 0.0
    disk: float | None = 0.0

    def hours(self, rates: Rates) -> float | None:
        """Of one device."""
        if self.passes is None:
            return None
        return (self.passes / rates.passes + self.fit / rates.fit) / 1e12 / HOUR


def plan_run(project: Project, plans: Mapping[str, Sequence[Plan]]) -> list[Stage]:
    """The stages of a run; `plans` has those of all variants that can be planned, by pair."""
    weights = {model: project.parameters(model) for model in project.models_of_run()}
    known = {model: count for model, count in weights.items() if count is not None}
    apply = {(plan.pair, plan.variant): plan.apply_flops for own in plans.values() for plan in own}
    passes = Passes(project, known, apply) if len(known) == len(weights) else None
    solved, kept = (sum(map(of_pair, plans.values())) for of_pair in (_fit_flops, _fit_bytes))
    mlps = _mlp_weights(project)
    trained = sum(_training_flops(project.recipe(*key), count, project) for key, count in mlps.items())
    return [
        Stage("prepare", jobs.prepared(project), disk=_models_bytes(project, known) if passes else None),
        Stage("dump", len(jobs.dumps(project)), passes.dumps() if passes else None, disk=_dumps_bytes(project, plans)),
        Stage("fit", jobs.fits(project), fit=solved + trained, disk=kept + FLOAT32 * sum(mlps.values())),
        Stage("evaluate", jobs.evaluations(project), passes.evaluation() if passes else None),
        Stage("measure", jobs.measures(project), passes.measures() if passes else None),
        Stage("report", jobs.reports(project)),
    ]


def _models_bytes(project: Project, weights: Mapping[str, float]) -> float:
    """Models of the hub in bfloat16, where the hub's cache lies; those that are made here in float32."""
    size = {"hub": BFLOAT16, "wheel": FLOAT32, "pruned": FLOAT32, "local": 0}
    return sum(count * size[project.models[model]["kind"]] for model, count in weights.items())


def _dumps_bytes(project: Project, plans: Mapping[str, Sequence[Plan]]) -> float | None:
    """Keys and values of all dumps, if every one is some plan's."""
    found = {}
    for plan in (plan for own in plans.values() for plan in own):
        entry, corpus = project.pair(plan.pair), project.variant(plan.variant)["corpus"]
        found[entry["source"], corpus] = plan.source_dump_bytes
        found[entry["target"], corpus] = plan.target_dump_bytes
    return sum(found.values()) if found.keys() == set(jobs.dumps(project)) else None


def _fit_flops(plans: Sequence[Plan]) -> float:
    """Of a pair: its moments once, or each way in which they are summed, and the solutions of all variants."""
    moments = {plan.sums: plan.moments_flops for plan in plans if plan.moments_flops is not None}
    return sum(moments.values()) + sum(plan.solve_flops for plan in plans)


def _fit_bytes(plans: Sequence[Plan]) -> float:
    """Of a pair: the mappers of all variants, and the moments that are kept, at the most what summing them takes."""
    kept = [plan.moments.bytes for plan in plans if plan.moments is not None and plan.moments.way == "full"]
    return max(kept, default=0) + sum(plan.storage_bytes for plan in plans)


def _mlp_weights(project: Project) -> dict[tuple[str, str], int]:
    """Weights of each trained mapper, where geometries are known."""
    found = {}
    for pair in project.config["pairs"]:
        source, target = (project.geometry(project.pair(pair)[role]) for role in ("source", "target"))
        for name in variants_of(project, pair):
            recipe = project.recipe(pair, name)
            if recipe["method"] == "mlp" and source and target:
                found[pair, name] = parameters_of(recipe, source, target)
    return found


def _training_flops(recipe: Mapping[str, Any], weights: int, project: Project) -> float:
    """All epochs over the rows: 6 operations a weight and row, forward and back."""
    rows = rows_in(recipe["sequences"], calibration_on(project, recipe["corpus"]))
    return 6.0 * weights * rows * recipe["mlp"]["epochs"]


def written_run(stages: Sequence[Stage], rates: Rates) -> str:
    """The stages as a table with their sum."""
    head = [["stage", "jobs", "forward", "fit", f"{rates.device}-hours", "disk"], ["", "", "PFLOP", "PFLOP", "", "GiB"]]
    rows = [_row(stage, rates) for stage in (*stages, _sum(stages))]
    rate = f"a {rates.device} is taken to do {rates.passes:g} TFLOP/s in forward passes and {rates.fit:g} in fits"
    return aligned(f"The run: {rate} (an assumption)", head, rows, names=1)


def _sum(stages: Sequence[Stage]) -> Stage:
    passes, disk = ([getattr(stage, name) for stage in stages] for name in ("passes", "disk"))
    return Stage(
        "all",
        sum(stage.jobs for stage in stages),
        None if None in passes else sum(passes),
        sum(stage.fit for stage in stages),
        None if None in disk else sum(disk),
    )


def _row(stage: Stage, rates: Rates) -> list[str]:
    """Cells; a dash where nothing is to be counted or the size of a model is not known."""
    numbers = ((stage.passes, PETA), (stage.fit, PETA), (stage.hours(rates), 1), (stage.disk, GIB))
    return [stage.name, f"{stage.jobs:,}", *(figure(value or None, unit) for value, unit in numbers)]
