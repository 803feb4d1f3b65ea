"""What goes in and out of the ring of fp16 rows of a product-quantised cache, and the sizes of the ring."""

from amaranth.lib import data

from kvant.hw.pq.parameters import PqParameters


class RingShape:
    """Sizes of the memory of rows.

    A *context* is a head of keys or of values: ``store * heads + head``. Each has room for `ring_rows` rows of the
    history, and behind these for the sinks of its sequence.

    Parameters
    ----------
    p : PqParameters

    Attributes
    ----------
    contexts : int
    ring_rows : int
        Rows of the history that a context holds: the recent ones, a batch that is being coded, and one that fills up
        meanwhile.
    context_rows : int
        Rows of a context, sinks included.
    words : int
        Words of `lanes` elements in the memory.
    jobs : int
        Batches that may be under way at once. A context without `flush` never has more than two.

    Raises
    ------
    ParameterError
        When a cache cannot be built of *p*.
    """

    def __init__(self, p: PqParameters):
        p.check_pq()
        self.contexts = 2 * p.heads
        self.ring_rows = p.recent + 2 * p.batch_tokens
        self.context_rows = self.ring_rows + p.sinks
        self.words = self.contexts * self.context_rows * p.row_transfers
        self.jobs = 2 * self.contexts


class RowUser(data.StructLayout):
    """What is said of a row, in its first transfer.

    Members
    -------
    start : 1
        First row of a sequence of this head and store.
    flush : 1
        Code all rows up to this one but the `recent` newest, a partial batch too.
    store : 1
        0: keys, 1: values.
    head : 8
    """

    def __init__(self):
        super().__init__({"start": 1, "flush": 1, "store": 1, "head": 8})


def row_input(p: PqParameters) -> data.StructLayout:
    """Payload of the port of rows: `lanes` fp16 elements, any, and a `RowUser`."""
    return data.StructLayout({"data": data.ArrayLayout(16, p.lanes), "user": RowUser()})


class EncodeJob(data.StructLayout):
    """A batch of rows to code.

    Members
    -------
    count : 1 .. batch_tokens
    scale : 16
        fp16 scale of the codebook.
    store : 1
    head : 8
    first : 0 .. tokens - 1
        Index in the history (tokens after the sinks) of the first row, a multiple of `PqParameters.chunk_tokens`.
    """

    def __init__(self, p: PqParameters):
        super().__init__(
            {
                "count": range(p.batch_tokens + 1),
                "scale": 16,
                "store": 1,
                "head": 8,
                "first": range(max(2, p.tokens)),
            }
        )


def batch_rows(p: PqParameters) -> data.StructLayout:
    """Payload of the rows of batches: `lanes` finite fp16 elements (surplus ones are 0), the end of the row."""
    return data.StructLayout({"data": data.ArrayLayout(16, p.lanes), "last": 1})


class ReplayRequest(data.StructLayout):
    """Rows to read beside what is coded.

    Members
    -------
    store : 1
    head : 8
    history : 0 .. tokens
        Coded tokens that the reader takes from memory.
    """

    def __init__(self, p: PqParameters):
        super().__init__({"store": 1, "head": 8, "history": range(p.tokens + 1)})


class RingStatus(data.StructLayout):
    """What is known of a head and store; all but `scale` are 0 without a sequence.

    Members
    -------
    open : 1
        There is a sequence.
    tokens : 0 .. sinks + tokens + ring_rows
        Rows of the sequence, sinks included.
    coded : 0 .. tokens
        Tokens of the history whose codes are complete in memory.
    queued : 0 .. tokens
        And those whose batches are under way. A function of the rows alone, whatever the engine's speed.
    scale : 16
        fp16 scale of the codebook.
    """

    def __init__(self, p: PqParameters, shape: RingShape):
        super().__init__(
            {
                "open": 1,
                "tokens": range(p.sinks + p.tokens + shape.ring_rows + 1),
                "coded": range(p.tokens + 1),
                "queued": range(p.tokens + 1),
                "scale": 16,
            }
        )
