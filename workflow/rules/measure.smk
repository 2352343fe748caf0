# What is measured beside benchmarks: conversations, where errors are, times, and what tokens that the target reads itself bring.

MEASURE_CODE = EVALUATION_CODE + ["evaluate/mapped", "evaluate/clock"]
COQA_CODE = ["evaluate/coqa", "evaluate/conversations", "evaluate/dialogue"]
COQA_CODE += ["evaluate/material", "evaluate/f1"]
MEASURED = EVALUATION["project"] | {
    section: config.get(section)
    for section in ("calibration", "coqa", "diagnostics", "latency", "native_tokens")
}


def pair_outputs(pair, names):
    """Record paths by variant; `names` are those of each variant."""
    return {
        variant: {name: str(record(of_pair(pair)(variant), name)) for name in own}
        for variant, own in names.items()
    }


def dialogue_outputs(pair):
    """Records of the variants that go on with conversations."""
    return pair_outputs(pair, asked.dialogues(PROJECT, pair))


def diagnosed_outputs(pair):
    """Records of the variants that are diagnosed."""
    variants = asked.diagnosed_variants(PROJECT, pair)
    return pair_outputs(pair, dict.fromkeys(variants, asked.DIAGNOSTICS))


def mappers_back(pair):
    """Manifests of the mappers the other way by variant, where that is a pair of conversations too."""
    back = asked.reverse_of(PROJECT, pair)
    ways = {
        v: asked.variant_back(PROJECT, pair, v)
        for v in asked.dialogue_variants(PROJECT, pair)
    }
    return {v: manifest(back, own) for v, own in ways.items()} if back else {}


def both_ways(pair):
    """Recipes of all mappers of a pair's conversations, those back too."""
    return recipes(pair, asked.dialogue_variants(PROJECT, pair)) * (
        2 if mappers_back(pair) else 1
    )


def headline_record(pair, name):
    """A record of the headline."""
    return record(of_pair(pair)(PROJECT.headline(pair)), name)


def headline_head(pair):
    """How many first tokens the target reads itself with the headline."""
    return PROJECT.variant(PROJECT.headline(pair))["native_head"]


def every(outputs):
    return [path for own in outputs.values() for path in own.values()]


def cards_of(pair):
    """The cards of both models of a pair."""
    return {role: card(PROJECT.pair(pair)[role]) for role in ("source", "target")}


for model in asked.dialogue_models(PROJECT):

    rule:
        name:
            rule_name("coqa_model", model)
        input:
            **ROWS,
            target=card(model),
            corpus=corpus_file(config["perplexity"]["corpus"]),
            code=code(*MEASURE_CODE, *COQA_CODE),
        output:
            record(of_model(model)(NATIVE), COQA),
        log:
            LOGS / f"coqa/native/{model}.log",
        benchmark:
            TIMINGS / f"coqa/native/{model}.tsv"
        conda:
            ENVIRONMENT
        threads: config["compute"]["threads"]
        resources:
            mem_mb=needing(memory.conversations_mb(PROJECT, {DEVICE: model}, [])),
            gpu=GPU,
            runtime=minutes("evaluate"),
        params:
            project=MEASURED,
            rows=EVALUATION["rows"],
            model=model,
        message:
            said(f"Conversations of {model}, see {{log}}")
        script:
            "../scripts/coqa_native.py"


for pair in config.get("coqa", {}).get("pairs", []):

    rule:
        name:
            rule_name("coqa_pair", pair)
        input:
            **ROWS,
            **cards_of(pair),
            corpus=corpus_file(config["perplexity"]["corpus"]),
            mappers=[manifest(pair, v) for v in asked.dialogue_variants(PROJECT, pair)],
            back=list(mappers_back(pair).values()),
            code=code(*MEASURE_CODE, *COQA_CODE),
        output:
            every(dialogue_outputs(pair)),
        log:
            LOGS / f"coqa/pairs/{pair}.log",
        benchmark:
            TIMINGS / f"coqa/pairs/{pair}.tsv"
        conda:
            ENVIRONMENT
        threads: config["compute"]["threads"]
        resources:
            mem_mb=needing(
                memory.conversations_mb(PROJECT, models_of(pair), both_ways(pair))
            ),
            gpu=PAIR_GPU,
            runtime=minutes("evaluate"),
        params:
            project=MEASURED,
            rows=EVALUATION["rows"],
            pair=pair,
            records=dialogue_outputs(pair),
            heads=native_heads(pair, asked.dialogue_variants(PROJECT, pair)),
            back=list(mappers_back(pair)),
        message:
            said(f"Conversations of {pair}, see {{log}}")
        script:
            "../scripts/coqa_pair.py"


