"""Mutation testing: `python -m benchmarks.mutants`."""
