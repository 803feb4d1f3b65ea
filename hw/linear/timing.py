"""Latencies of the linear path, from its parameters alone."""

from kvant.hw.linear.accumulate import GroupAccumulator
from kvant.hw.linear.array import LinearArray
from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.numeric.int8_quantizer import Int8Quantizer


class LinearTiming:
    """Cycles between events of the linear path; the engine is built by them, the cycle model counts by them.

    Attributes
    ----------
    quantizer : int
        From the transfer that ends an activation group to the group's first quantised transfer.
    first_word : int
        From the transfer that ends an activation group to its first word at the port xq.
    output : int
        From the issue of a slot's last beat to its first output transfer, the receiver being ready.
    slot : int
        From the start of a slot of most beats to its last output transfer.
    spacing : int
        Fewest cycles between two groups of one output.
    """

    def __init__(self, p: LinearParameters):
        buffers = 1  # they answer one cycle after they are asked
        queue = 3  # of outputs, and a register
        self.quantizer = Int8Quantizer.latency_of(p.x_lanes)
        self.first_word = self.quantizer + p.word_transfers
        self.output = buffers + LinearArray.latency_of(p) + GroupAccumulator.latency + queue
        self.slot = p.tile_beats + self.output + p.unit_cols
        self.spacing = GroupAccumulator.loop_latency