for pair in config["pairs"] if "diagnostics" in config else []:

    rule:
        name:
            rule_name("diagnose", pair)
        input:
            **ROWS,
            **cards_of(pair),
            corpus=corpus_file(config["calibration"]["corpus"]),
            mappers=[manifest(pair, v) for v in asked.diagnosed_variants(PROJECT, pair)],
            code=code(
                *MEASURE_CODE,
                "kv/attention",
                "evaluate/diagnose",
                "evaluate/diagnostics",
            ),
        output:
            every(diagnosed_outputs(pair)),
        log:
            LOGS / f"diagnose/{pair}.log",
        benchmark:
            TIMINGS / f"diagnose/{pair}.tsv"
        conda:
            ENVIRONMENT
        threads: config["compute"]["threads"]
        resources:
            mem_mb=needing(
                memory.texts_mb(
                    PROJECT,
                    models_of(pair),
                    recipes(pair, asked.diagnosed_variants(PROJECT, pair)),
                    config["calibration"]["length"],
                )
            ),
            gpu=PAIR_GPU,
            runtime=minutes("evaluate"),
        params:
            project=MEASURED,
            rows=EVALUATION["rows"],
            pair=pair,
            records=diagnosed_outputs(pair),
            heads=native_heads(pair, asked.diagnosed_variants(PROJECT, pair)),
        message:
            said(f"Attention and errors of {pair}, see {{log}}")
        script:
            "../scripts/diagnose.py"


for pairs in asked.timed_together(PROJECT):

    rule:
        name:
            rule_name("latency", pairs[0])
        input:
            sources=[card(PROJECT.pair(pair)["source"]) for pair in pairs],
            targets=[card(PROJECT.pair(pair)["target"]) for pair in pairs],
            mappers=[manifest(pair, PROJECT.headline(pair)) for pair in pairs],
            code=code(*MEASURE_CODE, "evaluate/latency"),
        output:
            [headline_record(pair, LATENCY) for pair in pairs],
        log:
            LOGS / f"latency/{pairs[0]}.log",
        benchmark:
            TIMINGS / f"latency/{pairs[0]}.tsv"
        conda:
            ENVIRONMENT
        threads: config["latency"]["threads"]
        resources:
            mem_mb=needing(
                memory.latency_mb(
                    PROJECT,
                    models_of(pairs[0]),
                    [PROJECT.recipe(pair, PROJECT.headline(pair)) for pair in pairs],
                )
            ),
            gpu=PAIR_GPU,
            runtime=minutes("evaluate"),
        params:
            project=MEASURED,
            pairs=pairs,
            headlines={pair: PROJECT.headline(pair) for pair in pairs},
            heads={pair: headline_head(pair) for pair in pairs},
        message:
            said(f"Times of {pairs[0]}, see {{log}}")
        script:
            "../scripts/latency.py"


for pair in config.get("native_tokens", {}).get("pairs", []):

    rule:
        name:
            rule_name("native_tokens", pair)
        input:
            **cards_of(pair),
            corpus=corpus_file(config["perplexity"]["corpus"]),
            mapper=manifest(pair, PROJECT.headline(pair)),
            code=code(*MEASURE_CODE, "evaluate/native_tokens", "evaluate/latency"),
        output:
            [
                headline_record(pair, name)
                for name in (NATIVE_TOKENS, NATIVE_TOKENS_TIME)
            ],
        log:
            LOGS / f"native_tokens/{pair}.log",
        benchmark:
            TIMINGS / f"native_tokens/{pair}.tsv"
        conda:
            ENVIRONMENT
        threads: config["compute"]["threads"]
        resources:
            mem_mb=needing(
                memory.native_tokens_mb(
                    PROJECT, models_of(pair), recipes(pair, [PROJECT.headline(pair)])
                )
            ),
            gpu=PAIR_GPU,
            runtime=minutes("evaluate"),
        params:
            project=MEASURED,
            pair=pair,
            variant=PROJECT.headline(pair),
            head=headline_head(pair),
        message:
            said(f"Native tokens of {pair}, see {{log}}")
        script:
            "../scripts/native_tokens.py"
