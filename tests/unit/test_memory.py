"""What jobs ask for: the default family what it was measured to need, large models what their weights need, more at every try."""

from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import zeros

from kvferry import asked, memory
from kvferry.config import Geometry, load_project, read_yaml
from kvferry.devices import DEVICE, SOURCE, TARGET
from kvferry.evaluate import pair as evaluate_pair
from kvferry.evaluate import perplexity
from kvferry.fit import artifact
from kvferry.kv import dump
from kvferry.kv.mapper import Affine, HeadLocal, Network
from kvferry.memory import at_attempt, mapper_bytes
from kvferry.records import ZERO_CACHE
from kvferry.work import fit_jobs

ROOT = Path(__file__).parents[2]
# What two jobs at a time may take together (MEMORY_MB of the Makefile).
HALF = 3850
# Peak resident memory of jobs of the default run, in MB, less what is only mapped from disk.
MEASURED = {
    "coqa_pair": 2412,
    "evaluate_0": 1709,
    "moments": 3048,
    "fit": 3119,
    "identity": 3109,
    "dump": 1443,
    "native": 1063,
}
RIDGE = {"method": "ridge", "k": 8, "support": "all_heads", "dtype": "float32"}


def project_of(name="config.yaml", **changes):
    config = read_yaml(ROOT / "config" / name)
    config |= {key: config.get(key, {}) | value if isinstance(value, dict) else value for key, value in changes.items()}
    return load_project(config, name, ROOT / "workflow/schemas", ROOT)


def pair_of(project, pair):
    return {role: project.pair(pair)[name] for role, name in ((SOURCE, "source"), (TARGET, "target"))}


def mapped(project, job):
    headline = project.config["headline"]
    own = (headline if system in asked.CONTROLS else system for system in job.limits if system != ZERO_CACHE)
    return [project.variant(name) for name in dict.fromkeys(own)]


def needs(project):
    """What every kind of job of a run asks for."""
    config, found = project.config, {}
    for model in project.models_of_run():
        found[f"dump {model}"] = memory.dump_mb(project, model, config["calibration"]["corpus"])
        for name, job in asked.native_jobs(project, model).items():
            found[f"native {model} {name}"] = memory.evaluation_mb(project, {DEVICE: model}, [], job.limits.values())
    for model in asked.identity_models(project):
        found[f"identity {model}"] = memory.identity_mb(project, model)
    for pair in config["pairs"]:
        models, headline = pair_of(project, pair), [project.variant(config["headline"])]
        found[f"moments {pair}"] = memory.moments_mb(project, pair)
        found[f"probe {pair}"] = memory.probe_mb(project, pair)
        found |= {f"fit {pair} {rows}": memory.fit_mb(project, pair, rows) for rows in fit_jobs(project, pair)}
        for name, job in asked.evaluation_jobs(project, pair).items():
            recipes = mapped(project, job)
            found[f"evaluate {pair} {name}"] = memory.evaluation_mb(project, models, recipes, job.limits.values())
        if asked.dialogue_variants(project, pair):
            recipes = [project.variant(name) for name in asked.dialogue_variants(project, pair)]
            found[f"coqa {pair}"] = memory.conversations_mb(project, models, recipes * 2)
        if asked.has(project, "latency", pair):
            found[f"latency {pair}"] = memory.latency_mb(project, models, headline)
        if asked.has(project, "native_tokens", pair):
            found[f"native_tokens {pair}"] = memory.native_tokens_mb(project, models, headline)
    return found


@pytest.mark.parametrize("name", ["config.yaml", "ci.yaml", "family.yaml", "improved.yaml"])
def test_two_jobs_of_the_default_family_run_at_a_time(name):
    found = needs(project_of(name))
    assert {key: value for key, value in found.items() if value > HALF} == {}


def test_the_default_run_asks_for_what_it_was_measured_to_need():
    found, pair = needs(project_of()), "24l-to-30l"
    asks = {
        "coqa_pair": found[f"coqa {pair}"],
        "evaluate_0": found[f"evaluate {pair} 0"],
        "moments": found[f"moments {pair}"],
        "fit": found[f"fit {pair} qasper-24"],
        "identity": found["identity smollm2-135m"],
        "dump": found["dump smollm2-135m"],
        "native": found["native smollm2-135m 0"],
    }
    assert {key: value for key, value in MEASURED.items() if asks[key] < value} == {}


