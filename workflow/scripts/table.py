"""Write one table."""

from pathlib import Path

from kvferry.job import job
from kvferry.report.inputs import Results
from kvferry.report.tables import TABLES, write_table

name = snakemake.params.table
with job(name, snakemake.log[0]):
    config = snakemake.params.project
    results = Results.load(Path(config["results"]), config, snakemake.params.pairs)
    write_table(TABLES[name](results), Path(snakemake.output[0]).with_suffix(""))
