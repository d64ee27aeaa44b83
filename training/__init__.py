"""From data to an artifact one can trust: data sets, the fit loop, calibration, evaluation and recipes."""
