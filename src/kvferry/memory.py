"""How much main memory the jobs of a run need, from the sizes of their models and what they are asked: for a scheduler.

Counted are weights, the caches of a batch and what is computed of it, remembered prefills, moments and mappers. What lies on a
GPU is not, but for what passes through main memory on its way there. Figures are in MB. They are estimates, since the tokens of
an item are a guess and not everything is largest at the same time: a job that needs more is tried again with more, see
`at_attempt`. Loads no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from kvferry.asked import Limits, identity_recipe
from kvferry.config import Geometry, Project
from kvferry.devices import DEVICE, SIZE_OF, SOURCE, devices_in, place_of
from kvferry.errors import KvferryError
from kvferry.fit.budget import DOUBLE, MB, SHARD_SEQUENCES, SINGLE, Sums, choice_of, fits_full, rows_in
from kvferry.size import parameters_of
from kvferry.sums import apart_sums, pair_sums, whole_sums
from kvferry.work import calibration_on, fit_jobs, weighs_attention

Models = Mapping[str, str]
Recipe = dict[str, Any]

# Interpreter and libraries, as measured; and what no job asks for less than.
PROCESS_BYTES, LEAST_MB = 500 * MB, 2000
MORE_AN_ATTEMPT = 0.5
# What a model is taken for of which the registry says nothing.
UNKNOWN_PARAMETERS, UNKNOWN_GEOMETRY = 8e9, Geometry(64, 8, 128)
# Tokens of a benchmark: of the examples that its prompts share, and of what an item adds.
SHARED_TOKENS, ITEM_TOKENS = 1024, 128
# Of tokens that are read at a time: a model that hands its cache on holds it once, one that answers reads on from a copy.
COPIES = {SOURCE: 1}
OWN_COPIES = 2
# As kv.dump, evaluate.perplexity, evaluate.pair and fit.artifact have them, which take torch to import.
DUMP_BATCH, CHUNK_BATCH, MAPPER_BYTES, MAPPERS_SHARE = 4, 4, 2_000_000_000, 0.2


def at_attempt(needed_mb: int, attempt: int) -> int:
    """What to ask for when a job is tried for the first time (1) or again."""
    return math.ceil(needed_mb * (1 + MORE_AN_ATTEMPT * (attempt - 1)))


def prepare_mb(project: Project, model: str) -> int:
    """To make a model in float32, from weights that are held beside it."""
    return _mb(2 * _parameters(project, model) * SINGLE)


def dump_mb(project: Project, model: str, corpus: str) -> int:
    """To dump the cache of a corpus: a batch of sequences at a time, and the rows of a shard twice."""
    calibration, geometry = calibration_on(project, corpus), _geometry(project, model)
    rows = rows_in(SHARD_SEQUENCES, calibration)
    shard = rows * geometry.token_bytes(_itemsize(project))
    if weighs_attention(project, model, corpus):
        shard += 2 * rows * SINGLE * geometry.layers * geometry.kv_heads
    return _mb(_models_bytes(project, {DEVICE: model}, DUMP_BATCH * calibration["length"]), 2 * shard)


def evaluation_mb(project: Project, models: Models, recipes: Iterable[Recipe], limits: Iterable[Limits]) -> int:
    """To answer benchmarks and measure chunks. models: by role; recipes: of the mappers; limits: of each system."""
    config, asked = project.config, _tokens_of(limits)
    chunks = CHUNK_BATCH * (config["perplexity"]["prefix"] + config["perplexity"]["scored"])
    batch = max(chunks, min(asked, config["evaluation"]["batch_tokens"]))
    return _mb(
        _reading_bytes(project, models, recipes, int(batch)), _remembered_bytes(project, models, max(chunks, asked))
    )


def conversations_mb(project: Project, models: Models, recipes: Iterable[Recipe]) -> int:
    """To answer conversations."""
    how = project.config["coqa"]
    asked = how["conversations"] * (how["max_tokens"] + how["max_new_tokens"])
    batch = min(asked, project.config["evaluation"]["batch_tokens"])
    return _mb(_reading_bytes(project, models, recipes, batch), _remembered_bytes(project, models, asked))


def texts_mb(project: Project, models: Models, recipes: Iterable[Recipe], tokens: int) -> int:
    """To have so many tokens at a time read by both models and mapped."""
    return _mb(_reading_bytes(project, models, recipes, tokens))


def native_tokens_mb(project: Project, models: Models, recipes: list[Recipe]) -> int:
    """To measure chunks, and to time one text."""
    timed = texts_mb(project, models, recipes, project.config["native_tokens"]["length"])
    return max(timed, evaluation_mb(project, models, recipes, []))


def latency_mb(project: Project, models: Models, recipes: list[Recipe]) -> int:
    """To time all lengths that are no longer than a batch of the evaluation, or what the config says for that."""
    how = project.config["latency"]
    if "memory_mb" in how:
        return texts_mb(project, models, recipes, 0) + how["memory_mb"]
    most = project.config["evaluation"]["batch_tokens"]
    return texts_mb(project, models, recipes, min(how["batch"] * max(how["lengths"]), most))


def moments_mb(project: Project, pair: str) -> int:
    """To sum the moments of a pair."""
    sums, budget = pair_sums(project, pair, *_geometries(project, pair)), _budget(project)
    if fits_full(sums, budget):
        return _mb(sums.bytes("full", sums.target.layers))
    own, other = (geometry.layers * geometry.head_dim for geometry in (sums.source, sums.target))
    # Keys with RoPE, keys without and values, a target head at a time.
    return _mb(3 * sums.target.kv_heads * DOUBLE * own * (own + other))


def probe_mb(project: Project, pair: str) -> int:
    """To read the moments of a pair: all of them, and those of one kind twice more."""
    sums = pair_sums(project, pair, *_geometries(project, pair))
    if not fits_full(sums, _budget(project)):
        return moments_mb(project, pair)
    return _mb((sums.kinds + 2) * _kind_bytes(sums))


def fit_mb(project: Project, pair: str, rows: str) -> int:
    """To fit the variants of a pair that share rows: moments, a solution, and mappers until they are written.

    Moments that are there are copied, a kind at a time, where rows are weighed.
    """
    geometries, budget = _geometries(project, pair), _budget(project)
    recipes = [project.recipe(pair, name) for name in fit_jobs(project, pair)[rows]]
    closed = [recipe for recipe in recipes if recipe["method"] != "mlp"]
    if not closed:
        return _mb(budget)
    mappers = sum(mapper_bytes(recipe, *geometries) for recipe in closed)
    sums = whole_sums(project, pair, closed[0], *geometries)
    if sums is not None and fits_full(sums, budget):
        held = sums.solving_bytes("full", sums.target.layers) + _kind_bytes(sums)
        return _mb(held, min(mappers, int(MAPPERS_SHARE * budget)))
    apart = [apart_sums(project, pair, recipe, *geometries) for recipe in closed]
    return _mb(max(_chosen_bytes(own, budget, per_layer_only=True) for own in apart), mappers)


def identity_mb(project: Project, model: str) -> int:
    """To fit a model's mapper to itself: the sums, or what is left of them and the mapper."""
    geometry, recipe = _geometry(project, model), identity_recipe(project, model)
    sums = Sums.over(geometry, geometry, geometry.layers, recipe["sequences"], project.config["calibration"])
    solving = sums.solving_bytes("full", geometry.layers) if fits_full(sums, _budget(project)) else _budget(project)
    return _mb(max(_chosen_bytes(sums, _budget(project)), solving + mapper_bytes(recipe, geometry, geometry)))


