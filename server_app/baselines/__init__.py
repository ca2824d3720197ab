"""FedAvg and its kin, which OSFL compares with: `strategy(job)` of each, run by `run_rounds`."""
