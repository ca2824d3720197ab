"""Differential privacy at the client: mechanisms, DP-SGD, and the ledger of what was spent."""
