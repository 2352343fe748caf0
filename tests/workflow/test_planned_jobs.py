"""The plan counts the jobs that Snakemake makes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry import plan_jobs
from kvferry.config import load_project, read_yaml

ROOT = Path(__file__).parents[2]
STAGES = (plan_jobs.prepared, lambda project: len(plan_jobs.dumps(project)), plan_jobs.fits, plan_jobs.evaluations)
STAGES += (plan_jobs.measures, plan_jobs.reports)


@pytest.mark.parametrize("name", ["ci", "paper"])
def test_as_many_jobs_as_in_a_dry_run(name, tmp_path):
    """In an empty folder, so that nothing is there yet; and one is the target that gathers them."""
    path = ROOT / "config" / f"{name}.yaml"
    project = load_project(read_yaml(path), path.name, ROOT / "workflow/schemas", ROOT)
    (tmp_path / "config").symlink_to(ROOT / "config")
    command = [sys.executable, "-m", "snakemake", "-n", "--quiet", "rules", "--snakefile", str(ROOT / "Snakefile")]
    command += ["--workflow-profile", "none", "--configfile", str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    (total,) = set(re.findall(r"^total\s+(\d+)$", done.stdout + done.stderr, re.MULTILINE))
    assert sum(count(project) for count in STAGES) == int(total) - 1
