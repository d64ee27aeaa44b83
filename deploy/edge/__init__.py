"""The compact model as ONNX, still Bayesian: its graph, its check, and a runtime without torch."""
