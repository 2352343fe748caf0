"""Write the table that a run ends with."""

from pathlib import Path

from kvferry.files import write_text
from kvferry.job import job
from kvferry.report.inputs import Results
from kvferry.report.summary import headline

with job("headline", snakemake.log[0]):
    config = snakemake.params.project
    results = Results.load(Path(config["results"]), config, snakemake.params.pairs)
    places = (
        f"Tables: {config['results']}/tables   Figures: {config['figures']}   Mappers: {config['results']}/pairs\n"
        "A report in one file, with captions: make report"
    )
    write_text(Path(snakemake.output[0]), f"{headline(results)}\n\n{places}\n")
