"""The fit loop and what it needs: batches, objective, ranks, checkpoints, logs, trial runs."""
