# Tables and figures, from records, cards and manifests alone.

RESULT_PARAMS = {"project": config, "pairs": PROJECT.pairs}

for table in TABLES:

    rule:
        name:
            table
        input:
            all_results(),
            paper=sorted((BASE / "resources" / "paper").glob("*.csv")),
            code=code(*REPORT_CODE),
        output:
            report(
                RESULTS / "tables" / f"{table}.csv",
                caption=f"../report/{table}.rst",
                category="Tables",
                labels={"table": table},
            ),
            RESULTS / "tables" / f"{table}.md",
            RESULTS / "tables" / f"{table}.tex",
        log:
            LOGS / f"report/{table}.log",
        conda:
            ENVIRONMENT
        params:
            **RESULT_PARAMS,
            table=table,
        script:
            "../scripts/table.py"


rule fig2_r2_heatmap:
    input:
        probe=rules.probe.output.probe,
        code=code("report/figures", "report/style", "report/inputs"),
    output:
        FIGURES / "fig2_r2_heatmap_{pair}.pdf",
        report(
            FIGURES / "fig2_r2_heatmap_{pair}.png",
            caption="../report/fig2_r2_heatmap.rst",
            category="Figures",
            labels={"figure": "fig2_r2_heatmap", "pair": "{pair}"},
        ),
        FIGURES / "fig2_r2_heatmap_{pair}.csv",
    log:
        LOGS / "report/fig2_r2_heatmap_{pair}.log",
    conda:
        ENVIRONMENT
    script:
        "../scripts/heatmap.py"


rule fig8_retention:
    input:
        all_results(),
        code=code(*REPORT_CODE),
    output:
        FIGURES / "fig8_retention.pdf",
        report(
            FIGURES / "fig8_retention.png",
            caption="../report/fig8_retention.rst",
            category="Figures",
            labels={"figure": "fig8_retention", "pair": "all"},
        ),
        FIGURES / "fig8_retention.csv",
    log:
        LOGS / "report/fig8_retention.log",
    conda:
        ENVIRONMENT
    params:
        **RESULT_PARAMS,
    script:
        "../scripts/figure.py"


rule headline:
    input:
        all_results(),
        code=code(*REPORT_CODE),
    output:
        RESULTS / "headline.txt",
    log:
        LOGS / "report/headline.log",
    conda:
        ENVIRONMENT
    params:
        **RESULT_PARAMS,
    script:
        "../scripts/headline.py"
