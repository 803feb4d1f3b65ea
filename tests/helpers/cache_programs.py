"""Host programs that use the caches and the attention of the accelerator."""

from dataclasses import dataclass, replace

import numpy as np

from kvant.hw.soc.descriptors import Descriptor, Flag, Opcode
from kvant.sim.soc.caches import Caches
from kvant.sim.soc.driver import Accelerator, AcceleratorError

MEMORY = range(0xE00, 1 << 17)
FILL = 0xA5


@dataclass(frozen=True)
class Calibrated:
    """What is calibrated for a head: tables of keys and of values, the floor of the values."""

    keys: tuple
    values: tuple
    floor: np.ndarray


@dataclass(frozen=True)
class Append:
    """Keys and values f16 [H, T, d] for a sequence."""

    sequence: int
    k: np.ndarray
    v: np.ndarray


@dataclass(frozen=True)
class Attend:
    """Queries f16 [H, n, d] over a sequence, and the options of `kvant.sim.soc.caches.Sequence.attend`."""

    sequence: int
    q: np.ndarray
    options: dict


def setup(host, heads, sequences, *, windows, pages, seed=0):
    """Caches whose pages are handed out in a random order, and empty sequences."""
    host.write_memory(MEMORY.start, bytes([FILL]) * (len(MEMORY) // 2))
    accelerator = Accelerator(host, MEMORY)
    caches = Caches(accelerator, len(heads), pages)
    np.random.default_rng(seed).shuffle(caches.free_pages)
    for number, head in enumerate(heads):
        caches.calibrate(number, head.keys, head.values, floor=head.floor)
    return accelerator, caches, [caches.sequence(windows) for _ in range(sequences)]


def conversations(host, heads, sequences, steps, windows=4, pages=12):
    """Steps one after the other; outputs of all queries, counters, and the fields of ERROR."""
    accelerator, _, running = setup(host, heads, sequences, windows=windows, pages=pages)
    results = []
    for step in steps:
        sequence = running[step.sequence]
        if isinstance(step, Append):
            sequence.append(step.k, step.v)
        else:
            results.append(sequence.attend(step.q, **step.options))
    return results, accelerator.counters(), accelerator.fields("ERROR")


def one_ring(host, heads, appends, attends, linear):
    """All appends, a layer, all attention in one run; outputs of the queries and of the layer."""
    accelerator, _, running = setup(host, heads, len(appends), windows=4, pages=12)
    descriptors, places = [], []
    for append in appends:
        sequence = running[append.sequence]
        descriptors += sequence.append_descriptors(append.k, append.v)
        sequence.appended(append.v)
    weights = accelerator.store_weights(linear["w_codes"], linear["w_scale"], linear["w_coeff"], linear["w_int8"])
    x = accelerator.store_rows(linear["x"])
    y = accelerator.allocate_rows(len(linear["x"]), 4 * weights.outputs)
    layer = accelerator.linear_descriptors(weights, len(linear["x"]), x, y)
    for attend in attends:
        more, rows = running[attend.sequence].attend_descriptors(attend.q, **attend.options)
        descriptors += [*more, *layer]
        places.append((rows, attend.q.shape))
    accelerator.run(descriptors)
    outputs = [np.stack([accelerator.load_rows(each, shape[1], shape[2]) for each in rows]) for rows, shape in places]
    return outputs, accelerator.load_rows(y, len(linear["x"]), weights.outputs), accelerator.counters()


class Scene:
    """A sequence with tokens, and descriptors that append one more and attend."""

    def __init__(self, host, heads, append, more, attend):
        self.host = host
        self.accelerator, self.caches, (self.sequence,) = setup(host, heads, 1, windows=4, pages=6)
        self.sequence.append(append.k, append.v)
        self.appends = self.sequence.append_descriptors(more.k, more.v)
        self.sequence.appended(more.v)
        self.attends, self.places = self.sequence.attend_descriptors(attend.q)
        self.shape = attend.q.shape

    def outputs(self):
        return np.stack([self.accelerator.load_rows(rows, *self.shape[1:]) for rows in self.places])

    def failure(self, descriptors):
        """What a run reports: code, index in the ring, field."""
        try:
            self.accelerator.run(descriptors)
        except AcceleratorError as error:
            return error.code, error.index, error.field
        return None

    def again(self):
        """Clear the errors and the ring, run all, give the outputs."""
        self.accelerator.recover()
        self.accelerator.clear_ring()
        self.accelerator.run([*self.appends, *self.attends])
        return self.outputs()


def bad_descriptors(host, heads, append, more, attend):
    """Descriptors that are not legal: each with what was reported and whether memory was touched; the end of it."""
    scene = Scene(host, heads, append, more, attend)
    accelerator = scene.accelerator
    cache, query = scene.appends[1], scene.attends[0]  # values of the first head
    step, address_bits = accelerator.p.soc.port_bytes, accelerator.p.soc.address_bits
    bad = [
        (replace(cache, flags=cache.flags | Flag.X_STREAM), 1),
        (replace(query, flags=Flag.VALUES), 1),
        (replace(cache, tokens=0), cache.kind.offset("tokens")),
        (replace(cache, flags=cache.flags | Flag.FIRST), cache.kind.offset("position")),
        (replace(cache, position=(1 << 32) - cache.tokens + 1), cache.kind.offset("position")),
        (replace(query, queries=0), query.kind.offset("queries")),
        (replace(query, queries=accelerator.attention.queries + 1), query.kind.offset("queries")),
        (replace(query, tokens=0), query.kind.offset("tokens")),
        (replace(query, tokens=accelerator.attention.tokens + 1), query.kind.offset("tokens")),
        (replace(query, sinks=scene.caches.layout.record.sinks + 1), query.kind.offset("sinks")),
        (replace(query, tokens=1, sinks=2), query.kind.offset("sinks")),
    ]
    for each in (cache, query):
        for field in each.kind.fields:
            if field.rule.name in ("ADDRESS", "STRIDE"):
                bad.append((replace(each, **{field.name: getattr(each, field.name) + step // 2}), field.offset))
            if field.rule.name == "ADDRESS":
                bad.append((replace(each, **{field.name: 1 << address_bits}), field.offset))
    for each, at in ((cache, 2), (cache, 12), (cache, 63), (query, 3)):
        raw = bytearray(each.encode())
        raw[at] = 1
        bad.append((bytes(raw), {12: 12, 63: 56}.get(at, 2)))
    reports = []
    for each, field in bad:
        before, reads = bytearray(host.memory.data), len(host.memory.reads)
        report = scene.failure([each])
        at = accelerator.ring_address
        end = at + accelerator.ring * 64
        before[at:end] = host.memory.data[at:end]
        asked = [address for address, _ in host.memory.reads[reads:] if not at <= address < end]
        reports.append((repr(each), report, field, before != host.memory.data or bool(asked)))
        accelerator.recover()
        accelerator.clear_ring()
    return reports, scene.again()


def bus_errors(host, heads, append, more, attend):
    """The memory answers one access with an error; of each kind what was reported, and outputs after recovery."""
    scene = Scene(host, heads, append, more, attend)
    memory, layout = host.memory, scene.caches.layout
    keys, values, query = scene.appends[0], scene.appends[1], scene.attends[0]
    page, step = scene.sequence.pages[-1], scene.accelerator.p.soc.port_bytes
    places = {
        "cache rows": ("read", keys.rows),
        "cache table": ("read", keys.table),
        "cache calibration": ("read", values.calibration),
        "cache page": ("write", keys.pool + page * layout.keys.page_bytes),
        "cache record": ("write", values.record + layout.record.value_window.offset),
        "queries": ("read", query.q),
        "attend page": ("read", query.key_pool + scene.sequence.pages[0] * layout.keys.page_bytes),
        "attend record": ("read", query.record),
        "outputs": ("write", query.out),
    }
    reports = {}
    for name, (kind, place) in places.items():
        memory.fault = lambda what, at, kind=kind, place=place: what == kind and place <= at < place + step
        report = scene.failure([*scene.appends, *scene.attends])
        head = scene.accelerator.read("RING_HEAD")
        memory.fault = lambda what, at: False
        reports[name] = (report, head, memory.busy, scene.again())
    return reports


def aborts(host, heads, append, more, attend, delays):
    """Abort after each delay, then all again: whether the port was quiet, and the outputs."""
    scene = Scene(host, heads, append, more, attend)
    accelerator, memory = scene.accelerator, host.memory
    results = []
    for delay in delays:
        accelerator.submit([*scene.appends, *scene.attends, Descriptor(Opcode.END)])
        accelerator.start()
        host.idle(delay)
        accelerator.command("abort")
        while accelerator.fields("STATUS")["draining"]:
            pass
        counts = len(memory.reads), len(memory.writes), memory.busy
        host.idle(200)
        quiet = counts == (len(memory.reads), len(memory.writes), False)
        results.append((delay, quiet, scene.again()))
    return results
