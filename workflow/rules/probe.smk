# One pass over two dumps gives the moments; the probe, the ranking of layers and every ridge mapper come from those.


rule moments:
    input:
        source=source(dump_of),
        target=target(dump_of),
        code=code("kv/dump", "kv/rope", "fit/moments"),
    output:
        RESULTS / "pairs" / "{pair}" / "moments.safetensors",
        RESULTS / "pairs" / "{pair}" / "moments.json",
    log:
        LOGS / "probe/{pair}/moments.log",
    benchmark:
        TIMINGS / "probe/{pair}/moments.tsv"
    priority: 10
    conda:
        ENVIRONMENT
    threads: config["compute"]["threads"]
    resources:
        mem_mb=3500,
    script:
        "../scripts/moments.py"


rule probe:
    input:
        moments=rules.moments.output,
        code=code("fit/moments", "fit/probe", "fit/selection"),
    output:
        probe=RESULTS / "pairs" / "{pair}" / "probe.csv",
        selection=RESULTS / "pairs" / "{pair}" / "selection.json",
    log:
        LOGS / "probe/{pair}/probe.log",
    benchmark:
        TIMINGS / "probe/{pair}/probe.tsv"
    priority: 10
    conda:
        ENVIRONMENT
    threads: config["compute"]["threads"]
    resources:
        mem_mb=2500,
    script:
        "../scripts/probe.py"
