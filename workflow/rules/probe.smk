# One pass over two dumps gives the moments; the probe, the ranking of layers and most mappers come from those.

FIT_CODE = ["kv/dump", "kv/marked", "kv/rope", "fit/moments", "fit/rows", "fit/weights"]
FIT_CODE += ["fit/pair", "fit/budget"]


rule moments:
    input:
        pair=RESULTS / "pairs" / "{pair}" / "tokenizer.json",
        source=source(dump_of),
        target=target(dump_of),
        code=code(*FIT_CODE),
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
        mem_mb=needing(lambda wildcards: memory.moments_mb(PROJECT, wildcards.pair)),
        gpu=FIT_GPU,
        runtime=minutes("fit"),
    params:
        how=lambda wildcards: work.moments_of(PROJECT, wildcards.pair),
        device=FIT_DEVICE,
    message:
        said("Sums over the rows of {wildcards.pair}, see {log}")
    script:
        "../scripts/moments.py"


rule probe:
    input:
        moments=rules.moments.output,
        code=code(*FIT_CODE, "fit/probe", "fit/selection"),
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
        mem_mb=needing(lambda wildcards: memory.probe_mb(PROJECT, wildcards.pair)),
        runtime=minutes("fit"),
    message:
        said("R² of every two layers of {wildcards.pair}, see {log}")
    script:
        "../scripts/probe.py"


rule greedy:
    input:
        moments=rules.moments.output,
        code=code(*FIT_CODE, "fit/greedy", "fit/ridge"),
    output:
        RESULTS / "pairs" / "{pair}" / "greedy.csv",
    log:
        LOGS / "probe/{pair}/greedy.log",
    benchmark:
        TIMINGS / "probe/{pair}/greedy.tsv"
    conda:
        ENVIRONMENT
    threads: config["compute"]["threads"]
    resources:
        mem_mb=needing(lambda wildcards: memory.moments_mb(PROJECT, wildcards.pair)),
        runtime=minutes("fit"),
    params:
        how=config.get("greedy"),
    message:
        said("Greedy choice of layers of {wildcards.pair}, see {log}")
    script:
        "../scripts/greedy.py"
