"""Host programs for the accelerator."""

from dataclasses import replace

import numpy as np

from kvant.hw.linear.parameters import ceil_div
from kvant.hw.soc.descriptors import LINEAR, Descriptor, ErrorCode, Flag, Opcode
from kvant.sim.soc.driver import Accelerator, AcceleratorError, BusError

MEMORY = range(0xE00, 1 << 17)
"""Not a multiple of 4 KB, so that bursts have to be cut."""


def weights_of(accelerator, case, **options):
    """The weights of a case in memory."""
    return accelerator.store_weights(case["w_codes"], case["w_scale"], case["w_coeff"], case["w_int8"], **options)


def layers(host, cases, interleaves=()):
    """Linear layers, one after the other; their outputs, all counters, and the bursts that began at 4 KB."""
    accelerator = Accelerator(host, MEMORY)
    results = []
    for number, case in enumerate(cases):
        interleave = interleaves[number] if interleaves else None
        weights = weights_of(accelerator, case, interleave=interleave)
        results.append(accelerator.linear(weights, case["x"]))
    bursts = [] if host.memory is None else host.memory.reads
    return results, accelerator.counters(), sum(address % 4096 == 0 for address, _ in bursts)


def register_walk(host):
    """Every register through its bus; what was unlike the description."""
    accelerator = Accelerator(host, MEMORY)
    problems = []
    registers = accelerator.registers
    known = {register.offset for register in registers}
    for address in (0x1C, 0x3C, 0x54, 0x7C, 0xC0, 0x100, 0x200, 0x800, 0xFFC):
        assert address not in known
        for access in (host.read32, lambda at: host.write32(at, 0xFFFFFFFF)):
            try:
                access(address)
                problems.append(f"{address:#x} was answered")
            except BusError:
                pass
    before = accelerator.read("RING_BASE_HI")
    host.write_any(registers["RING_BASE_HI"].offset + 1, b"\x12\x34")
    if accelerator.read("RING_BASE_HI") != before & 0xFF0000FF | 0x341200:
        problems.append("bytes of RING_BASE_HI")
    for name in ("ID", "SHAPE", "STATUS"):
        before = accelerator.read(name)
        accelerator.write(name, 0xFFFFFFFF)
        if accelerator.read(name) != before:
            problems.append(f"{name} was written")
    return problems, accelerator.fields("STATUS"), accelerator.p


def _transfers(p, x):
    """Activations as the port takes them: group by group of K, token by token, groups in whole transfers."""
    raw = b""
    for first in range(0, x.shape[1], p.group):
        part = x[:, first : first + p.group]
        raw += np.pad(part, ((0, 0), (0, -part.shape[1] % p.x_lanes))).tobytes()
    return raw


def _columns(p, raw, keep, tokens, outputs):
    """Outputs of the stream as [T, N]; see `kvant.sim.linear.engine.collect`."""
    values = np.frombuffer(raw, np.float32).reshape(-1, tokens, p.unit_cols, p.units)
    kept = np.array(keep).reshape(-1, 4)[:, 0].reshape(values.shape)
    values, kept = (each.transpose(1, 0, 3, 2).reshape(tokens, len(each), -1) for each in (values, kept))
    assert kept[..., : p.cols].reshape(tokens, -1)[:, :outputs].all()
    return values[..., : p.cols].reshape(tokens, -1)[:, :outputs]


def streams(host, case):
    """The same layer from and to streams, in all four ways."""
    accelerator = Accelerator(host, MEMORY)
    weights = weights_of(accelerator, case)
    p = accelerator.p.linear
    tokens, outputs = len(case["x"]), weights.outputs
    results = []
    for x_stream in (False, True):
        for y_stream in (False, True):
            x = None if x_stream else accelerator.store_rows(case["x"])
            y = None if y_stream else accelerator.allocate_rows(tokens, 4 * outputs)
            descriptors = accelerator.linear_descriptors(weights, tokens, x, y)
            assert len(descriptors) == 1
            if x_stream:
                host.send_x(_transfers(p, case["x"]))
            accelerator.run(descriptors)
            if y_stream:
                results.append(_columns(p, *host.receive_y(), tokens, outputs))
            else:
                results.append(accelerator.load_rows(y, tokens, outputs))
    return results


