# Tables and figures, from records, cards and manifests alone.

RESULT_PARAMS = {"project": config, "pairs": PROJECT.pairs}
FROM_RECORDS = [
    figure
    for figure in figures_of(PROJECT.config)
    if not figure.startswith(("fig2_", "fig5_"))
]


rule tables:
    input:
        all_results(),
        paper=sorted((BASE / "resources" / "paper").glob("*.[cy]*")),
        code=code(*REPORT_CODE),
    output:
        [
            report(
                RESULTS / "tables" / f"{table}.csv",
                caption=f"../report/{table}.rst",
                category=category(table),
                labels=labels(table),
            )
            for table in TABLES
        ],
        expand(RESULTS / "tables" / "{table}.{kind}", table=TABLES, kind=["md", "tex"]),
    log:
        LOGS / "report/tables.log",
    conda:
        ENVIRONMENT
    resources:
        runtime=minutes("report"),
    params:
        **RESULT_PARAMS,
        tables=TABLES,
    message:
        said("Tables, see {log}")
    script:
        "../scripts/tables.py"


rule fig2_r2_heatmap:
    input:
        probe=rules.probe.output.probe,
        code=code(
            "report/figures/heatmap", "report/style", "report/inputs", "report/names"
        ),
    output:
        FIGURES / "fig2_r2_heatmap_{pair}.pdf",
        report(
            FIGURES / "fig2_r2_heatmap_{pair}.png",
            caption="../report/fig2_r2_heatmap.rst",
            category=category("fig2_r2_heatmap"),
            labels=labels("fig2_r2_heatmap", "{pair}"),
        ),
        FIGURES / "fig2_r2_heatmap_{pair}.csv",
    log:
        LOGS / "report/fig2_r2_heatmap_{pair}.log",
    conda:
        ENVIRONMENT
    resources:
        runtime=minutes("report"),
    message:
        said("Heat map of {wildcards.pair}, see {log}")
    script:
        "../scripts/heatmap.py"


rule fig5_greedy_r2:
    input:
        greedy=[
            pair_file(pair, "greedy.csv")
            for pair in config.get("greedy", {}).get("pairs", [])
        ],
        code=code(*REPORT_CODE),
    output:
        FIGURES / "fig5_greedy_r2.pdf",
        report(
            FIGURES / "fig5_greedy_r2.png",
            caption="../report/fig5_greedy_r2.rst",
            category=category("fig5_greedy_r2"),
            labels=labels("fig5_greedy_r2"),
        ),
        FIGURES / "fig5_greedy_r2.csv",
    log:
        LOGS / "report/fig5_greedy_r2.log",
    conda:
        ENVIRONMENT
    resources:
        runtime=minutes("report"),
    message:
        said("Figure of the greedy choice, see {log}")
    script:
        "../scripts/greedy_figure.py"


rule figures:
    input:
        all_results(),
        code=code(*REPORT_CODE),
    output:
        [
            report(
                FIGURES / f"{figure}.png",
                caption=f"../report/{figure}.rst",
                category=category(figure),
                labels=labels(figure),
            )
            for figure in FROM_RECORDS
        ],
        expand(FIGURES / "{figure}.{kind}", figure=FROM_RECORDS, kind=["pdf", "csv"]),
    log:
        LOGS / "report/figures.log",
    conda:
        ENVIRONMENT
    resources:
        runtime=minutes("report"),
    params:
        **RESULT_PARAMS,
        figures={figure: str(FIGURES / figure) for figure in FROM_RECORDS},
    message:
        said("Figures, see {log}")
    script:
        "../scripts/figures.py"


rule words:
    input:
        all_results(),
        code=code(*REPORT_CODE),
    output:
        RESULTS / "headline.txt",
        [
            report(
                RESULTS / "verdict" / f"{pair}.md",
                category=SUMMARY,
                labels={"number": "Page", "subject": "verdict", "pair": pair},
            )
            for pair in config["pairs"]
        ],
    log:
        LOGS / "report/words.log",
    conda:
        ENVIRONMENT
    resources:
        runtime=minutes("report"),
    params:
        **RESULT_PARAMS,
    message:
        said("Headline and verdicts, see {log}")
    script:
        "../scripts/words.py"
