# Mappers: one job for all variants of a pair that are fitted on the same rows.

SOLVE_CODE = ["kv/mapper", "fit/selection", "fit/systems", "fit/ridge", "fit/mlp"]
SOLVE_CODE += ["fit/quality", "fit/artifact"]

for pair in config["pairs"]:
    for rows, variants in work.fit_jobs(PROJECT, pair).items():
        corpus = PROJECT.variant(variants[0])["corpus"]

        rule:
            name:
                rule_name("fit", pair, rows)
            input:
                selection=pair_file(pair, "selection.json"),
                moments=(
                    [
                        pair_file(pair, "moments.safetensors"),
                        pair_file(pair, "moments.json"),
                    ]
                    if rows == work.main_rows(PROJECT)
                    else []
                ),
                source=dump_of(PROJECT.pair(pair)["source"], corpus),
                target=dump_of(PROJECT.pair(pair)["target"], corpus),
                code=code(*FIT_CODE, *SOLVE_CODE),
            output:
                [manifest(pair, variant) for variant in variants],
            log:
                LOGS / f"fit/{pair}/{rows}.log",
            benchmark:
                TIMINGS / f"fit/{pair}/{rows}.tsv"
            priority: 10
            conda:
                ENVIRONMENT
            threads: config["compute"]["threads"]
            resources:
                mem_mb=needing(memory.fit_mb(PROJECT, pair, rows)),
                gpu=FIT_GPU,
                runtime=minutes("fit"),
            params:
                how={
                    "pair": pair,
                    "rows": rows,
                    "recipes": {v: PROJECT.recipe(pair, v) for v in variants},
                    "memory_mb": config["fit"]["memory_mb"],
                    "device": FIT_DEVICE,
                },
            message:
                said(
                    f"Fitting {pair}: {len(variants)} mapper(s) on the rows {rows}, see {{log}}"
                )
            script:
                "../scripts/fit.py"
