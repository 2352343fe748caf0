"""Greedy forward selection of source layers for a pair."""

from pathlib import Path

from kvferry.fit.greedy import write_greedy
from kvferry.fit.pair import load_moments
from kvferry.job import job

with job(f"greedy {snakemake.wildcards.pair}", snakemake.log[0], snakemake.threads):
    write_greedy(load_moments(Path(snakemake.input.moments[0])), snakemake.params.how, Path(snakemake.output[0]))
