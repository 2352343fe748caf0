"""What every system of a run answers and which records come of it, cut into jobs that share work.

Systems of a pair share evaluation jobs, and with them each prefill of the source and the target's own reading; a job has only so
many that several cores get some. Benchmarks with shards get jobs of their own, one a shard. Knows the checked config; reads
and computes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvferry.records import (
    APPLY_TIME,
    ATTENTION_COSINE,
    ATTENTION_COSINE_HELD_OUT,
    COQA,
    COQA_ALTERNATE,
    COQA_HANDOFF,
    IDENTITY,
    K_CONCENTRATION,
    LATENCY,
    NATIVE,
    NATIVE_INJECTED,
    NATIVE_TOKENS,
    NATIVE_TOKENS_TIME,
    NEXT_TOKEN_KL,
    PERPLEXITY,
    R2_K,
    R2_V,
    RANDOM_MAPPER,
    TOP1_AGREEMENT,
    V_CONCENTRATION,
    WRONG_DOCUMENT,
    ZERO_CACHE,
)
from kvferry.work import sweeps_of, variants_of

if TYPE_CHECKING:
    from kvferry.config import Project

MEASURES = (PERPLEXITY, NEXT_TOKEN_KL, TOP1_AGREEMENT)
# Systems of a pair that are no fitted mapper; those of CONTROLS are made from the headline's.
CONTROLS = (RANDOM_MAPPER, WRONG_DOCUMENT)
DIAGNOSTICS = (ATTENTION_COSINE, K_CONCENTRATION, V_CONCENTRATION, R2_K, R2_V, ATTENTION_COSINE_HELD_OUT)
# Sweeps whose variants tell how an error in the cache and a benchmark go together, or choose k.
DIAGNOSED = ("k", "components", "mlp")

Limits = dict[str, int | None]
Names = dict[str, list[str]]


@dataclass(frozen=True)
class Job:
    """limits: system → benchmark → number of items (None: all). records: system → benchmarks and measures that are written.

    shard: number from 0 and count, where the job answers a part of the items.
    """

    limits: dict[str, Limits]
    records: Names
    shard: tuple[int, int] | None = None


def evaluation_jobs(project: Project, pair: str) -> dict[str, Job]:
    """The evaluation jobs of a pair by name."""
    asked = _asked_of_pair(project, pair)
    return _jobs(project, asked, project.config["evaluation"]["systems_a_job"], timed_variants(project, pair))


def native_jobs(project: Project, model: str) -> dict[str, Job]:
    """The evaluation jobs of a model on its own and, for a target, of its controls: one, and those of the shards."""
    return _jobs(project, _asked_of_model(project, model), len(_asked_of_model(project, model)))


def _asked_of_pair(project: Project, pair: str) -> dict[str, Limits]:
    """The headline answers everything, a zeroed cache no benchmark but those of the controls."""
    headline, controls = project.headline(pair), controls_of(project, pair)
    asked = {headline: full_limits(project), ZERO_CACHE: controls or {}}
    asked |= dict.fromkeys(CONTROLS, controls) if controls is not None else {}
    return asked | {name: limits_of(project, pair, name) for name in variants_of(project, pair) if name != headline}


def _asked_of_model(project: Project, model: str) -> dict[str, Limits]:
    """The injected control answers everything that the model does, so that they can be compared item by item."""
    full, asked = full_limits(project), {NATIVE: full_limits(project)}
    if model in (project.pair(pair)["target"] for pair in project.config["pairs"]):
        asked[NATIVE_INJECTED] = full
    if model in identity_models(project):
        asked[IDENTITY] = _limits(project, project.config["controls"]["benchmarks"])
    return asked


def full_limits(project: Project) -> Limits:
    """The limits of `evaluation.benchmarks`."""
    return _limits(project, project.config["evaluation"]["benchmarks"])


def _limits(project: Project, benchmarks: Mapping[str, Mapping[str, Any]]) -> Limits:
    full = project.config["evaluation"]["full"]
    return {name: None if full else how["limit"] for name, how in benchmarks.items()}


def controls_of(project: Project, pair: str) -> Limits | None:
    """What the controls of a pair answer; None where it has none."""
    controls = project.config.get("controls")
    return _limits(project, controls["benchmarks"]) if controls and pair in controls["pairs"] else None


def identity_models(project: Project) -> list[str]:
    """Targets that are also mapped to themselves."""
    pairs = project.config.get("controls", {}).get("pairs", [])
    return list(dict.fromkeys(project.pair(pair)["target"] for pair in pairs))


def identity_recipe(project: Project, model: str) -> dict[str, Any]:
    """The recipe that a target is mapped to itself by: all layers, all rows alike, nothing native, and else the closed form of
    the headline of its first pair with controls.
    """
    pair = next(name for name in project.config["controls"]["pairs"] if project.pair(name)["target"] == model)
    recipe = project.variant(project.headline(pair))
    own = {"row_weights": "uniform", "native_head": 0, "head_rows": "kept", "method": recipe["method"], "k": "all"}
    own |= {"method": "ols", "lambda": 0.0} if recipe["method"] == "mlp" else {}
    calibration = project.config["calibration"]
    own |= {"corpus": calibration["corpus"]}
    own["sequences"] = project.config["controls"].get("identity_sequences", calibration["sequences"])
    return recipe | own


def limits_of(project: Project, pair: str, variant: str) -> Limits:
    """The benchmarks of all sweeps that a variant is in, each with the largest limit; without one where the run is a full one."""
    limits: Limits = {}
    for sweep in sweeps_of(project, pair).values():
        if variant in sweep["variants"]:
            for name, how in sweep["benchmarks"].items():
                limits[name] = max(how["limit"], limits.get(name) or 0)
    return dict.fromkeys(limits) if project.config["evaluation"]["full"] else limits


def timed_variants(project: Project, pair: str) -> list[str]:
    """Variants whose time is shown: those of the sweep `improved`, and the headline that they are compared with."""
    sweep = sweeps_of(project, pair).get("improved")
    return [project.headline(pair), *sweep["variants"]] if sweep else []


def _jobs(project: Project, asked: dict[str, Limits], most: int, timed: Collection[str] = ()) -> dict[str, Job]:
    """Jobs of at most `most` systems with all that is not sharded, and a job a shard with all systems that have it."""
    shards = {name: how["shards"] for name, how in project.config["evaluation"]["benchmarks"].items()}
    jobs = {}
    for number, part in enumerate(_even(list(asked.items()), most)):
        limits = {system: {b: n for b, n in own.items() if not is_sharded(n, shards[b])} for system, own in part}
        jobs[str(number)] = Job(limits, {system: [*own, *measures(system, timed)] for system, own in limits.items()})
    for name, count in shards.items():
        own = {
            system: {name: limits[name]} for system, limits in asked.items() if is_sharded(limits.get(name, 0), count)
        }
        for number in range(count if own else 0):
            jobs[f"{name}-{number}-of-{count}"] = Job(own, {system: [name] for system in own}, (number, count))
    return jobs


def is_sharded(limit: int | None, shards: int) -> bool:
    """Whether so many items are cut into shards; fewer items than shards stay together."""
    return shards > 1 and (limit is None or limit >= shards)


def _even(things: list[Any], most: int) -> list[list[Any]]:
    """Lists of nearly the same length, `most` at most, dealt out in turns: neighbours in a sweep cost about the same."""
    count = -(-len(things) // most)
    return [things[start::count] for start in range(count)]


def measures(system: str, timed: Collection[str]) -> list[str]:
    """What is measured of a system beside benchmarks: the next token and, of the mappers `timed`, the time."""
    if system == NATIVE:
        return [PERPLEXITY]
    return [*MEASURES, *([APPLY_TIME] if system in timed else [])]


def sharded(jobs: Mapping[str, Job]) -> dict[tuple[str, str], int]:
    """(system, benchmark) → number of shards, of all whose records are merged from shards."""
    of_shards = [job for job in jobs.values() if job.shard]
    return {(system, name): job.shard[1] for job in of_shards for system, own in job.records.items() for name in own}


def dialogue_variants(project: Project, pair: str) -> list[str]:
    """Variants that go on with conversations."""
    coqa = project.config.get("coqa")
    if not coqa or pair not in coqa["pairs"]:
        return []
    return list(dict.fromkeys([project.headline(pair), *coqa["variants"]]))


def dialogue_models(project: Project) -> list[str]:
    """Models that answer conversations on their own."""
    pairs = project.config.get("coqa", {}).get("pairs", [])
    return list(dict.fromkeys(project.pair(pair)[role] for pair in pairs for role in ("source", "target")))


def reverse_of(project: Project, pair: str) -> str | None:
    """The pair of the conversations that runs the other way, if there is one."""
    ends = [project.pair(pair)[role] for role in ("target", "source")]
    pairs = project.config.get("coqa", {}).get("pairs", [])
    return next((own for own in pairs if [project.pair(own)[role] for role in ("source", "target")] == ends), None)


def variant_back(project: Project, pair: str, variant: str) -> str:
    """The variant that maps the other way where turns alternate: of the same name, and for a headline the other pair's."""
    back = reverse_of(project, pair)
    return project.headline(back) if back and variant == project.headline(pair) else variant


