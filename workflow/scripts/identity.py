"""Fit the mapper of a model to itself."""

from pathlib import Path

from kvferry.fit.identity import fit_identity
from kvferry.job import job

with job(snakemake.rule, snakemake.log[0], snakemake.threads):
    given = snakemake.params
    directory = Path(snakemake.output[0]).parent
    fit_identity(Path(snakemake.input.dump).parent, given.recipe, directory, given.memory_mb, given.device)
