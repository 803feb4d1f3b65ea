"""Exact cycle count of the linear path, without simulating it.

Holds for streams that are always ready; the tests hold it equal to the RTL. Cycle 0 of a job is the one of its first
transfer of activations and weights.
"""

from dataclasses import dataclass

import numpy as np

from kvant.hw.linear.jobs import JobNumbers, plan
from kvant.hw.linear.parameters import LinearParameters, ceil_div
from kvant.hw.linear.tile_loop import COUNT_WIDTH
from kvant.hw.linear.timing import LinearTiming


@dataclass(frozen=True)
class Cycles:
    """Cycle counts of a matrix product.

    Attributes
    ----------
    total : int
        First activation or weight transfer to last output transfer.
    busy : int
        Cycles in which at least one lane works.
    utilisation : float
        Multiply-accumulates over ``total * rows * cols``.
    """

    total: int
    busy: int
    utilisation: float


def linear_cycles(
    p: LinearParameters, *, tokens: int, inputs: int, outputs: int, int8_groups: np.ndarray | None = None
) -> Cycles:
    """Cycles of ``y[tokens, outputs] = x[tokens, inputs] @ w[outputs, inputs].T``.

    Parameters
    ----------
    p : LinearParameters
    tokens, inputs, outputs : int
    int8_groups : bool [outputs, ceil(inputs / group)], optional
        Which weight groups are INT8; none if not given.

    Raises
    ------
    ParameterError
        When the product does not fit the buffers, see `kvant.hw.linear.jobs.plan`.
    """
    jobs = plan(p, tokens=tokens, inputs=inputs, outputs=outputs)
    timing = LinearTiming(p)
    planes = np.ones((jobs[0].tiles, jobs[0].groups), np.int64)  # of each tile
    if int8_groups is not None and p.int8_groups:  # without their datapath they take a slot like any other
        padded = np.zeros((jobs[0].tiles * p.cols, jobs[0].groups), bool)
        padded[:outputs] = int8_groups
        planes += padded.reshape(jobs[0].tiles, p.cols, -1).any(axis=1)
    beats = np.full(jobs[0].groups, p.beats, np.int64)  # of a plane of each group
    beats[-1] = ceil_div(jobs[0].tail, p.rows)

    total = busy = 0
    for index, job in enumerate(jobs):
        if index:
            total += _gap(int(beats[-1]))
        total += _job(p, timing, job, planes, beats)
        busy += job.tokens * int((planes * beats).sum())
    return Cycles(total, busy, tokens * inputs * outputs / (total * p.lanes))


def _gap(tail_beats: int) -> int:
    """Cycles between the last output transfer of a job and the first transfers of the next.

    The output leaves the queue, the job ends, the next descriptor is taken; serial multiplication, verdict, beats of
    the tail, start.
    """
    return 3 + COUNT_WIDTH + 1 + tail_beats - 1 + 1


class _Slots:
    """Follows the slots of a job through the array, as the sequencer starts them.

    Attributes
    ----------
    free : int
        Earliest cycle in which the next slot can start.
    result : int
        Cycle in which the last slot's results leave the array, less the array's latency: that of its last beat, or
        `unit_cols` after the results before it.
    """

    def __init__(self, unit_cols: int):
        self.unit_cols = unit_cols
        self.free = 0
        self.result = -unit_cols

    def add(self, start: int, last_beat: int) -> None:
        """A slot that starts in cycle *start* and issues its last beat in *last_beat*."""
        self.result = max(last_beat, self.result + self.unit_cols)
        self.free = max(last_beat + 1, start + self.unit_cols)

    def add_equal(self, count: int, beats: int) -> None:
        """So many slots of so many beats behind each other, nothing missing."""
        if count:
            pitch = max(beats, self.unit_cols)
            last_beat = self.free + (count - 1) * pitch + beats - 1
            self.result = max(last_beat, self.result + count * self.unit_cols)
            self.free += count * pitch


def _job(p: LinearParameters, timing: LinearTiming, job: JobNumbers, planes: np.ndarray, beats: np.ndarray) -> int:
    """Cycles from the first input transfer of a job to its last output transfer."""
    head_delay = 3  # a complete tile passes a register and the queue of heads
    issued = (planes * beats).tolist()  # beats of a slot of [tile][group]
    tail = int(beats[-1])
    words = _word_ready(p, timing, job, beats)
    slots = _Slots(p.unit_cols)
    loaded = -1  # cycle of the last transfer of the tile
    for begin in range(0, job.tiles, job.interleave):
        tiles = range(begin, min(begin + job.interleave, job.tiles))
        between = job.tokens * len(tiles) - 1  # slots between two groups of one output
        wait = max(0, timing.spacing - between * max(tail, p.unit_cols) - tail)
        for group in range(job.groups):
            for tile in tiles:
                count = issued[tile][group]
                loaded += count
                if begin:
                    slots.add_equal(job.tokens, count)
                    continue
                slots.free = max(slots.free, loaded + head_delay)
                if tile > begin:
                    slots.add_equal(job.tokens, count)
                    continue
                for ready in words[group]:  # the first tile meets the activations as they come
                    start = max(slots.free, int(ready[0]))
                    late = int((ready - np.arange(len(ready))).max())
                    slots.add(start, max(start, late) + count - 1)
            slots.free += wait  # before the next round
    return slots.result + timing.output + p.unit_cols


def _word_ready(p: LinearParameters, timing: LinearTiming, job: JobNumbers, beats: np.ndarray) -> list[np.ndarray]:
    """Of each group of K the cycles [token, beat] from which on its activation words can be read."""
    sizes = np.full((job.groups, job.tokens), p.group)
    sizes[-1] = job.tail
    transfers = -(-sizes // p.x_lanes)  # of each activation group
    ends = np.cumsum(transfers.ravel())  # transfers of a group and all before it
    firsts = ends - transfers.ravel()
    # A transfer is quantised one cycle after the one before it, its group's first not before the group is complete.
    delay = np.maximum.accumulate(transfers.ravel() - 1)  # of first transfers; constant from the first group on
    quantised = firsts + delay + timing.quantizer
    parts = p.word_transfers
    ready = []
    for group in range(job.groups):
        start = quantised[group * job.tokens : (group + 1) * job.tokens, None]
        of_group = int(transfers[group, 0])
        completing = np.minimum((np.arange(beats[group]) + 1) * parts, of_group) - 1  # transfer that ends each word
        ready.append(start + completing + 3)  # to store the word, to announce it, to decide on it
    return ready
