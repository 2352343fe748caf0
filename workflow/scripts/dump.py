"""Dump the KV cache of one model for the calibration sequences."""

from pathlib import Path

from kvferry.job import job
from kvferry.kv.dump import write_dump
from kvferry.prepare.calibration import Draw, draw_sequences
from kvferry.prepare.corpora import read_corpus
from kvferry.prepare.models import load_model

how, compute = snakemake.params.calibration, snakemake.params.compute
with job(f"dump {snakemake.wildcards.model}", snakemake.log[0], snakemake.threads):
    documents = read_corpus(Path(snakemake.input.corpus))
    loaded = load_model(Path(snakemake.input.card).parent, compute["device"], compute["dtype"])
    counts = {"fit": how["sequences"], "held_out": how["held_out"]}
    sequences = {
        side: draw_sequences(documents, loaded.tokenizer, Draw(side, count, how["length"], how["seed"]), how["corpus"])
        for side, count in counts.items()
    }
    write_dump(
        loaded.model,
        loaded.card,
        sequences,
        how,
        Path(snakemake.output[0]).parent,
        row_weights=snakemake.params.row_weights,
    )
