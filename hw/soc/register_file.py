"""The registers in hardware, behind AXI4-Lite."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.soc.axi_lite import OKAY, SLVERR, LiteSignature
from kvant.hw.soc.registers import COUNTER_BITS, REGISTER_BYTES, Access, Field, Register, RegisterMap

_WORD_BITS = REGISTER_BYTES.bit_length() - 1


def port_name(register: Register, field: Field) -> str:
    """Start of the names of a field's ports: register and field, the counter's name alone for a counter."""
    if field.access is Access.COUNTER:
        return register.name.removesuffix("_LO").lower()
    return f"{register.name}_{field.name}".lower()


def _ports(register: Register, field: Field) -> dict[str, wiring.Member]:
    name, width = port_name(register, field), field.width
    members = {
        Access.STATUS: {name: In(width)},
        Access.CONTROL: {name: Out(width, init=field.reset)},
        Access.SHARED: {name: In(width), f"{name}_write": Out(1), f"{name}_data": Out(width)},
        Access.COMMAND: {name: Out(width)},
        Access.STICKY: {name: Out(width), f"{name}_set": In(width)},
        Access.COUNTER: {name: In(COUNTER_BITS)},
    }
    return members.get(field.access, {})


class RegisterFile(wiring.Component):
    """All registers of a map.

    Reads take two cycles from address to data, writes one from the later of address and data to the response; one read
    and one write at a time. Addresses without a register are answered with SLVERR and change nothing; the two low bits
    of an address are ignored. Byte strobes hold for every field: a byte that is not strobed keeps its value, writes no
    1 and starts nothing.

    Parameters
    ----------
    registers : RegisterMap

    Members
    -------
    bus : In(LiteSignature)
    REGISTER_FIELD
        STATUS, SHARED: in, the value. CONTROL: out, the value. COMMAND: out, high in the one cycle after the write.
        STICKY: out, the value.
    REGISTER_FIELD_set : in
        STICKY: bits to set.
    REGISTER_FIELD_write, REGISTER_FIELD_data : out
        SHARED: in the one cycle after a write, and the value to take.
    COUNTER : In(48)
    """

    def __init__(self, registers: RegisterMap):
        self.registers = registers
        members: dict[str, wiring.Member] = {"bus": In(LiteSignature(registers.address_bits))}
        for register in registers:
            for field in register.fields:
                members |= _ports(register, field)
        super().__init__(members)

    def elaborate(self, platform):
        m = Module()
        bus = self.bus
        word_address = bus.awaddr.shape().width - _WORD_BITS

        # Write: address and data wait for each other in registers.
        address, has_address = Signal(word_address), Signal()
        written, strobes, has_data = Signal(32), Signal(4), Signal()
        write = Signal()  # this cycle
        m.d.comb += [
            bus.awready.eq(~has_address),
            bus.wready.eq(~has_data),
            write.eq(has_address & has_data & (~bus.bvalid | bus.bready)),
        ]
        with m.If(bus.awvalid & bus.awready):
            m.d.sync += [address.eq(bus.awaddr[_WORD_BITS:]), has_address.eq(1)]
        with m.If(bus.wvalid & bus.wready):
            m.d.sync += [written.eq(bus.wdata), strobes.eq(bus.wstrb), has_data.eq(1)]
        with m.If(bus.bready):
            m.d.sync += bus.bvalid.eq(0)
        known_write = Signal()
        with m.If(write):
            m.d.sync += [
                has_address.eq(0),
                has_data.eq(0),
                bus.bvalid.eq(1),
                bus.bresp.eq(Mux(known_write, OKAY, SLVERR)),
            ]
        bit_mask = Cat(strobe.replicate(8) for strobe in strobes)

        # Read: the address in a register, then the word.
        read_address, reads = Signal(word_address), Signal()
        value, known_read = Signal(32), Signal()
        read = Signal()
        m.d.comb += [bus.arready.eq(~reads), read.eq(reads & (~bus.rvalid | bus.rready))]
        with m.If(bus.rready):
            m.d.sync += bus.rvalid.eq(0)
        with m.If(bus.arvalid & bus.arready):
            m.d.sync += [read_address.eq(bus.araddr[_WORD_BITS:]), reads.eq(1)]
        with m.If(read):
            m.d.sync += [
                reads.eq(0),
                bus.rvalid.eq(1),
                bus.rdata.eq(value),
                bus.rresp.eq(Mux(known_read, OKAY, SLVERR)),
            ]

        kept_high = Signal(COUNTER_BITS - 32)
        with m.Switch(address):
            for register in self.registers:
                with m.Case(register.offset >> _WORD_BITS):
                    m.d.comb += known_write.eq(1)
        with m.Switch(read_address):
            for register in self.registers:
                with m.Case(register.offset >> _WORD_BITS):
                    m.d.comb += known_read.eq(1)
                    for field in register.fields:
                        if field.access is Access.COMMAND:
                            continue
                        part = value[field.lsb : field.lsb + field.width]
                        m.d.comb += part.eq(self._read_value(register, field, kept_high))
                        if field.access is Access.COUNTER:
                            with m.If(read):
                                m.d.sync += kept_high.eq(getattr(self, port_name(register, field))[32:])

        for register in self.registers:
            selected = Signal(name=f"{register.name.lower()}_selected")
            m.d.comb += selected.eq(write & (address == register.offset >> _WORD_BITS))
            for field in register.fields:
                place = slice(field.lsb, field.lsb + field.width)
                self._write_field(m, register, field, selected, written[place], bit_mask[place])
        return m

    def _read_value(self, register: Register, field: Field, kept_high: Signal):
        match field.access:
            case Access.CONSTANT:
                return Const(field.reset, field.width)
            case Access.HIGH:
                return kept_high
        return getattr(self, port_name(register, field))[: field.width]

    def _write_field(self, m: Module, register: Register, field: Field, selected, data, mask):
        name = port_name(register, field)
        match field.access:
            case Access.CONTROL:
                port = getattr(self, name)
                with m.If(selected):
                    m.d.sync += port.eq((port & ~mask) | (data & mask))
            case Access.COMMAND:
                m.d.sync += getattr(self, name).eq(Mux(selected, data & mask, 0))
            case Access.STICKY:
                port = getattr(self, name)
                cleared = Mux(selected, data & mask, 0)
                m.d.sync += port.eq((port & ~cleared) | getattr(self, f"{name}_set"))
            case Access.SHARED:
                port = getattr(self, name)
                m.d.sync += [
                    getattr(self, f"{name}_write").eq(selected),
                    getattr(self, f"{name}_data").eq((port & ~mask) | (data & mask)),
                ]
