"""Accuracy of methods, training and sampling."""
