"""Differential privacy at the client: mechanisms, DP-SGD, and the ledger of spent epsilon."""
