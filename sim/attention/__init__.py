"""Benches of attention."""
