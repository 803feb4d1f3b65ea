"""Boards, devices and the open synthesis flow: from a component to area, clock and bitstream."""
