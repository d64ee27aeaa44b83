"""Predictions for many requests: batches, execution plans, captured graphs, kernels, device memory."""
