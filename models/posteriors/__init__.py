"""Distributions over the weights of one layer: their protocol, laws, factors, draws and KL."""
