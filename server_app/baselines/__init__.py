"""Iterative (multi-round) FL baselines: each has `strategy(job)`, which `run_rounds` runs."""
