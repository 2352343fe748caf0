"""Answer what is asked of one model: on its own and, for a target, through its own cache."""

from pathlib import Path

from kvferry.evaluate.native import run_native
from kvferry.evaluate.pair import asked_of
from kvferry.evaluate.setting import make_setting
from kvferry.job import job
from kvferry.prepare.models import load_model

given = snakemake.params
with job(f"evaluate {given.model}", snakemake.log[0], snakemake.threads):
    compute = given.project["compute"]
    target = load_model(Path(snakemake.input.target).parent, compute["device"], compute["dtype"])
    identity = [Path(path).parent for path in snakemake.input.get("identity", [])]
    setting = make_setting(given.project, given.rows, Path(snakemake.input.corpus), target)
    run_native(setting, asked_of(given.asked), *identity)
