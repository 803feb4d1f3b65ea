"""Where the pages of windows lie."""

from amaranth.hdl import Array, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.control import POSITION_BITS
from kvant.hw.parameters import check_integer
from kvant.hw.soc.axi import word_address_bits
from kvant.hw.soc.axi_reader import Region, read_word
from kvant.hw.soc.cache_memory import PAGE_NUMBER_BYTES
from kvant.hw.soc.parameters import SocParameters


class PageTable(wiring.Component):
    """Looks up the pages of windows, one after the other.

    The number of a page is multiplied with the words of a page bit by bit of the latter, which is a constant of some
    ten bits. Page numbers are not checked: addresses wrap at the end of what the port reaches.

    Parameters
    ----------
    p : SocParameters
    page_bytes : int
        Of a page of keys, of a page of values.
    clients : int

    Members
    -------
    table, pool, values : in
        Word addresses of table and pool, and which of the two sizes pages have; constant while anything is asked for.
    windows : in streams
        Numbers of windows, of each client; the next one is taken when the one before is answered.
    known, base : out
        For a cycle, the answer for a client: word address of its page.
    region : out stream
        To an `AxiReader`.
    words : in stream
        From there.
    failed : out
        A word came back with an error: there are no answers until reset.
    """

    def __init__(self, p: SocParameters, page_bytes: tuple[int, int], clients: int):
        self.p = p
        self.page_words = tuple(size // p.port_bytes for size in page_bytes)
        self.clients = check_integer("clients", clients, 1)
        address = word_address_bits(p)
        super().__init__(
            {
                "table": In(address),
                "pool": In(address),
                "values": In(1),
                "windows": In(stream.Signature(POSITION_BITS)).array(clients),
                "known": Out(1).array(clients),
                "base": Out(address),
                "region": Out(stream.Signature(Region(p))),
                "words": In(stream.Signature(read_word(p))),
                "failed": Out(1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        lanes = p.port_bytes // PAGE_NUMBER_BYTES
        lane_bits = lanes.bit_length() - 1
        bits = max(words.bit_length() for words in self.page_words)
        client, window = Signal(range(max(2, self.clients))), Signal(POSITION_BITS)
        word = Signal(p.port_bits)
        number, total = Signal(word_address_bits(p)), Signal(word_address_bits(p))
        factor, step = Signal(bits), Signal(range(bits + 1))
        numbers = Array(word.word_select(lane, 8 * PAGE_NUMBER_BYTES) for lane in range(lanes))
        m.d.comb += [
            self.region.payload.address.eq(self.table + (window >> lane_bits)),
            self.region.payload.words.eq(1),
            self.base.eq(total),
        ]
        with m.FSM():
            with m.State("IDLE"):
                for index, asked in reversed(list(enumerate(self.windows))):
                    with m.If(asked.valid):
                        m.d.sync += [client.eq(index), window.eq(asked.payload)]
                        m.next = "ASK"
            with m.State("ASK"):
                m.d.comb += self.region.valid.eq(1)
                with m.If(self.region.ready):
                    m.next = "WORD"
            with m.State("WORD"):
                m.d.comb += self.words.ready.eq(~self.failed)
                m.d.sync += word.eq(self.words.payload.data)
                with m.If(self.words.valid & self.words.ready):
                    m.d.sync += self.failed.eq(self.words.payload.error)
                    with m.If(~self.words.payload.error):
                        m.next = "NUMBER"
            with m.State("NUMBER"):
                m.d.sync += [
                    number.eq(numbers[window[:lane_bits]] if lane_bits else word),
                    total.eq(0),
                    factor.eq(Mux(self.values, *reversed(self.page_words))),
                    step.eq(bits),
                ]
                m.next = "MULTIPLY"
            with m.State("MULTIPLY"):
                m.d.sync += [
                    total.eq((total << 1) + Mux(factor[-1], number, 0)),
                    factor.eq(factor << 1),
                    step.eq(step - 1),
                ]
                with m.If(step == 1):
                    m.next = "ADD"
            with m.State("ADD"):
                m.d.sync += total.eq(total + self.pool)
                m.next = "ANSWER"
            with m.State("ANSWER"):
                for index, asked in enumerate(self.windows):
                    with m.If(client == index):
                        m.d.comb += [asked.ready.eq(1), self.known[index].eq(1)]
                m.next = "IDLE"
        return m
