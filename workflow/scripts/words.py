"""Write what a run found in words: the headline of all pairs, and of each whether to use the transfer."""

from pathlib import Path

from kvferry.files import write_text
from kvferry.job import job
from kvferry.report.inputs import Results
from kvferry.report.summary import headline
from kvferry.report.verdict_page import write_pages

with job(snakemake.rule, snakemake.log[0]):
    config = snakemake.params.project
    directory = Path(config["results"])
    results = Results.load(directory, config, snakemake.params.pairs)
    places = (
        f"Tables: {directory}/tables   Figures: {config['figures']}   Mappers: {directory}/pairs\n"
        f"A page a pair, for whether to use the transfer: {directory}/verdict\n"
        "A report in one file, with captions: make report"
    )
    write_text(directory / "headline.txt", f"{headline(results)}\n\n{places}\n")
    write_pages(results, directory / "verdict")
