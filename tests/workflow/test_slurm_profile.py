"""The profile for SLURM, without a cluster: it is read whole, and every job fits its partitions to the last retry."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from snakemake_executor_plugin_slurm.partitions import read_partition_file

ROOT = Path(__file__).parents[2]
PROFILE = ROOT / "profiles/slurm/config.yaml"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """What a dry run says of its jobs, in an empty folder: everything is still to be done."""
    place = tmp_path_factory.mktemp("run")
    (place / "config").symlink_to(ROOT / "config")
    config = yaml.safe_load((ROOT / "config/ci.yaml").read_text()) | {"compute": {"device": "cuda"}}
    (place / "run.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "snakemake", "-n", "--snakefile", str(ROOT / "Snakefile")]
    command += ["--workflow-profile", str(PROFILE.parent), "--configfile", "run.yaml"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return re.split(r"\n(?=(?:local)?rule )", done.stdout + done.stderr)[1:]


def asked(job, resource):
    found = re.search(rf"^    resources:.*\b{resource}=(\d+)", job, re.MULTILINE)
    return int(found.group(1)) if found else None


def test_every_job_says_its_time_but_those_that_run_where_snakemake_does(jobs):
    timeless = {
        re.match(r"(?:local)?rule (fetch_wheel|corpus|merge|pair|all|\w+)", job).group(1)
        for job in jobs
        if not asked(job, "runtime")
    }
    assert timeless == {"fetch_wheel", "corpus", "merge", "pair", "all"}
    assert len(jobs) > 40


def test_the_last_retry_of_every_job_fits_a_partition(jobs):
    retries = yaml.safe_load(PROFILE.read_text())["retries"]
    limits = {bool(one.limits.max_gpu): one.limits.max_runtime for one in read_partition_file(PROFILE)}
    assert limits.keys() == {True, False}
    for job in jobs:
        assert (asked(job, "runtime") or 0) * (1 + retries) <= limits[bool(asked(job, "gpu"))], job
