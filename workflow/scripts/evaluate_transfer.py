"""Answer everything with a target that reads on from the mapped cache of a source."""

from pathlib import Path

from kvferry.evaluate.run import Contestant, make_plan, run_plan
from kvferry.job import job
from kvferry.kv.handoff import Handoff
from kvferry.kv.mapper import load_mapper
from kvferry.prepare.models import load_model

pair = snakemake.wildcards.pair
with job(f"{snakemake.rule} {pair}", snakemake.log[0], snakemake.threads):
    compute = snakemake.params.project["compute"]
    source, target = (
        load_model(Path(card).parent, compute["device"], compute["dtype"])
        for card in (snakemake.input.source, snakemake.input.target)
    )
    directory = Path(snakemake.input.mapper).parent
    mapper, manifest = load_mapper(directory, source.card, target.card)
    system = Handoff(
        source.model,
        target.model,
        mapper.to(target.model.device),
        snakemake.params.project["evaluation"]["native_head"],
    )
    who = Contestant(system, directory.name, target.card["model"], source.card["model"], pair)
    identity = {"mapper": manifest["weights_sha256"], "source": source.card["weights_id"]}
    corpus, outputs = Path(snakemake.input.corpus), dict(snakemake.output.items())
    plan = make_plan(snakemake.params.project, snakemake.params.rows, corpus, outputs, target, identity)
    run_plan(who, target.tokenizer, plan)
