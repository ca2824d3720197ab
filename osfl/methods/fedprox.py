"""FedProx: FedAvg with a proximal term."""

from dataclasses import replace

from osfl.methods.iterative import baseline

METHOD = replace(baseline("fedprox"), averages=True)
