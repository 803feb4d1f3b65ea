"""Staged rows of a cache along time: written row by row, read channel by channel."""

from amaranth.hdl import Cat, Module, Mux, Signal, signed
from amaranth.lib import data, memory, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.parameters import ParameterError


def rotate(m: Module, lanes: list, amount, name: str) -> list:
    """*lanes*, a power of two of them, moved up by *amount* places; what leaves at the top enters at the bottom."""
    for bit in range(len(lanes).bit_length() - 1):
        moved = []
        for k in range(len(lanes)):
            lane = Signal.like(lanes[0], name=f"{name}_{bit}_{k}")
            m.d.comb += lane.eq(Mux(amount[bit], lanes[k - (1 << bit)], lanes[k]))
            moved.append(lane)
        lanes = moved
    return lanes


class WindowBuffer(wiring.Component):
    """INT8 elements in as many banks as a transfer has lanes, skewed.

    Channel c of row r is in bank ``(c + r) % lanes``: a transfer of a row is written in one cycle, and as many
    consecutive rows of one channel are read in one cycle, each bank at its own address. The rows of a head are a ring;
    row r of the transfer ("word") w of a head has the address ``(head * p.row_transfers + w) * ring_rows + r`` in its
    banks. `ring_rows` is a multiple of the lanes, and rows are read from a multiple on, so that rows that are read
    together never wrap round.

    One reading per cycle. The caller guarantees that no row is read that is written in that cycle.

    Parameters
    ----------
    p : CacheParameters
    ring_rows : int
        Rows of a head's ring, a multiple of `p.lanes`.

    Attributes
    ----------
    write_latency : int
        Cycles from a write until a reading sees it.
    read_latency : int
        Cycles from a reading to its elements.

    Members
    -------
    write, write_address, write_q : in
        A transfer of a row at its address.
    read : in
        Read in this cycle.
    read_row : in
        Elements of one row (the row at the address) instead of one channel (`p.lanes` rows from the address on,
        a multiple of the lanes).
    read_address, read_lane : in
        Address, and channel modulo lanes.
    q : out
        Lane k is lane k of the row, or row k of the channel.
    """

    write_latency = 2
    read_latency = 4

    def __init__(self, p: CacheParameters, ring_rows: int):
        if ring_rows % p.lanes:
            raise ParameterError(f"ring_rows = {ring_rows}: legal are the multiples of lanes = {p.lanes}")
        self.p = p
        self.ring_rows = ring_rows
        self.depth = p.heads * p.row_transfers * ring_rows
        self.lane_bits = p.lanes.bit_length() - 1
        address = range(max(2, self.depth))
        lanes = data.ArrayLayout(signed(8), p.lanes)
        super().__init__(
            {
                "write": In(1),
                "write_address": In(address),
                "write_q": In(lanes),
                "read": In(1),
                "read_row": In(1),
                "read_address": In(address),
                "read_lane": In(range(p.lanes)),
                "q": Out(lanes),
            }
        )

    def elaborate(self, platform):
        p, bits = self.p, self.lane_bits
        m = Module()
        register = Pipeline(m).register

        # `ring_rows` is a multiple of the lanes: the low bits of an address are those of the row.
        write, read = Signal(), Signal()
        m.d.sync += [write.eq(self.write), read.eq(self.read)]
        write_address = register(self.write_address, "write_address")
        rotated = rotate(m, list(self.write_q), self.write_address[:bits], "write")
        rotated = [register(lane, "write_lane") for lane in rotated]

        # Reading, cycle 0: bank b holds lane b - row of a row, or row b - channel of a channel.
        block = register(self.read_address[bits:], "read_block")
        rows = []
        for bank in range(p.lanes):
            row = Signal(range(p.lanes), name=f"read_row_{bank}")
            m.d.comb += row.eq(Mux(self.read_row, self.read_address[:bits], bank - self.read_lane))
            rows.append(register(row, "read_row"))
        turn = Signal(range(p.lanes))
        m.d.comb += turn.eq(-Mux(self.read_row, self.read_address[:bits], self.read_lane))
        turn = register(turn, "turn", cycles=3)

        # Cycle 1: the banks. Cycle 2: their answers, which are slow, into registers. Cycle 3: turned back.
        answers = []
        for bank in range(p.lanes):
            storage = memory.Memory(shape=signed(8), depth=max(2, self.depth), init=[], attrs={"no_rw_check": 1})
            m.submodules[f"bank_{bank}"] = storage
            write_port, read_port = storage.write_port(), storage.read_port()
            m.d.comb += [
                write_port.addr.eq(write_address),
                write_port.data.eq(rotated[bank]),
                write_port.en.eq(write),
                read_port.addr.eq(Cat(rows[bank], block)),
                read_port.en.eq(read),
            ]
            answers.append(register(read_port.data, "answer"))
        for lane, value in enumerate(rotate(m, answers, turn, "read")):
            m.d.comb += self.q[lane].eq(register(value, "q"))
        return m
