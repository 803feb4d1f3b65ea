"""Cache blocks in a simulator: tensors in, tensors out."""