class Three:
    """Three equal layers in memory, and descriptors that put them into three places."""

    def __init__(self, host, case):
        self.host = host
        self.accelerator = accelerator = Accelerator(host, MEMORY)
        self.tokens, self.outputs = len(case["x"]), len(case["w_codes"])
        self.weights = [weights_of(accelerator, case) for _ in range(3)]
        self.x = [accelerator.store_rows(case["x"]) for _ in range(3)]
        self.y = [accelerator.allocate_rows(self.tokens, 4 * self.outputs) for _ in range(3)]
        self.end = accelerator.mark()
        self.descriptors = []
        for weights, x, y in zip(self.weights, self.x, self.y, strict=True):
            self.descriptors += accelerator.linear_descriptors(weights, self.tokens, x, y)
        assert len(self.descriptors) == 3

    def outputs_of(self):
        return [self.accelerator.load_rows(y, self.tokens, self.outputs) for y in self.y]

    def forget(self):
        """Fill all outputs with a pattern."""
        for y in self.y:
            self.host.write_memory(y.address, b"\xa5" * (y.stride * self.tokens))


def bus_errors(host, case):
    """The memory answers one access of the second layer with an error; of each kind: code, index, outputs before and
    after recovery, and whether the port owed anything."""
    three = Three(host, case)
    accelerator, memory = three.accelerator, host.memory
    ring = accelerator.ring_address
    step = accelerator.p.soc.port_bytes
    w, x, y = three.weights[1], three.x[1], three.y[1]
    places = {
        "descriptor": ("read", ring + 64),
        "first weights": ("read", w.address),
        "last weights": ("read", w.address + w.size - step),
        "first x": ("read", x.address),
        "last x": ("read", x.address + (three.tokens - 1) * x.stride),
        "first y": ("write", y.address),
        "last y": ("write", y.address + (three.tokens - 1) * y.stride),
    }
    reports = {}
    for name, (kind, place) in places.items():
        accelerator.bus.write32(accelerator.registers["RING_HEAD"].offset, 0)
        accelerator.tail = 0
        accelerator.write("RING_TAIL", 0)
        three.forget()
        memory.fault = lambda what, address, kind=kind, place=place: (what, address) == (kind, place)
        try:
            accelerator.run(three.descriptors)
            reports[name] = None
            continue
        except AcceleratorError as error:
            report = {"code": error.code, "index": error.index, "before": three.outputs_of()}
        report["owed"] = memory.busy
        report["head"] = accelerator.read("RING_HEAD")
        count = len(memory.writes), len(memory.reads)
        accelerator.start()  # a pending error keeps it from running
        host.idle(200)
        report["quiet"] = (len(memory.writes), len(memory.reads)) == count and not accelerator.fields("STATUS")[
            "running"
        ]
        memory.fault = lambda what, address: False
        accelerator.recover()
        accelerator.start()
        while not accelerator.wait()["idle"]:
            pass
        report["after"] = three.outputs_of()
        reports[name] = report
    return reports


def _with_bytes(descriptor, offset, value):
    raw = bytearray(descriptor.encode())
    raw[offset] = value
    return bytes(raw)


