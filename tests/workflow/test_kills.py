"""A job that is killed, at whatever moment, is finished by the next run with the numbers of a run that nobody disturbed.

Jobs run in processes of their own, which a server forks that has imported the package once, so that a kill costs no imports.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

from kvferry.records import APPLY_TIME

# The jobs that are killed, in their order, and a number of renames that each makes at least.
RENAMES = {"dump": 21, "fit": 10, "train": 7, "evaluate_models": 20, "evaluate_pair": 40}
BEFORE = ("prepare", "dump", "moments", "fit", "train", "identity", "evaluate_models", "evaluate_pair")
WINDOWS = [(job, moment, draw) for job in RENAMES for moment in ("before", "after") for draw in range(2)]
UNLIKE = ("seconds", "peak_memory_bytes", "commit", "seal")


def work(place: Path, job: str, moment: str = "", number: int = 0) -> None:
    """Run one job in a project; die before or after the rename of this number, where a moment is named."""
    if moment:
        os.replace = dying(os.replace, moment, number)
    tiny.run(place, [job])


def dying(replace: Callable[..., None], moment: str, number: int) -> Callable[..., None]:
    """`os.replace` in a process that does not live to see the end of one of its calls."""
    calls = itertools.count(1)

    def rename(*paths: Path) -> None:
        last = next(calls) == number
        if last and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*paths)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)

    return rename


@pytest.fixture(scope="module")
def begin():
    """Begins `work` in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["kvferry.evaluate.native", "kvferry.fit.identity", "kvferry.report.tables", "transformers.models.llama"]
    )

    def go(*given: object) -> multiprocessing.process.BaseProcess:
        process = context.Process(target=work, args=given)
        process.start()
        return process

    return go


def finish(process: multiprocessing.process.BaseProcess) -> int | None:
    process.join()
    return process.exitcode


@pytest.fixture(scope="module")
def undisturbed(tiny_project, begin, tmp_path_factory):
    """By job: the project as it was before it, all files after it, and the seconds it took."""
    place, stages = tmp_path_factory.mktemp("undisturbed"), {}
    current = shutil.copytree(tiny_project, place / "start")
    for job in BEFORE:
        following = shutil.copytree(current, place / job)
        begun = time.monotonic()
        assert finish(begin(following, job)) == 0
        stages[job] = (current, contents(following), time.monotonic() - begun)
        current = following
    return stages


def contents(project: Path) -> dict[str, bytes]:
    """Every result by its path, what is left of killed processes included; of records what two runs have alike."""
    results = project / tiny.RESULTS
    return {str(path.relative_to(results)): timeless(path) for path in sorted(results.rglob("*")) if path.is_file()}


def timeless(path: Path) -> bytes:
    if "records" not in path.parts:
        return path.read_bytes()
    record = json.loads(path.read_text())
    dropped = (*UNLIKE, "items", "value") if record["benchmark"] == APPLY_TIME else UNLIKE
    return json.dumps({key: value for key, value in record.items() if key not in dropped}).encode()


@pytest.mark.parametrize(("job", "moment", "draw"), WINDOWS)
def test_a_job_that_dies_as_it_renames_a_file_is_finished_as_if_nothing_was(
    job, moment, draw, undisturbed, begin, tmp_path
):
    before, wanted, _ = undisturbed[job]
    project = shutil.copytree(before, tmp_path / "project")
    number = random.Random(f"{job} {moment} {draw}").randint(1, RENAMES[job])
    assert finish(begin(project, job, moment, number)) == -signal.SIGKILL
    assert contents(project) != wanted
    assert finish(begin(project, job)) == 0
    assert contents(project) == wanted


@pytest.mark.parametrize("job", RENAMES)
def test_a_job_that_is_killed_at_any_time_is_finished_as_if_nothing_was(job, undisturbed, begin, tmp_path):
    """Three kills in a row, so that what is killed has gone on from an earlier one."""
    before, wanted, seconds = undisturbed[job]
    project = shutil.copytree(before, tmp_path / "project")
    moments = random.Random(job)
    for _ in range(3):
        process = begin(project, job)
        process.join(moments.uniform(0, 1) * seconds)
        process.kill()
        assert finish(process) in (0, -signal.SIGKILL)
    assert finish(begin(project, job)) == 0
    assert contents(project) == wanted
