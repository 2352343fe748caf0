# A mapper a variant.


rule fit:
    input:
        moments=rules.moments.output,
        selection=rules.probe.output.selection,
        source=source(dump_of),
        target=target(dump_of),
        code=code("kv/mapper", "fit/moments", "fit/selection", "fit/ridge"),
    output:
        RESULTS / "pairs" / "{pair}" / "mappers" / "{variant}" / "manifest.json",
    log:
        LOGS / "fit/{pair}/{variant}.log",
    benchmark:
        TIMINGS / "fit/{pair}/{variant}.tsv"
    priority: 10
    conda:
        ENVIRONMENT
    threads: config["compute"]["threads"]
    resources:
        mem_mb=2500,
    params:
        recipe=lambda wildcards: PROJECT.variant(wildcards.variant),
    script:
        "../scripts/fit.py"
