"""Evaluate: systems answering lm-eval benchmarks and prefix perplexity."""
