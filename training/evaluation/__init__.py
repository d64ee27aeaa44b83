"""Predictions on a data set and figures of their quality, on shifted data too, as tables, plots and an HTML page."""
