/* kvant: a driver for the accelerator, header only, C99. Needs the registers' header beside it, which is made from the
 * description of the registers; a bus is two functions.
 *
 * The ring of descriptors lies in memory that both the host and the accelerator reach; the host writes it through a
 * pointer. Where the two need a barrier or a cache flush between that memory and the doorbell, define KVANT_BARRIER().
 */
#ifndef KVANT_DRIVER_H
#define KVANT_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#include "kvant_registers.h"

#ifndef KVANT_BARRIER
#define KVANT_BARRIER() ((void)0)
#endif

#define KVANT_OK 0
#define KVANT_ABSENT (-1)  /* something else answers at the bus */
#define KVANT_ILLEGAL (-2) /* an argument is not legal */
#define KVANT_FULL (-3)    /* the ring has no free place */
#define KVANT_FAILED (-4)  /* the accelerator stopped with an error, see kvant_report */

struct kvant_bus {
    void *context;
    uint32_t (*read32)(void *context, uint32_t offset);
    void (*write32)(void *context, uint32_t offset, uint32_t value);
};

struct kvant {
    struct kvant_bus bus;
    volatile uint8_t *ring; /* the host's view of the ring */
    uint32_t count;         /* its places */
    uint32_t tail;          /* where the next descriptor goes */
};

struct kvant_report {
    uint8_t code;   /* KVANT_CODE_... */
    uint8_t field;  /* byte offset of the offending field of the descriptor */
    uint16_t index; /* place of the offending descriptor in the ring */
};

static inline uint32_t kvant_read(const struct kvant *device, uint32_t offset)
{
    return device->bus.read32(device->bus.context, offset);
}

static inline void kvant_write(const struct kvant *device, uint32_t offset, uint32_t value)
{
    device->bus.write32(device->bus.context, offset, value);
}

/* Take over a stopped accelerator. The ring begins at a multiple of 64 bytes and of a word of the memory port, and has
 * 2 to 65535 places. */
static inline int kvant_open(struct kvant *device, struct kvant_bus bus, void *ring, uint64_t address, uint32_t count)
{
    device->bus = bus;
    device->ring = (volatile uint8_t *)ring;
    device->count = count;
    device->tail = 0;
    if (kvant_read(device, KVANT_ID) != 0x4B564E54u)
        return KVANT_ABSENT;
    if (ring == NULL || count < 2 || count > 65535 || address % KVANT_DESCRIPTOR_BYTES != 0)
        return KVANT_ILLEGAL;
    kvant_write(device, KVANT_RING_BASE_LO, (uint32_t)address);
    kvant_write(device, KVANT_RING_BASE_HI, (uint32_t)(address >> 32));
    kvant_write(device, KVANT_RING_COUNT, count);
    kvant_write(device, KVANT_RING_HEAD, 0);
    kvant_write(device, KVANT_RING_TAIL, 0);
    kvant_write(device, KVANT_ERROR, 0xFFFFFFFFu);
    kvant_write(device, KVANT_IRQ_STATUS, 0xFFFFFFFFu);
    return KVANT_OK;
}

/* Write the bytes of a descriptor behind the others and ring the doorbell. */
static inline int kvant_submit_bytes(struct kvant *device, const uint8_t raw[KVANT_DESCRIPTOR_BYTES])
{
    uint32_t next = device->tail + 1 == device->count ? 0 : device->tail + 1;
    if (next == kvant_read(device, KVANT_RING_HEAD))
        return KVANT_FULL;
    for (uint32_t i = 0; i < KVANT_DESCRIPTOR_BYTES; i++)
        device->ring[device->tail * KVANT_DESCRIPTOR_BYTES + i] = raw[i];
    KVANT_BARRIER();
    device->tail = next;
    kvant_write(device, KVANT_RING_TAIL, next);
    return KVANT_OK;
}

