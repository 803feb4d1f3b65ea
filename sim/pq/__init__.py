"""Benches of the product-quantised cache and its attention."""
