"""Predictions for many requests: batches, executions and plans, graphs, kernels, device memory."""
