"""Write the card of a model on the hub or in a local directory."""

from pathlib import Path

from kvferry.job import job
from kvferry.prepare.models import prepare_by_reference

name = snakemake.wildcards.model
with job(f"prepare {name}", snakemake.log[0]):
    prepare_by_reference(name, snakemake.params.entry, Path(snakemake.output[0]).parent)
