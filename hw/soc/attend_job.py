"""A job of the attention unit."""

from amaranth.lib import data

from kvant.hw.soc.axi import word_address_bits
from kvant.hw.soc.parameters import TopParameters


class AttendJob(data.StructLayout):
    """Queries over the cache of a sequence and KV head; see the fields of `kvant.hw.soc.descriptors.ATTEND`.

    Addresses and strides count words of the port. `slot` is the job's place among those under way.
    """

    def __init__(self, p: TopParameters):
        attention = p.attention
        address = word_address_bits(p.soc)
        super().__init__(
            {
                "queries": range(attention.queries + 1),
                "tokens": range(attention.tokens + 1),
                "sinks": range(attention.sinks + 2),
                **dict.fromkeys(("query_stride", "out_stride"), 16),
                **dict.fromkeys(("q", "key_pool", "value_pool", "table", "record", "out"), address),
                "slot": 1,
            }
        )