def mapper_bytes(recipe: Recipe, source: Geometry, target: Geometry) -> int:
    """Bytes of a mapper's weights as it is stored, biases aside."""
    return parameters_of(recipe, source, target) * SIZE_OF[recipe["dtype"]]


def _mb(*parts: float) -> int:
    """The parts, in bytes, of a process."""
    return max(LEAST_MB, math.ceil((PROCESS_BYTES + sum(parts)) / MB))


def _kind_bytes(sums: Sums) -> int:
    """The moments of one kind over all columns."""
    features, outputs = (own.layers * own.kv_heads * own.head_dim for own in (sums.source, sums.target))
    return DOUBLE * features * (features + outputs)


def _budget(project: Project) -> int:
    return project.config["fit"]["memory_mb"] * MB


def _itemsize(project: Project) -> int:
    return SIZE_OF[project.config["compute"]["dtype"]]


def _parameters(project: Project, model: str) -> float:
    return project.parameters(model) or UNKNOWN_PARAMETERS


def _geometry(project: Project, model: str) -> Geometry:
    return project.geometry(model) or UNKNOWN_GEOMETRY


def _geometries(project: Project, pair: str) -> tuple[Geometry, Geometry]:
    entry = project.pair(pair)
    return _geometry(project, entry["source"]), _geometry(project, entry["target"])


