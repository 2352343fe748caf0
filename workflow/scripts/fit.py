"""Fit one mapper of a pair."""

from pathlib import Path

from kvferry.files import read_json
from kvferry.fit.moments import load_moments
from kvferry.fit.ridge import fit_artifact
from kvferry.job import job

with job(f"fit {snakemake.wildcards.pair} {snakemake.wildcards.variant}", snakemake.log[0], snakemake.threads):
    moments = load_moments(Path(snakemake.input.moments[0]))
    ranking = read_json(Path(snakemake.input.selection), "selection")["ranked"]
    source, target = (Path(index).parent for index in (snakemake.input.source, snakemake.input.target))
    fit_artifact(moments, ranking, snakemake.params.recipe, source, target, Path(snakemake.output[0]).parent)
