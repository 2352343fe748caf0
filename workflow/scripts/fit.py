"""Fit all mappers of a pair that are fitted on the same rows."""

from pathlib import Path

from kvferry.files import read_json
from kvferry.fit.artifact import Calibration, fit_artifacts
from kvferry.fit.pair import load_moments
from kvferry.job import job

how = snakemake.params.how
with job(f"fit {how['pair']} {how['rows']}", snakemake.log[0], snakemake.threads):
    source, target = (Path(index).parent for index in (snakemake.input.source, snakemake.input.target))
    ranking = read_json(Path(snakemake.input.selection), "selection")["ranked"]
    moments = load_moments(Path(snakemake.input.moments[0])) if snakemake.input.get("moments") else None
    rows = Calibration(source, target, ranking, moments, how["memory_mb"], how["device"])
    directories = {Path(path).parent.name: Path(path).parent for path in snakemake.output}
    fit_artifacts(rows, how["recipes"], directories)
