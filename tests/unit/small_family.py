"""What the tests of the API share: a results directory of two tiny models that depend on each other, and their mappers."""

from dataclasses import dataclass, field, replace

import torch
from small_fits import HOW, RECIPE, SIDES

from kvferry.api import load_model
from kvferry.fit.artifact import Calibration, fit_artifacts
from kvferry.fit.pair import Extent, accumulate
from kvferry.kv.dump import write_dump
from kvferry.kv.mapper import save_mapper

SMALL, LARGE = "smollm2-24l", "smollm2-135m"
FITTED, EXACT, HEADED = "ridge_k8", "exact", "headed"
PAIRS = {(SMALL, LARGE): "24l-to-30l", (LARGE, SMALL): "30l-to-24l"}
PLENTY = 1000
TEMPLATE = (
    "{% for message in messages %}<bos>{{ message['role'] }}\n{{ message['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
TEXT = "The ferry leaves the harbour at nine in the morning, and the bridge is closed."


def build_family(results, tiny_model, tokenizer, save_prepared, identity_mapper):
    """Two models under `results / models`, as a run prepares them, and mappers: fitted in both directions, with a native head in
    one, and for each model an exact one to itself. Names are those of the default family.
    """
    models = {
        SMALL: tiny_model("qwen3", 2, kv_heads=2, seed=4),
        LARGE: tiny_model("llama", 3, kv_heads=2, seed=5),
    }
    cards = {name: save_prepared(results / "models", model, tokenizer, name)[1] for name, model in models.items()}
    for name, model in models.items():
        write_dump(model, cards[name], SIDES, HOW, results / "kv" / name)
        layers = list(range(cards[name]["layers"]))
        recipes = {EXACT: RECIPE, HEADED: RECIPE | {"native_head": 3}}
        mapper = identity_mapper(model, [layers] * len(layers))
        for variant, recipe in recipes.items():
            origin = {"recipe": recipe, "source": cards[name], "target": cards[name]}
            save_mapper(mapper, origin, mapper_of(results, name, name, variant))
    for source, target in PAIRS:
        _fit(results, source, target, cards)
    return results


def _fit(results, source, target, cards):
    dumps = [results / "kv" / name for name in (source, target)]
    moments = accumulate(*dumps, Extent(RECIPE["sequences"], 0, "all", PLENTY))
    ranking = [list(range(cards[source]["layers"]))] * cards[target]["layers"]
    recipes = {FITTED: RECIPE, HEADED: RECIPE | {"native_head": 3}}
    directories = {variant: mapper_of(results, source, target, variant) for variant in recipes}
    fit_artifacts(Calibration(*dumps, ranking, moments, PLENTY), recipes, directories)


def mapper_of(results, source, target, variant=FITTED):
    """The directory of a mapper."""
    return results / "pairs" / PAIRS.get((source, target), f"{source}-to-{target}") / "mappers" / variant


def loaded(results, name):
    """A model of the family in memory."""
    return load_model(results / "models" / name)


@torch.no_grad()
def native(model, tokens, limit, **how):
    """The tokens that transformers' own greedy generation adds, a row at a time."""
    ids = torch.tensor([list(tokens)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False, **how)
    return tuple(out[0, ids.shape[1] :].tolist())


@torch.no_grad()
def read_by(model, ids, mask=None):
    """The cache that one plain forward over `ids [batch, tokens]` fills."""
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True)["cache"]


@dataclass
class Counting:
    """A mapper that notes the tokens of every span it is given."""

    mapper: object
    spans: list = field(default_factory=list)

    def translate(self, layers, source, target):
        self.spans.append(layers[0][0].shape[2])
        return self.mapper.translate(layers, source, target)


def counted(ferry):
    """The same ferry with a mapper that counts."""
    return replace(ferry, mapper=Counting(ferry.mapper))
