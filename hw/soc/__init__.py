"""The accelerator around the engines: registers, memory port, sequencer of descriptors."""
