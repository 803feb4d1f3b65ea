"""Compiled models: designs that Verilator turns into a shared library with a C++ loop, for whole layers and models."""
