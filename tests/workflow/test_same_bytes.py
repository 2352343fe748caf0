"""Two runs on one machine give the same tables, byte for byte but for times; so does the workflow, killed on its way."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pandas as pd
import pytest
import tiny

TIMED = {"improved": ["apply_time"]}
# A row of this table is a fact of how a run went; these rows are of its time, and of the memory beside it.
FACTS, OF_TIME = "provenance", "seconds"
LIMIT = 1800  # seconds after which a run hangs rather than works
# As `make demo` starts it: with a lock that a kill takes along.
SNAKEMAKE = [sys.executable, "-m", "kvferry.alone", ".snakemake.lock", sys.executable, "-m", "snakemake", "--nolock"]
SNAKEMAKE += ["--snakefile", str(tiny.ROOT / "Snakefile"), "--workflow-profile", str(tiny.ROOT / "profiles/default")]
COMMAND = [*SNAKEMAKE, "--cores", "2", "--resources", "mem_mb=100000", "--configfile", tiny.CONFIG]
# What is there when the run is killed: a shard of a dump, a record that a job keeps.
KILLED_AT = ["kv/*/*/fit-*.safetensors", "records/pairs/**/.kept/*"]


@contextmanager
def started(command: list[str], directory: Path, **changes: str) -> Iterator[subprocess.Popen]:
    """A process of its own with all that it starts, which ends with the block at the latest."""
    with (directory / "output.txt").open("a") as out:
        process = subprocess.Popen(
            command, cwd=directory, env=os.environ | changes, stdout=out, stderr=out, start_new_session=True
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def finish(process: subprocess.Popen, directory: Path) -> None:
    assert process.wait(LIMIT) == 0, (directory / "output.txt").read_text()[-2000:]


@pytest.fixture(scope="module")
def finished(tiny_project, tmp_path_factory):
    """Two projects, run by interpreters that order sets differently and are offered other numbers of threads."""
    places = [shutil.copytree(tiny_project, tmp_path_factory.mktemp("run") / "project") for _ in range(2)]
    with ExitStack() as both:
        for seed, place in enumerate(places, start=1):
            offered = {"PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": str(seed)}
            process = both.enter_context(started([sys.executable, tiny.__file__, str(place)], place, **offered))
            both.callback(finish, process, place)
    return places


def tables(place):
    """Bytes of every table by name; of a table with times, without these."""
    found = {}
    for path in sorted((place / tiny.RESULTS / "tables").iterdir()):
        if path.stem == FACTS and path.suffix == ".csv":
            facts = pd.read_csv(path, dtype=str)
            found[path.name] = facts[facts["what"] != OF_TIME].to_csv()
        elif path.stem not in (*TIMED, FACTS):
            found[path.name] = path.read_bytes()
        elif path.stem in TIMED and path.suffix == ".csv":
            found[path.name] = pd.read_csv(path, dtype=str).drop(columns=TIMED[path.stem]).to_csv()
    return found


def test_two_runs_give_the_same_tables_dumps_and_mappers(finished):
    one, other = (tables(place) for place in finished)
    assert len(one) > 40
    assert one == other
    for kind in ("kv", "pairs", "identity"):
        one, other = (contents(place / tiny.RESULTS / kind) for place in finished)
        assert len(one) >= 2
        assert one == other


def contents(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_workflow_that_is_killed_again_and_again_ends_with_the_same_tables(tiny_project, finished, tmp_path):
    place = shutil.copytree(tiny_project, tmp_path / "project")
    for pattern in KILLED_AT:
        with started(COMMAND, place) as process:
            wait_for(place, pattern, process)
        assert not (place / tiny.RESULTS / "tables").exists()
    with started([*COMMAND, "--", "tables"], place) as process:
        finish(process, place)
    assert tables(place) == tables(finished[0])


def wait_for(place: Path, pattern: str, process: subprocess.Popen) -> None:
    """Until such a file is there; the run must not end before."""
    begun = time.monotonic()
    while not any((place / tiny.RESULTS).glob(pattern)):
        assert process.poll() is None, (place / "output.txt").read_text()[-2000:]
        assert time.monotonic() - begun < LIMIT
        time.sleep(0.05)
