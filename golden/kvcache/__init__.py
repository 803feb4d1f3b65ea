"""Caches of quantised keys and values, bit for bit as the hardware holds them."""
