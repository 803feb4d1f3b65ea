"""Product quantisation: codebook engine, code words, score tables, value bins."""
