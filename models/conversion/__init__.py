"""From any torch network to a Bayesian one: architectures, options by layer, where posteriors start."""