def _chosen_bytes(sums: Sums, budget: int, *, per_layer_only: bool = False) -> int:
    """What is held at the most; all of the budget where a geometry is a guess that does not fit it, or the fit will refuse."""
    try:
        return choice_of(sums, budget, per_layer_only=per_layer_only).bytes
    except KvferryError:
        return budget


def _tokens_of(limits: Iterable[Limits]) -> float:
    """Tokens of the largest benchmark that is asked of some system; without a limit there is no telling."""
    counts = [math.inf if count is None else count for own in limits for count in own.values()]
    return SHARED_TOKENS + ITEM_TOKENS * max(counts) if counts else 0


def _reading_bytes(project: Project, models: Models, recipes: Iterable[Recipe], tokens: int) -> float:
    """Of models that read so many tokens at a time, and of the mappers between them."""
    sizes = [mapper_bytes(recipe, *_ends(project, models)) for recipe in recipes]
    together = min(sum(sizes), max(MAPPER_BYTES, *sizes)) if sizes else 0
    return _models_bytes(project, models, tokens) + together


def _ends(project: Project, models: Models) -> tuple[Geometry, Geometry]:
    """Geometries of source and target; a model alone is both."""
    source, *target = (_geometry(project, model) for model in models.values())
    return source, target[0] if target else source


def _models_bytes(project: Project, models: Models, tokens: int) -> float:
    """Of models by role. Those on a GPU pass through main memory one after another, and compute elsewhere."""
    here = {role: model for role, model in models.items() if _is_here(project, role)}
    passing = [_weights(project, model) for role, model in models.items() if role not in here]
    held = sum(_weights(project, model) for model in here.values())
    caches = sum(COPIES.get(role, OWN_COPIES) * _cache(project, model) for role, model in here.items())
    widest = max((_activations(project, model) for model in here.values()), default=0)
    return held + max(passing, default=0) + tokens * (caches + widest)


def _remembered_bytes(project: Project, models: Models, tokens: float) -> float:
    """Of prefills that the systems of a job share, which are those of the source or of a model alone."""
    role, model = next(iter(models.items()))
    most = project.config["evaluation"]["cache_mb"] * MB
    return min(most, tokens * _cache(project, model)) if _is_here(project, role) else 0


def _is_here(project: Project, role: str) -> bool:
    """Whether a role's model is in main memory."""
    return devices_in(place_of(project.config["compute"], role)) == ["cpu"]


def _weights(project: Project, model: str) -> float:
    return _parameters(project, model) * _itemsize(project)


def _cache(project: Project, model: str) -> int:
    """Of one token's keys and values."""
    return _geometry(project, model).token_bytes(_itemsize(project))


def _activations(project: Project, model: str) -> float:
    """Of one token in the widest layer, about 16 times the hidden size, which is about that of a layer's 12·size² weights."""
    a_layer = _parameters(project, model) / _geometry(project, model).layers
    return 16 * math.sqrt(a_layer / 12) * _itemsize(project)
