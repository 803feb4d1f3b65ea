"""Attention in the integers and fp32 numbers of the hardware: softmax in base 2, INT8 rows, normalised outputs."""
