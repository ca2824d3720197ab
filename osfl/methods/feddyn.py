"""FedDyn: FedAvg with a dynamic regularizer."""

from osfl.methods.iterative import baseline

METHOD = baseline("feddyn")
