"""Attention: softmax in base 2, INT8 rows, normalised outputs."""
