"""The C driver, compiled, against a stub of the accelerator."""

import subprocess

from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.soc import register_text
from kvant.hw.soc.descriptors import Descriptor, Flag, Opcode
from kvant.hw.soc.parameters import SocParameters, TopParameters
from kvant.hw.soc.registers import register_map

STUB = r"""
#include <stdio.h>
#include <string.h>
#include "design_driver.h"

static uint32_t words[1024];
static uint32_t failing = 0xFFFFFFFFu; /* place of a descriptor that is refused */

static uint32_t read32(void *context, uint32_t offset)
{
    (void)context;
    return words[offset / 4];
}

static void write32(void *context, uint32_t offset, uint32_t value)
{
    (void)context;
    if (offset == KVANT_ERROR || offset == KVANT_IRQ_STATUS) {
        words[offset / 4] &= ~value;
    } else if (offset == KVANT_CONTROL && (value & KVANT_CONTROL_START_MASK)) {
        uint32_t *head = &words[KVANT_RING_HEAD / 4];
        while (*head != words[KVANT_RING_TAIL / 4] && *head != failing)
            *head = (*head + 1) % words[KVANT_RING_COUNT / 4];
        if (*head == failing) {
            words[KVANT_ERROR / 4] |= KVANT_ERROR_DESCRIPTOR_MASK;
            words[KVANT_ERROR_CODE / 4] = KVANT_CODE_SIZE | 14u << KVANT_ERROR_CODE_FIELD_SHIFT;
            words[KVANT_ERROR_INDEX / 4] = failing;
            words[KVANT_IRQ_STATUS / 4] |= KVANT_IRQ_STATUS_ERROR_MASK;
            failing = 0xFFFFFFFFu;
        } else {
            words[KVANT_IRQ_STATUS / 4] |= KVANT_IRQ_STATUS_IDLE_MASK;
        }
    } else {
        words[offset / 4] = value;
    }
}

#define CHECK(condition) do { if (!(condition)) { printf("line %d: %s\n", __LINE__, #condition); return 1; } } while (0)

int main(void)
{
    static uint8_t ring[4 * KVANT_DESCRIPTOR_BYTES];
    struct kvant device;
    struct kvant_bus bus = {NULL, read32, write32};
    struct kvant_descriptor job = {0}, end = {0};
    CHECK(kvant_open(&device, bus, ring, 0x140, 4) == KVANT_ABSENT);
    words[KVANT_ID / 4] = 0x4B564E54u;
    CHECK(kvant_open(&device, bus, ring, 0x150, 4) == KVANT_ILLEGAL);
    CHECK(kvant_open(&device, bus, ring, 0x100000140u, 4) == KVANT_OK);
    CHECK(words[KVANT_RING_BASE_LO / 4] == 0x140 && words[KVANT_RING_BASE_HI / 4] == 1);
    job.opcode = KVANT_OPCODE_LINEAR;
    job.flags = KVANT_FLAG_INTERRUPT | KVANT_FLAG_WAIT;
    job.tokens = 3;
    job.weights = 0x123456789ABCDEF0u;
    job.weight_bytes = 0xFEDCBA98u;
    end.opcode = KVANT_OPCODE_END;
    CHECK(kvant_submit(&device, &job) == KVANT_OK);
    CHECK(kvant_submit(&device, &job) == KVANT_OK);
    CHECK(kvant_submit(&device, &end) == KVANT_OK);
    CHECK(kvant_submit(&device, &end) == KVANT_FULL);
    CHECK(kvant_wait(&device, 3) == KVANT_ILLEGAL);
    failing = 1;
    kvant_start(&device);
    CHECK(kvant_wait(&device, 3) == KVANT_FAILED);
    CHECK(kvant_report(&device).code == KVANT_CODE_SIZE && kvant_report(&device).field == 14);
    CHECK(kvant_report(&device).index == 1 && words[KVANT_RING_HEAD / 4] == 1);
    kvant_recover(&device, 1);
    CHECK(words[KVANT_ERROR / 4] == 0 && words[KVANT_RING_HEAD / 4] == 2);
    kvant_start(&device);
    CHECK(kvant_wait(&device, 0) == KVANT_OK && kvant_events(&device) == 0);
    CHECK(kvant_submit(&device, &end) == KVANT_OK && device.tail == 0);
    words[KVANT_BYTES_READ_LO / 4] = 0x89ABCDEFu;
    words[KVANT_BYTES_READ_HI / 4] = 0x4567u;
    CHECK(kvant_counter(&device, KVANT_BYTES_READ_LO) == 0x456789ABCDEFu);
    kvant_stop(&device);
    kvant_abort(&device);
    for (unsigned i = 0; i < KVANT_DESCRIPTOR_BYTES; i++)
        printf("%02x", ring[i]);
    return 0;
}
"""


def test_the_c_driver_works_on_a_stub_of_the_registers(tmp_path):
    registers = register_map(TopParameters(LinearParameters(), SocParameters()))
    (tmp_path / "design_registers.h").write_text(register_text.c_header(registers))
    (tmp_path / "design_driver.h").write_text(register_text.c_driver("design_registers.h"))
    (tmp_path / "main.c").write_text(STUB)
    command = ["gcc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "main.c", "-o", "main"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    result = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    job = Descriptor(
        Opcode.LINEAR,
        flags=Flag.INTERRUPT | Flag.WAIT,
        tokens=3,
        weights=0x123456789ABCDEF0,
        weight_bytes=0xFEDCBA98,
    )
    assert bytes.fromhex(result.stdout) == job.encode()
