# kvferry: cross-model KV cache transfer, from models to every figure and table. The stages, in order:
from snakemake.utils import min_version

min_version("9.0")

if not workflow.configfiles:

    configfile: "config/config.yaml"


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"
include: "workflow/rules/prepare.smk"
include: "workflow/rules/dump.smk"
include: "workflow/rules/probe.smk"
include: "workflow/rules/fit.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/measure.smk"
include: "workflow/rules/report.smk"


rule all:
    default_target: True
    input:
        all_tables(),
        all_figures(),
        all_verdicts(),
        RESULTS / "headline.txt",
    message:
        said("Everything is there")
