"""What a cache in memory is asked to do."""

from amaranth.lib import data

from kvant.hw.kvcache.control import POSITION_BITS
from kvant.hw.soc.axi import word_address_bits
from kvant.hw.soc.parameters import TopParameters

TOKEN_BITS = 16
"""Bits of the number of rows of a job."""


class CacheJob(data.StructLayout):
    """New rows of a sequence, for one layer, KV head and side.

    Members
    -------
    values : 1
        Values, cached along time; else keys, cached along the head.
    first : 1
        The sequence begins; only with the position 0.
    tokens : 16
        New rows, from 1.
    stride
        Words from a row to the next.
    position : 32
        Of the first new row.
    rows
        Word address of the first new row; of values, of the first row of its window.
    pool, table, record, calibration
        Word addresses; see `kvant.hw.soc.cache_memory`.
    slot : 1
        Of its descriptor among those under way.
    """

    def __init__(self, p: TopParameters):
        address = word_address_bits(p.soc)
        super().__init__(
            {
                "values": 1,
                "first": 1,
                "tokens": TOKEN_BITS,
                "stride": address,
                "position": POSITION_BITS,
                "rows": address,
                "pool": address,
                "table": address,
                "record": address,
                "calibration": address,
                "slot": 1,
            }
        )
