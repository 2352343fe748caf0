"""kvferry: move the KV cache that one model computed to another model of its family, and measure what that keeps and saves.

Data flows one way: prepare → kv → fit → evaluate → report. A package imports only from those before it, and from the
small modules beside this file (errors, files, records, config, provenance, progress). Nothing here knows Snakemake.
"""

__version__ = "0.1.0"