def bad_descriptors(host, case):
    """Of every kind of illegal descriptor, behind a legal one: what was reported and expected, and what was touched."""
    three = Three(host, case)
    accelerator = three.accelerator
    p, soc = accelerator.p.linear, accelerator.p.soc
    good = three.descriptors[1]
    at = {field.name: field.offset for field in LINEAR.all_fields}
    step = soc.port_bytes
    kinds = [(replace(good, opcode=code), ErrorCode.OPCODE, 0) for code in (0, 4, 5, 255)]
    kinds += [
        (replace(good, flags=16), ErrorCode.RESERVED, 1),
        (Descriptor(Opcode.END, flags=Flag.WAIT), ErrorCode.RESERVED, 1),
        (Descriptor(Opcode.FENCE, tokens=1), ErrorCode.RESERVED, 4),
        (_with_bytes(Descriptor(Opcode.END), 63, 1), ErrorCode.RESERVED, 4),
        (_with_bytes(good, 2, 1), ErrorCode.RESERVED, 2),
        (_with_bytes(good, 3, 128), ErrorCode.RESERVED, 2),
        (_with_bytes(good, 52, 1), ErrorCode.RESERVED, 52),
        (_with_bytes(good, 63, 128), ErrorCode.RESERVED, 52),
        (replace(good, weight_bytes=0), ErrorCode.SIZE, at["weight_bytes"]),
        (replace(good, weight_bytes=good.weight_bytes + 1), ErrorCode.ALIGNMENT, at["weight_bytes"]),
        (replace(good, tail=p.group + 1), ErrorCode.SIZE, at["tail"]),
        (replace(good, last_cols=p.cols + 1), ErrorCode.SIZE, at["last_cols"]),
        (replace(good, tokens=p.accumulators // good.interleave + 1, groups=1), ErrorCode.SIZE, at["interleave"]),
        (replace(good, groups=p.stored_groups // good.tokens + 1), ErrorCode.SIZE, at["groups"]),
        (replace(good, tokens=65535, groups=65535, interleave=65535), ErrorCode.SIZE, at["groups"]),
        (replace(good, flags=Flag.X_STREAM), ErrorCode.RESERVED, at["x"]),
        (replace(good, flags=Flag.X_STREAM, x=0), ErrorCode.RESERVED, at["x_stride"]),
        (replace(good, flags=Flag.Y_STREAM), ErrorCode.RESERVED, at["y"]),
        (replace(good, flags=Flag.Y_STREAM, y=0), ErrorCode.RESERVED, at["y_stride"]),
    ]
    for name in ("tokens", "groups", "tail", "tiles", "last_cols", "interleave"):
        kinds.append((replace(good, **{name: 0}), ErrorCode.SIZE, at[name]))
    for name in ("weights", "x", "y", "x_stride", "y_stride"):
        for low in {1, step >> 1}:
            kinds.append((replace(good, **{name: getattr(good, name) + low}), ErrorCode.ALIGNMENT, at[name]))
    for name in ("weights", "x", "y"):
        for bit in (soc.address_bits, 63):
            kinds.append((replace(good, **{name: getattr(good, name) + (1 << bit)}), ErrorCode.ADDRESS, at[name]))
    results = []
    for bad, code, field in kinds:
        three.forget()
        index = (accelerator.tail + 1) % accelerator.ring
        accelerator.submit([three.descriptors[0], bad, three.descriptors[2]])
        before = bytearray(host.memory.data)
        reads = len(host.memory.reads)
        accelerator.start()
        try:
            accelerator.wait()
            report = None
        except AcceleratorError as error:
            report = (error.code, error.index, error.field)
        first = three.y[0]
        span = slice(first.address, first.address + first.stride * three.tokens)
        done = bytes(host.memory.data[span])
        before[span] = done
        touched = before != host.memory.data
        others = [w.address for w in three.weights[1:]]
        read = [a for a, _ in host.memory.reads[reads:] if others[0] <= a < others[1] + three.weights[2].size]
        results.append((repr(bad), report, (code, index, field), touched, bool(read), done))
        accelerator.recover()
        accelerator.clear_ring()
    return results, three.outputs_of()[0]


def weight_lengths(host, case):
    """`weight_bytes` that do not fit the tiles: reports."""
    three = Three(host, case)
    accelerator = three.accelerator
    step = accelerator.p.soc.port_bytes
    reports = []
    for difference in (-step, step, 5 * step):
        good = three.descriptors[0]
        try:
            accelerator.run([replace(good, weight_bytes=good.weight_bytes + difference)])
            reports.append(None)
        except AcceleratorError as error:
            reports.append((error.code, error.field))
        accelerator.recover()
        accelerator.clear_ring()
    accelerator.run(three.descriptors)
    return reports, three.outputs_of()


def rings(host, case):
    """Ring registers that are not legal, and a doorbell beyond the ring: reports."""
    three = Three(host, case)
    accelerator = three.accelerator
    reports = []
    good = {"RING_COUNT": accelerator.ring, "RING_HEAD": 0, "RING_TAIL": 0, "RING_BASE_HI": 0}
    for name, value in (
        ("RING_COUNT", 0),
        ("RING_HEAD", accelerator.ring),
        ("RING_TAIL", accelerator.ring),
        ("RING_BASE_HI", 1),
    ):
        accelerator.write(name, value)
        accelerator.start()
        try:
            accelerator.wait()
            reports.append(None)
        except AcceleratorError as error:
            reports.append(error.code)
        for register, legal in good.items():
            accelerator.write(register, legal)
        accelerator.recover()
    accelerator.start()
    accelerator.write("RING_TAIL", 1000)
    try:
        accelerator.wait()
        reports.append(None)
    except AcceleratorError as error:
        reports.append(error.code)
    accelerator.write("RING_TAIL", 0)
    accelerator.recover()
    accelerator.run(three.descriptors)
    return reports, three.outputs_of(), len(host.memory.reads)


def abort(host, case, delays):
    """Abort after each delay, then run all again; outputs, and whether anything was owed."""
    three = Three(host, case)
    accelerator, memory = three.accelerator, host.memory
    results = []
    for delay in delays:
        three.forget()
        accelerator.submit([*three.descriptors, Descriptor(Opcode.END)])
        accelerator.start()
        host.idle(delay)
        accelerator.command("abort")
        while accelerator.fields("STATUS")["draining"]:
            pass
        state = accelerator.fields("STATUS")
        stopped = not state["running"] and not state["busy"]
        counts = len(memory.reads), len(memory.writes), memory.busy
        host.idle(300)
        quiet = counts == (len(memory.reads), len(memory.writes), False)
        head = accelerator.read("RING_HEAD")
        events = accelerator.fields("IRQ_STATUS")
        accelerator.recover()
        accelerator.start()
        while not accelerator.wait()["idle"]:
            pass
        results.append((stopped, quiet, head, events, three.outputs_of()))
    return results


def abort_streams(host, case):
    """Abort a job that waits for a stream that never comes, and one whose outputs nobody takes; then run."""
    accelerator = Accelerator(host, MEMORY)
    weights = weights_of(accelerator, case)
    tokens = len(case["x"])
    y = accelerator.allocate_rows(tokens, 4 * weights.outputs)
    states = []
    for _ in range(2):
        accelerator.submit(accelerator.linear_descriptors(weights, tokens, None, y))
        accelerator.start()
        host.idle(400)
        states.append(accelerator.fields("STATUS")["busy"])
        accelerator.command("abort")
        host.idle(100)
        states.append(accelerator.fields("STATUS"))
        accelerator.recover()
        accelerator.clear_ring()
    return states, accelerator.linear(weights, case["x"])


def stop_and_go(host, case):
    """Stop with three layers in the ring; what was done then, and after going on."""
    three = Three(host, case)
    accelerator = three.accelerator
    three.forget()
    accelerator.submit([*three.descriptors, Descriptor(Opcode.END)])
    accelerator.start()
    host.idle(150)
    accelerator.command("stop")
    first = accelerator.wait()
    head, between = accelerator.read("RING_HEAD"), three.outputs_of()
    accelerator.start()
    accelerator.wait()
    return first, head, between, three.outputs_of(), accelerator.read("RING_HEAD")


def interrupts(host, case):
    """Three layers, the second of which interrupts; a fence; the level of the interrupt line."""
    three = Three(host, case)
    accelerator = three.accelerator
    one, two, last = three.descriptors
    two = replace(two, flags=Flag.INTERRUPT)
    last = replace(last, flags=Flag.WAIT)
    levels = [host.irq]
    accelerator.submit([one, two, Descriptor(Opcode.FENCE), last])  # no END: it waits for more
    accelerator.start()
    events = [accelerator.wait()]
    host.idle(5)
    levels.append(host.irq)
    while accelerator.read("RING_HEAD") != 4:
        pass
    state = accelerator.fields("STATUS")
    done = three.outputs_of()
    accelerator.write("IRQ_ENABLE", 0)
    accelerator.submit([Descriptor(Opcode.FENCE, flags=Flag.INTERRUPT), Descriptor(Opcode.END)])
    while accelerator.fields("STATUS")["running"]:
        pass
    levels.append(host.irq)
    accelerator.write("IRQ_ENABLE", 1)
    host.idle(5)
    levels.append(host.irq)
    return events, levels, state, done, accelerator.counters()["DESCRIPTORS"]


def around_the_ring(host, case, rounds):
    """A ring of five places, used again and again."""
    accelerator = Accelerator(host, MEMORY, ring=5)
    weights = weights_of(accelerator, case)
    return [accelerator.linear(weights, case["x"]) for _ in range(rounds)], accelerator.read("RING_HEAD")


def reset_in_the_middle(host, case):
    """Reset while a layer runs, then a full run."""
    three = Three(host, case)
    three.accelerator.submit(three.descriptors)
    three.accelerator.start()
    host.idle(150)
    host.reset()
    return layers(host, [case])[0]


def back_to_back(host, case, count):
    """The same weights again and again: cycles of the last descriptors, and what they read."""
    accelerator = Accelerator(host, MEMORY, ring=2 * count)
    weights = weights_of(accelerator, case)
    x = accelerator.store_rows(case["x"])
    y = accelerator.allocate_rows(len(case["x"]), 4 * weights.outputs)
    descriptors = accelerator.linear_descriptors(weights, len(case["x"]), x, y)
    accelerator.run(descriptors * count)
    assert ceil_div(weights.size, accelerator.p.soc.port_bytes) > 0
    return accelerator.counters()


def flags_of_data(host, case, broken):
    """A layer with data that the engine complains about, then a sound one: flags of ERROR."""
    accelerator = Accelerator(host, MEMORY)
    seen = []
    for each in (broken, case, broken):
        accelerator.linear(weights_of(accelerator, each), each["x"])
        errors = accelerator.fields("ERROR")
        seen.append((errors["weights"], errors["nonfinite"]))
        accelerator.recover()
    return seen
