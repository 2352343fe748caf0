"""Write all tables."""

from pathlib import Path

from kvferry.job import job
from kvferry.report.inputs import Results
from kvferry.report.tables import TABLES, write_table

with job(snakemake.rule, snakemake.log[0]):
    config = snakemake.params.project
    directory = Path(config["results"])
    results = Results.load(directory, config, snakemake.params.pairs)
    for name in snakemake.params.tables:
        write_table(TABLES[name](results), directory / "tables" / name)
