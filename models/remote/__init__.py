"""Files that lie elsewhere: addresses, the stores behind them, and the cache of verified copies."""