def dialogues(project: Project, pair: str) -> Names:
    """The protocols of conversations by variant: turns alternate where that is asked for and the pair is there both ways."""
    variants = dialogue_variants(project, pair)
    both_ways = project.config["coqa"].get("alternate", variants) if variants and reverse_of(project, pair) else []
    return {name: [COQA_HANDOFF, *([COQA_ALTERNATE] if name in both_ways else [])] for name in variants}


def timed_together(project: Project) -> list[list[str]]:
    """Pairs whose times are measured in one job: those of the same two models, whose prefills serve both."""
    groups: dict[frozenset[str], list[str]] = {}
    for pair in project.config.get("latency", {}).get("pairs", []):
        models = frozenset(project.pair(pair)[role] for role in ("source", "target"))
        groups.setdefault(models, []).append(pair)
    return list(groups.values())


def diagnosed_variants(project: Project, pair: str) -> list[str]:
    """Variants whose errors are looked at in the target's attention."""
    if "diagnostics" not in project.config:
        return []
    listed = (name for kind in DIAGNOSED for name in sweeps_of(project, pair).get(kind, {}).get("variants", []))
    return list(dict.fromkeys([project.headline(pair), *listed]))


def has(project: Project, section: str, pair: str) -> bool:
    """Whether an optional section of the config names the pair."""
    return pair in project.config.get(section, {}).get("pairs", [])


def records_of_pair(project: Project, pair: str) -> Names:
    """Every record of a pair: benchmarks, measures and what the optional sections ask, by system."""
    headline = project.headline(pair)
    found = _gathered(evaluation_jobs(project, pair).values())
    for variant, protocols in dialogues(project, pair).items():
        found[variant] += protocols
    for variant in diagnosed_variants(project, pair):
        found[variant] += DIAGNOSTICS
    found[headline] += [LATENCY] if has(project, "latency", pair) else []
    found[headline] += [NATIVE_TOKENS, NATIVE_TOKENS_TIME] if has(project, "native_tokens", pair) else []
    return found


def records_of_model(project: Project, model: str) -> Names:
    """Every record of a model on its own and of its controls, by system."""
    found = _gathered(native_jobs(project, model).values())
    found[NATIVE] += [COQA] if model in dialogue_models(project) else []
    return found


def _gathered(jobs: Iterable[Job]) -> Names:
    """Names by system, each once."""
    found: Names = {}
    for job in jobs:
        for system, names in job.records.items():
            own = found.setdefault(system, [])
            own += [name for name in names if name not in own]
    return found
