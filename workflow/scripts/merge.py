"""Merge the records of a benchmark's shards."""

from pathlib import Path

from kvferry.evaluate.shards import merge_shards
from kvferry.job import job

with job(snakemake.rule, snakemake.log[0]):
    merge_shards([Path(path) for path in snakemake.input.shards], Path(snakemake.output[0]))
