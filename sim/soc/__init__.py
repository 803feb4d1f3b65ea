"""The accelerator in a simulator: memory and bus models, driver."""
