"""FedAvg: the mean of the clients' models in every round."""

from dataclasses import replace

from osfl.methods.iterative import baseline

METHOD = replace(baseline("fedavg"), averages=True)
