"""Commands of the attention engine: what they say, and what follows from them."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, enum, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.cache_reader import ReaderJob
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.kvcache.parameters import BLOCK_GROUPS
from kvant.hw.linear.parameters import ceil_div


class KeyFormat(enum.Enum, shape=2):
    """How keys are cached: M-ANT groups along the head, INT8 rows, M-ANT groups along time."""

    MANT = 0
    INT8 = 1
    MANT_TIME = 2


def attention_command(p: AttentionParameters) -> data.StructLayout:
    """What a command says.

    Members
    -------
    queries : 1 .. p.queries
    tokens : 1 .. p.tokens
        Keys in the cache.
    sinks : 0 .. the lesser of p.sinks and `tokens`
    key_format
        `KeyFormat`; along time only with `AttentionParameters.time_keys`.
    int8_values : 1
        The cache of values holds INT8 rows.
    head : 8
        For whoever serves the streams; not used here.
    """
    return data.StructLayout(
        {
            "queries": range(p.queries + 1),
            "tokens": range(p.tokens + 1),
            "sinks": range(p.sinks + 2),
            "key_format": KeyFormat,
            "int8_values": 1,
            "head": 8,
        }
    )


class CommandPlan(data.StructLayout):
    """A legal command, and the numbers of its jobs.

    Members
    -------
    command : `attention_command`
    int8_keys, time_keys : 1
        The format of the keys.
    windows
        Windows of the values that are M-ANT.
    windowed
        Tokens in them.
    sink_blocks, staged_blocks
        INT8 blocks of the sinks; of the open window of keys along time.
    key_tiles, key_pages
        Tiles of all tokens; pages, or INT8 blocks, of keys.
    key_windows
        Windows of keys along time.
    """

    def __init__(self, p: AttentionParameters):
        windows = range(p.tokens // p.group + 1)
        super().__init__(
            {
                "command": attention_command(p),
                "int8_keys": 1,
                "time_keys": 1,
                "windows": windows,
                "windowed": range(p.tokens + 1),
                "sink_blocks": range(p.sink_blocks + 2),
                "staged_blocks": range(p.staged_blocks + 1),
                "key_tiles": range(ceil_div(p.tokens, p.cols) + 1),
                "key_pages": dict(iter(ReaderJob(p)))["pages"].shape,
                "key_windows": windows,
            }
        )


class CommandQueue(wiring.Component):
    """Takes a command while another one is under way, and drops those that are out of range.

    Parameters
    ----------
    p : AttentionParameters

    Members
    -------
    cmd : in stream
        data : `attention_command`.
    o : out stream
        `CommandPlan`.
    refused : out
        In this cycle a command is dropped.
    idle : out
        There is no command here.
    """

    def __init__(self, p: AttentionParameters):
        self.p = p
        super().__init__(
            {
                "cmd": In(stream.Signature(data.StructLayout({"data": attention_command(p)}))),
                "o": Out(stream.Signature(CommandPlan(p))),
                "refused": Out(1),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        plan = self.o.payload
        command = Signal(attention_command(p), reset_less=True)
        group_bits, head_bits = (p.group - 1).bit_length(), (p.head_groups - 1).bit_length()
        column_bits, block_bits = (p.cols - 1).bit_length(), (BLOCK_GROUPS - 1).bit_length()

        def ceil_shift(value, bits):
            """``ceil(value / 2^bits)``."""
            return (value + ((1 << bits) - 1)) >> bits

        int8_keys = command.key_format == KeyFormat.INT8
        time_keys = command.key_format == KeyFormat.MANT_TIME if p.time_keys else Const(0)
        formats = [KeyFormat.MANT, KeyFormat.INT8, *([KeyFormat.MANT_TIME] if p.time_keys else [])]
        legal = Signal()
        m.d.comb += legal.eq(
            (command.queries != 0)
            & (command.queries <= p.queries)
            & (command.tokens != 0)
            & (command.tokens <= p.tokens)
            & (command.sinks <= p.sinks)
            & (command.sinks <= command.tokens)
            & Cat(command.key_format == one for one in formats).any()
        )
        tokens = command.tokens
        groups = ceil_shift(tokens << head_bits, block_bits)
        with m.FSM():
            with m.State("COMMAND"):
                m.d.comb += [self.cmd.ready.eq(1), self.idle.eq(1)]
                m.d.sync += command.eq(self.cmd.payload.data)
                with m.If(self.cmd.valid):
                    m.next = "CHECK"
            with m.State("CHECK"):
                m.d.comb += self.refused.eq(~legal)
                m.d.sync += [
                    plan.command.eq(command),
                    plan.int8_keys.eq(int8_keys),
                    plan.time_keys.eq(time_keys),
                    plan.windows.eq(Mux(command.int8_values, 0, tokens >> group_bits)),
                    plan.windowed.eq(Mux(command.int8_values, 0, Cat(Const(0, group_bits), tokens[group_bits:]))),
                    plan.sink_blocks.eq(ceil_shift(command.sinks << head_bits, block_bits)),
                    plan.staged_blocks.eq(Mux(time_keys, ceil_shift(tokens[:group_bits] << head_bits, block_bits), 0)),
                    plan.key_tiles.eq(ceil_shift(tokens, column_bits)),
                    plan.key_pages.eq(
                        Mux(time_keys, tokens >> group_bits, Mux(int8_keys, groups, ceil_shift(tokens, group_bits)))
                    ),
                    plan.key_windows.eq(tokens >> group_bits),
                ]
                with m.If(legal):
                    m.next = "PLAN"
                with m.Else():
                    m.next = "COMMAND"
            with m.State("PLAN"):
                m.d.comb += self.o.valid.eq(1)
                with m.If(self.o.ready):
                    m.next = "COMMAND"
        return m
