"""What stops a client of the sequencer."""

from amaranth.lib import data


class Fault(data.StructLayout):
    """What stopped a client: an `ErrorCode`, 0 for nothing, and the place of its job among those under way."""

    def __init__(self):
        super().__init__({"code": 8, "slot": 1})
