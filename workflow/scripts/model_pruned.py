"""Make a smaller model from another one."""

from pathlib import Path

from kvferry.job import job
from kvferry.prepare.corpora import read_corpus
from kvferry.prepare.pruning import prepare_pruned

name = snakemake.wildcards.model
with job(f"prune {name}", snakemake.log[0], snakemake.threads):
    documents = read_corpus(Path(snakemake.input.corpus))
    base, directory = (Path(card).parent for card in (snakemake.input.base, snakemake.output[0]))
    prepare_pruned(name, snakemake.params.entry, base, documents, directory)
