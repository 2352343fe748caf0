"""Answer everything with one model: on its own, or through its own cache injected."""

from pathlib import Path

from kvferry.evaluate.controls import Passthrough
from kvferry.evaluate.run import Contestant, make_plan, run_plan
from kvferry.job import job
from kvferry.kv.handoff import Handoff, Native
from kvferry.prepare.models import load_model
from kvferry.records import NATIVE, NATIVE_INJECTED

name, injected = snakemake.wildcards.model, snakemake.rule == "evaluate_injected"
with job(f"{snakemake.rule} {name}", snakemake.log[0], snakemake.threads):
    compute = snakemake.params.project["compute"]
    loaded = load_model(Path(snakemake.input.target).parent, compute["device"], compute["dtype"])
    if injected:
        head = snakemake.params.project["evaluation"]["native_head"]
        system = Handoff(loaded.model, loaded.model, Passthrough(), head)
        who = Contestant(system, NATIVE_INJECTED, name, source=name)
    else:
        who = Contestant(Native(loaded.model), NATIVE, name)
    corpus, outputs = Path(snakemake.input.corpus), dict(snakemake.output.items())
    plan = make_plan(snakemake.params.project, snakemake.params.rows, corpus, outputs, loaded, {})
    run_plan(who, loaded.tokenizer, plan)