def test_large_models_ask_for_their_weights():
    project = project_of("paper.yaml")
    gib = {"qwen3-32b": 65.6e3, "llama-3.1-70b": 141.2e3}
    for model, weights in gib.items():
        ask = memory.dump_mb(project, model, "fineweb-edu")
        assert weights < ask < 1.1 * weights
    models = pair_of(project, "llama-3.1-8b-to-70b")
    on_gpu = memory.texts_mb(project, models, [], 65536)
    on_cpu = memory.texts_mb(project_of("paper.yaml", compute={"device": "cpu"}), models, [], 65536)
    # On GPUs the two pass through main memory one after another; on a CPU both stay, with a batch of their caches.
    assert on_gpu == pytest.approx(141.2e3, rel=0.01)
    caches = 65536 * (2 * 80 + 32) * 2 * 8 * 128 * 2 / 1e6
    assert on_cpu > 141.2e3 + 16e3 + caches


def test_a_source_on_the_cpu_is_held_beside_what_passes_to_the_gpu():
    models = {SOURCE: "qwen3-8b", TARGET: "qwen3-32b"}
    apart = project_of("paper.yaml", compute={"device": "cuda", "source_device": "cpu"})
    together = project_of("paper.yaml")
    more = memory.texts_mb(apart, models, [], 0) - memory.texts_mb(together, models, [], 0)
    assert more == pytest.approx(16.4e3, rel=0.01)


def test_more_tokens_ask_for_more_up_to_a_batch_and_the_memory_of_prefills():
    project, models = project_of(), {DEVICE: "smollm2-135m"}

    def ask(limit, **evaluation):
        own = project_of(evaluation=evaluation) if evaluation else project
        return memory.evaluation_mb(own, models, [], [{"mmlu": limit}])

    assert ask(20) < ask(40) < ask(100) < ask(10**5) == ask(None)
    assert ask(None, batch_tokens=16384) > ask(None)
    assert ask(None, cache_mb=2000) == ask(None) + 1000


@pytest.mark.parametrize(("attempt", "wanted"), [(1, 1000), (2, 1500), (3, 2000)])
def test_every_attempt_asks_for_more(attempt, wanted):
    assert at_attempt(1000, attempt) == wanted


def test_mappers_that_are_loaded_together_count_up_to_what_is_loaded_together():
    project, models = project_of("paper.yaml"), {SOURCE: "qwen3-8b", TARGET: "qwen3-32b"}
    own = mapper_bytes(RIDGE, Geometry(36, 8, 128), Geometry(64, 8, 128))
    without = memory.texts_mb(project, models, [], 0)
    one, many = (memory.texts_mb(project, models, [RIDGE] * count, 0) for count in (1, 9))
    assert one - without == many - without == pytest.approx(own / 1e6, abs=1)


def test_the_size_of_a_mapper_is_that_of_its_tensors():
    source, target = Geometry(4, 2, 8), Geometry(3, 2, 4)
    maps = {
        "all_heads": Affine(zeros(32, 8), zeros(8)),
        "same_head": HeadLocal(zeros(2, 16, 4), zeros(8)),
        "mlp": Network(zeros(32, 10), zeros(10), zeros(2, 5, 5), zeros(2, 5), zeros(2, 5, 4), zeros(2, 4)),
    }
    for name, own in maps.items():
        recipe = RIDGE | ({"method": "mlp", "mlp": {"width": 5}} if name == "mlp" else {"support": name}) | {"k": 2}
        assert mapper_bytes(recipe, source, target) == 4 * 2 * 3 * own.parameters, name
        assert mapper_bytes(recipe | {"dtype": "bfloat16"}, source, target) == 2 * 2 * 3 * own.parameters


def test_numbers_that_are_said_twice_agree():
    assert memory.DUMP_BATCH == dump.BATCH
    assert memory.CHUNK_BATCH == perplexity.BATCH
    assert memory.MAPPER_BYTES == evaluate_pair.MAPPER_BYTES
    assert memory.MAPPERS_SHARE == artifact.MAPPERS_SHARE


def test_parameters_of_a_model_from_its_entry_its_base_or_its_files(tmp_path):
    project = project_of()
    assert project.parameters("qwen3-32b") == pytest.approx(32.8e9)
    local = {"kind": "local", "path": str(tmp_path)}
    project.models.update(
        cut={"kind": "pruned", "base": "qwen3-8b"}, here=local, unknown={"kind": "hub", "repository": "a/b"}
    )
    assert project.parameters("cut") == pytest.approx(8.2e9)
    assert project.parameters("here") is None
    save_file({"a": zeros(1000)}, tmp_path / "model.safetensors")
    assert 2000 <= project.parameters("here") < 2100
    assert project.parameters("unknown") is None
    assert memory.texts_mb(project, {DEVICE: "unknown"}, [], 0) > 32_000
