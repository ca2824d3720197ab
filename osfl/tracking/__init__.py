"""Runs in trackers of experiments: TensorBoard and MLflow, by their own libraries."""
