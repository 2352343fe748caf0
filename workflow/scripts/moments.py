"""Moments of a pair from both dumps."""

from pathlib import Path

from kvferry.fit.moments import accumulate, save_moments
from kvferry.job import job

with job(f"moments {snakemake.wildcards.pair}", snakemake.log[0], snakemake.threads):
    source, target = (Path(index).parent for index in (snakemake.input.source, snakemake.input.target))
    save_moments(accumulate(source, target), Path(snakemake.output[0]))
