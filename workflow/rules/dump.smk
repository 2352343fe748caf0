# The KV cache of the calibration sequences, once a model. Shards lie beside the index and outlive a killed job.


rule dump:
    input:
        card=lambda wildcards: card(wildcards.model),
        corpus=lambda wildcards: corpus_file(wildcards.corpus),
        code=code(
            "prepare/calibration",
            "kv/cache",
            "kv/rope",
            "kv/dump",
            "kv/marked",
            "kv/attention",
        ),
    output:
        RESULTS / "kv" / "{model}" / "{corpus}" / "index.json",
    log:
        LOGS / "dump/{model}/{corpus}.log",
    benchmark:
        TIMINGS / "dump/{model}/{corpus}.tsv"
    priority: 10
    conda:
        ENVIRONMENT
    threads: config["compute"]["threads"]
    resources:
        mem_mb=needing(
            lambda wildcards: memory.dump_mb(
                PROJECT, wildcards.model, wildcards.corpus
            )
        ),
        gpu=GPU,
        runtime=minutes("dump"),
    params:
        calibration=lambda wildcards: work.calibration_on(PROJECT, wildcards.corpus),
        row_weights=lambda wildcards: work.weighs_attention(
            PROJECT, wildcards.model, wildcards.corpus
        ),
        compute=COMPUTE,
    message:
        said("Keys and values of {wildcards.model} on {wildcards.corpus}, see {log}")
    script:
        "../scripts/dump.py"
