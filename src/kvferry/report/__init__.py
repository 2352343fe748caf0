"""Report stage: tables and figures from evaluation records, probes and manifests. Knows no torch and runs no model."""
