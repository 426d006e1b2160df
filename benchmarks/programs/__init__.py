"""Ordinary programs for `python -m benchmarks --programs`: none of them knows of SMC-R."""
