"""What a model is worth on data, shifted data too, as tables, plots and an HTML page."""
