"""Moments of a pair from both dumps."""

from pathlib import Path

from kvferry.fit.pair import Extent, accumulate, save_moments
from kvferry.job import job

with job(f"moments {snakemake.wildcards.pair}", snakemake.log[0], snakemake.threads):
    source, target = (Path(index).parent for index in (snakemake.input.source, snakemake.input.target))
    moments = accumulate(source, target, Extent(**snakemake.params.how), snakemake.params.device)
    save_moments(moments, Path(snakemake.output[0]))