/* LINEAR, FENCE, END. */
static inline int kvant_submit(struct kvant *device, const struct kvant_descriptor *descriptor)
{
    uint8_t raw[KVANT_DESCRIPTOR_BYTES];
    kvant_encode(descriptor, raw);
    return kvant_submit_bytes(device, raw);
}

static inline int kvant_submit_cache(struct kvant *device, const struct kvant_cache_descriptor *descriptor)
{
    uint8_t raw[KVANT_DESCRIPTOR_BYTES];
    kvant_cache_encode(descriptor, raw);
    return kvant_submit_bytes(device, raw);
}

static inline int kvant_submit_attend(struct kvant *device, const struct kvant_attend_descriptor *descriptor)
{
    uint8_t raw[KVANT_DESCRIPTOR_BYTES];
    kvant_attend_encode(descriptor, raw);
    return kvant_submit_bytes(device, raw);
}

static inline void kvant_start(const struct kvant *device)
{
    kvant_write(device, KVANT_CONTROL, KVANT_CONTROL_START_MASK);
}

/* Finish what is under way, begin nothing else. */
static inline void kvant_stop(const struct kvant *device)
{
    kvant_write(device, KVANT_CONTROL, KVANT_CONTROL_STOP_MASK);
}

/* Drop what is under way. */
static inline void kvant_abort(const struct kvant *device)
{
    kvant_write(device, KVANT_CONTROL, KVANT_CONTROL_ABORT_MASK);
}

/* Take the events that are pending, KVANT_IRQ_STATUS_..._MASK, and clear them; also of use in an interrupt handler. */
static inline uint32_t kvant_events(const struct kvant *device)
{
    uint32_t events = kvant_read(device, KVANT_IRQ_STATUS);
    if (events != 0)
        kvant_write(device, KVANT_IRQ_STATUS, events);
    return events;
}

/* What stopped the accelerator last. */
static inline struct kvant_report kvant_report(const struct kvant *device)
{
    struct kvant_report report;
    uint32_t word = kvant_read(device, KVANT_ERROR_CODE);
    report.code = (uint8_t)((word & KVANT_ERROR_CODE_CODE_MASK) >> KVANT_ERROR_CODE_CODE_SHIFT);
    report.field = (uint8_t)((word & KVANT_ERROR_CODE_FIELD_MASK) >> KVANT_ERROR_CODE_FIELD_SHIFT);
    report.index = (uint16_t)kvant_read(device, KVANT_ERROR_INDEX);
    return report;
}

/* Wait, by polling at most so often (0: for ever), until the accelerator has stopped. Returns KVANT_OK after an END,
 * KVANT_FAILED after an error or an abort, KVANT_ILLEGAL when the polls ran out. */
static inline int kvant_wait(const struct kvant *device, uint32_t polls)
{
    for (uint32_t poll = 0; polls == 0 || poll < polls; poll++) {
        uint32_t events = kvant_events(device);
        if (events & KVANT_IRQ_STATUS_ERROR_MASK)
            return KVANT_FAILED;
        if (events & KVANT_IRQ_STATUS_IDLE_MASK)
            return KVANT_OK;
    }
    return KVANT_ILLEGAL;
}

/* Clear all errors; with skip, go on behind the descriptor that was not done. */
static inline void kvant_recover(const struct kvant *device, int skip)
{
    kvant_write(device, KVANT_ERROR, 0xFFFFFFFFu);
    kvant_write(device, KVANT_IRQ_STATUS, 0xFFFFFFFFu);
    if (skip) {
        uint32_t head = kvant_read(device, KVANT_RING_HEAD) + 1;
        kvant_write(device, KVANT_RING_HEAD, head == device->count ? 0 : head);
    }
}

/* A counter, by the offset of its low word (KVANT_..._LO). */
static inline uint64_t kvant_counter(const struct kvant *device, uint32_t low)
{
    uint64_t value = kvant_read(device, low);
    return value | (uint64_t)kvant_read(device, low + 4) << 32;
}

#endif /* KVANT_DRIVER_H */
