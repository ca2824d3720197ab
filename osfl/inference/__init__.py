"""Use of a run's models outside the run: load them, predict, evaluate."""
