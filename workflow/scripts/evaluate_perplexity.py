"""Prefix perplexity of a pair through its further mappers and through a cache of zeros."""

from pathlib import Path

from kvferry.evaluate.controls import ZeroCache
from kvferry.evaluate.run import Contestant, make_plan, run_plan
from kvferry.job import job
from kvferry.kv.handoff import Handoff
from kvferry.kv.mapper import load_mapper
from kvferry.prepare.models import load_model
from kvferry.records import PERPLEXITY, ZERO_CACHE

pair = snakemake.wildcards.pair
with job(f"{snakemake.rule} {pair}", snakemake.log[0], snakemake.threads):
    compute = snakemake.params.project["compute"]
    source, target = (
        load_model(Path(card).parent, compute["device"], compute["dtype"])
        for card in (snakemake.input.source, snakemake.input.target)
    )
    carriers = {ZERO_CACHE: (ZeroCache.like(target.card), ZERO_CACHE)}
    for path in snakemake.input.mappers:
        mapper, manifest = load_mapper(Path(path).parent, source.card, target.card)
        carriers[Path(path).parent.name] = (mapper.to(target.model.device), manifest["weights_sha256"])
    for name, (carrier, checksum) in carriers.items():
        system = Handoff(source.model, target.model, carrier, snakemake.params.project["evaluation"]["native_head"])
        who = Contestant(system, name, target.card["model"], source.card["model"], pair)
        identity = {"mapper": checksum, "source": source.card["weights_id"]}
        output = {PERPLEXITY: snakemake.output[name]}
        corpus = Path(snakemake.input.corpus)
        plan = make_plan(snakemake.params.project, None, corpus, output, target, identity)
        run_plan(who, target.tokenizer, plan)
