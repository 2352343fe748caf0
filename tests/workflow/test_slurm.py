"""A run on a real SLURM cluster of one node, through profiles/slurm and with a job cancelled, gives what a local run does."""

import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from one_node import Cluster, cluster, left_of, what_lacks
from small_run import ROOT, command, write_inputs

from kvferry.records import APPLY_TIME

RESULTS = ["--", "results/tables/table13_accuracy.csv"]
# Words of the site, and how often the queue is asked. One job asks for a GPU, as all that compute do with compute.device: cuda.
SITE = ["--default-resources", "slurm_account=''", "--slurm-status-command", "squeue"]
SITE += ["--slurm-init-seconds-before-status-checks", "5"]
SLURM = ["--workflow-profile", str(ROOT / "profiles" / "slurm"), *SITE, "--set-resources", "probe:gpu=1"]
LOCAL = ["--workflow-profile", str(ROOT / "profiles" / "default"), "--cores", "2"]
SECONDS = 900
# Of a record: what differs between two runs of the same.
OF_THE_MOMENT = ("seconds", "peak_memory_bytes", "commit", "seal")  # a seal is over the others as well

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(what_lacks()), reason=str(what_lacks()))]


@contextmanager
def started(directory: Path, options: list[str], environment: dict[str, str] | None = None) -> Iterator[None]:
    """A run beside the body, which must end well; it is stopped if the body does not."""
    call = [*command(directory, *options), *RESULTS]
    with (directory / "said.txt").open("w") as said:
        run = subprocess.Popen(call, cwd=directory, env=environment, stdout=said, stderr=subprocess.STDOUT)
        try:
            yield
            run.wait(SECONDS)
        finally:
            run.terminate()
            run.wait()
    assert run.returncode == 0, (directory / "said.txt").read_text()[-3000:]


def cancel_one(one: Cluster, rule: str) -> None:
    """Cancel the first job of a rule that is running."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        running = [line.split() for line in one.ask("squeue", "-h", "-t", "RUNNING", "-o", "%i %k").splitlines()]
        found = [number for number, comment in running if comment.startswith(f"rule_{rule}")]
        if found:
            one.ask("scancel", found[0])
            return
        time.sleep(0.2)
    raise AssertionError(f"no job of the rule {rule} ran")


@dataclass(frozen=True)
class Runs:
    """Folders of the results of both runs, the jobs that SLURM saw end, and what was left of the cluster."""

    local: Path
    slurm: Path
    jobs: list[dict[str, str]]
    left: list[str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model, tokenizer, save_prepared, write_wheel):
    place = tmp_path_factory.mktemp("slurm")
    (place / "inputs").mkdir()
    write_inputs(place / "inputs", tiny_model, tokenizer, save_prepared, write_wheel)
    with started(place / "local", LOCAL):
        pass
    with cluster() as one:
        with started(place / "slurm", SLURM, one.environment):
            cancel_one(one, "dump")
        jobs = one.finished()
    return Runs(place / "local" / "results", place / "slurm" / "results", jobs, left_of(one))


def without_times(path: Path) -> dict[str, Any]:
    """A record; of one of times, whose items are nothing else, only which there are."""
    record = {key: value for key, value in json.loads(path.read_text()).items() if key not in OF_THE_MOMENT}
    if record["benchmark"] == APPLY_TIME:
        record |= {"items": [item["id"] for item in record["items"]], "value": None}
    return record


def test_tables_are_those_of_a_local_run(runs):
    names = sorted(path.name for path in (runs.local / "tables").glob("*.csv"))
    assert "table13_accuracy.csv" in names
    for name in names:
        slurm, local = (table(run / "tables" / name) for run in (runs.slurm, runs.local))
        assert slurm == local, name


def table(path: Path) -> list[str]:
    """The rows of a table but for those that say how long a stage took."""
    return [row for row in path.read_text().splitlines() if not row.startswith("seconds,")]


def test_records_are_those_of_a_local_run_but_for_times(runs):
    paths = sorted(path.relative_to(runs.local) for path in (runs.local / "records").rglob("*.json"))
    assert len(paths) > 10
    for path in paths:
        assert without_times(runs.slurm / path) == without_times(runs.local / path), path


def test_each_job_ran_once_and_the_cancelled_one_again_with_more_time(runs):
    states = Counter(job["JobState"] for job in runs.jobs)
    assert states == {"COMPLETED": 9, "CANCELLED": 1}
    (cancelled,) = (job for job in runs.jobs if job["JobState"] == "CANCELLED")
    retried = [job for job in runs.jobs if int(job["TimeLimit"]) == 2 * int(cancelled["TimeLimit"])]
    assert [job for job in retried if job["Tres"] == cancelled["Tres"]]


def test_a_job_that_asks_for_a_gpu_goes_to_the_partition_that_has_them(runs):
    assert Counter(job["Partition"] for job in runs.jobs) == {"cpu": 9, "gpu": 1}


def test_nothing_is_left_of_the_cluster(runs):
    assert runs.left == []
