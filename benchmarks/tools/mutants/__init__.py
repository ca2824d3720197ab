"""Mutation testing: `python -m benchmarks.tools.mutants`."""
