"""A network of Bayesian layers: geometry, layers, joint draws, executions, and the linearised network."""
