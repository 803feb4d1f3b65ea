"""Product-quantised keys and values: codebooks, their training, codes, table look-up and binned values."""
