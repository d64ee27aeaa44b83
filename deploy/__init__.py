"""Where a model runs: the edge (ONNX), and what watches a server."""
