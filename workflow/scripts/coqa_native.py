"""Answer conversations turn by turn with one model on its own."""

from pathlib import Path

from kvferry.evaluate.coqa import run_native
from kvferry.evaluate.setting import make_setting
from kvferry.job import job
from kvferry.prepare.models import load_model

given = snakemake.params
with job(f"coqa {given.model}", snakemake.log[0], snakemake.threads):
    compute = given.project["compute"]
    target = load_model(Path(snakemake.input.target).parent, compute["device"], compute["dtype"])
    setting = make_setting(given.project, given.rows, Path(snakemake.input.corpus), target)
    run_native(setting, given.project["coqa"], Path(snakemake.output[0]))
