"""Fit all mappers of a pair that are fitted on the same rows."""

from pathlib import Path

from kvferry.fit.artifact import Calibration, fit_artifacts
from kvferry.fit.pair import load_moments
from kvferry.fit.selection import read_selection
from kvferry.job import job

how = snakemake.params.how
with job(f"fit {how['pair']} {how['rows']}", snakemake.log[0], snakemake.threads):
    source, target = (Path(index).parent for index in (snakemake.input.source, snakemake.input.target))
    ranking = read_selection(Path(snakemake.input.selection), source, target)
    own = snakemake.input.get("moments")
    moments = load_moments(Path(own[0]), (source, target)) if own else None
    rows = Calibration(source, target, ranking, moments, how["memory_mb"], how["device"])
    directories = {Path(path).parent.name: Path(path).parent for path in snakemake.output}
    fit_artifacts(rows, how["recipes"], directories)
