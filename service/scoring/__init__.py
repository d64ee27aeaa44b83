"""`dubito score`: predictions for every row of a file or folder, written as Parquet; what is done survives a kill."""
