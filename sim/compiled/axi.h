// A memory behind an AXI4 port of the design, and a host in front of an AXI4-Lite port.

#ifndef KVANT_AXI_H
#define KVANT_AXI_H

#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#include "agent.h"

namespace {

constexpr std::uint64_t kPageBytes = 4096;  // no burst crosses a multiple of it
constexpr std::uint64_t kIncrementing = 1;  // burst type
constexpr std::uint64_t kOkay = 0, kSlaveError = 2;

enum Broken { kDropped = 1, kChanged = 2, kCrossing = 4, kShape = 5, kLast = 6 };

inline std::uint64_t get(const Field& field) {
    std::uint64_t value = 0;
    std::memcpy(&value, field.port, field.bytes);
    return value;
}
inline void set(const Field& field, std::uint64_t value) { std::memcpy(field.port, &value, field.bytes); }

// A channel that the design drives: what it offers has to stay until it is taken.
class Offer {
  public:
    Offer(Field valid, Field ready, std::vector<Field> payload)
        : valid_(valid), ready_(ready), payload_(std::move(payload)) {}

    void reset() {
        waiting_ = false;
        set(ready_, 0);
    }
    void drive(bool ready) { set(ready_, ready); }
    // Whether a transfer takes place in this cycle.
    bool sample() {
        if (!*valid_.port) {
            if (waiting_) fault = kDropped;
            return false;
        }
        if (waiting_ && changed()) fault = kChanged;
        waiting_ = !*ready_.port;
        if (waiting_) keep();
        return !waiting_;
    }

    int fault = 0;

  private:
    void keep() {
        kept_.clear();
        for (const auto& field : payload_) kept_.insert(kept_.end(), field.port, field.port + field.bytes);
    }
    bool changed() const {
        std::size_t at = 0;
        for (const auto& field : payload_) {
            if (std::memcmp(kept_.data() + at, field.port, field.bytes)) return true;
            at += field.bytes;
        }
        return false;
    }

    Field valid_, ready_;
    std::vector<Field> payload_;
    bool waiting_ = false;
    std::vector<std::uint8_t> kept_;
};

// The memory is the host's: `size` bytes that the design sees from `base` on. Accesses elsewhere are answered with
// an error. Bursts are pipelined and answered in their order, a word per cycle, the first one `latency` cycles after
// its address.
class Memory final : public Agent {
  public:
    // Ports in the order of `MEMORY_PORTS` in build.py.
    explicit Memory(const std::vector<Field>& p)
        : ar_(p[5], p[6], {p[0], p[1], p[2], p[3], p[4]}),
          aw_(p[18], p[19], {p[13], p[14], p[15], p[16], p[17]}),
          w_(p[23], p[24], {p[20], p[21], p[22]}),
          read_address_{p[0], p[1], p[2], p[3], p[4]},
          write_address_{p[13], p[14], p[15], p[16], p[17]},
          rid_(p[7]), rdata_(p[8]), rresp_(p[9]), rlast_(p[10]), rvalid_(p[11]), rready_(p[12]),
          wdata_(p[20]), wstrb_(p[21]), wlast_(p[22]), bid_(p[25]), bresp_(p[26]), bvalid_(p[27]), bready_(p[28]) {}

    void attach(std::uint64_t base, std::uint64_t size, std::uint8_t* bytes, std::int64_t latency) {
        base_ = base;
        size_ = size;
        bytes_ = bytes;
        latency_ = latency;
    }
    void reset() override {
        for (auto* channel : {&ar_, &aw_, &w_}) channel->reset();
        set(rvalid_, 0);
        set(bvalid_, 0);
        reads_.clear();
        writes_.clear();
        answers_.clear();
        reading_ = answering_ = false;
    }
    void drive() override {
        ar_.drive(!pauses.next());
        aw_.drive(!pauses.next());
        w_.drive(!pauses.next() && !writes_.empty());
        if (!reading_ && !reads_.empty() && reads_.front().due <= now_ && !pauses.next()) offer_word();
        if (!answering_ && !answers_.empty() && answers_.front().due <= now_ && !pauses.next()) {
            answering_ = true;
            set(bid_, answers_.front().id);
            set(bresp_, answers_.front().error ? kSlaveError : kOkay);
        }
        set(rvalid_, reading_);
        set(bvalid_, answering_);
    }
    bool sample(std::int64_t cycle) override {
        const std::uint64_t before = count;
        if (ar_.sample()) {
            reads_.push_back(burst(read_address_));
            transferred(cycle);
        }
        if (aw_.sample()) {
            writes_.push_back(burst(write_address_));
            transferred(cycle);
        }
        if (w_.sample()) {
            write_word();
            transferred(cycle);
        }
        if (reading_ && *rready_.port) {
            reading_ = false;
            ++words_read;
            Burst& front = reads_.front();
            front.address += rdata_.bytes;
            if (!front.left--) reads_.pop_front();
            transferred(cycle);
        }
        if (answering_ && *bready_.port) {
            answering_ = false;
            answers_.pop_front();
            transferred(cycle);
        }
        ++now_;
        return count != before;
    }
    bool busy() const override { return false; }  // what it owes, the design asks for
    int fault() const override {
        for (const auto* channel : {&ar_, &aw_, &w_})
            if (channel->fault) return channel->fault;
        return fault_;
    }

    Pauses pauses;
    std::uint64_t words_read = 0, words_written = 0;

  private:
    struct AddressPorts {
        Field id, address, length, size, type;
    };
    struct Burst {
        std::int64_t due;
        std::uint64_t id, address, left;  // words behind the next one
        bool error;
    };

    Burst burst(const AddressPorts& ports) {
        const std::uint64_t address = get(ports.address), left = get(ports.length), bytes = rdata_.bytes;
        if (address % bytes || (1ULL << get(ports.size)) != bytes || get(ports.type) != kIncrementing) fault_ = kShape;
        if (address / kPageBytes != (address + left * bytes) / kPageBytes) fault_ = kCrossing;
        return {now_ + latency_, get(ports.id), address, left, false};
    }
    bool inside(std::uint64_t address) const {
        return address >= base_ && address - base_ < size_ && size_ - (address - base_) >= rdata_.bytes;
    }
    void offer_word() {
        const Burst& front = reads_.front();
        const bool known = inside(front.address);
        reading_ = true;
        if (known)
            std::memcpy(rdata_.port, bytes_ + (front.address - base_), rdata_.bytes);
        else
            std::memset(rdata_.port, 0xFF, rdata_.bytes);
        set(rid_, front.id);
        set(rresp_, known ? kOkay : kSlaveError);
        set(rlast_, front.left == 0);
    }
    void write_word() {
        Burst& front = writes_.front();
        ++words_written;
        if (inside(front.address)) {
            const std::uint64_t strobes = get(wstrb_);
            for (std::size_t i = 0; i < wdata_.bytes; ++i)
                if (strobes >> i & 1) bytes_[front.address - base_ + i] = wdata_.port[i];
        } else {
            front.error = true;
        }
        if (*wlast_.port != (front.left == 0)) fault_ = kLast;
        front.address += wdata_.bytes;
        if (front.left--) return;
        front.due = now_ + latency_;
        answers_.push_back(front);
        writes_.pop_front();
    }

    Offer ar_, aw_, w_;
    AddressPorts read_address_, write_address_;
    Field rid_, rdata_, rresp_, rlast_, rvalid_, rready_, wdata_, wstrb_, wlast_, bid_, bresp_, bvalid_, bready_;
    std::deque<Burst> reads_, writes_, answers_;
    std::uint8_t* bytes_ = nullptr;
    std::uint64_t base_ = 0, size_ = 0;
    std::int64_t latency_ = 0, now_ = 0;
    bool reading_ = false, answering_ = false;
    int fault_ = 0;
};

// Reads and writes registers of the design, one at a time.
class Registers final : public Agent {
  public:
    // Ports in the order of `REGISTER_PORTS` in build.py.
    explicit Registers(const std::vector<Field>& p)
        : awaddr_(p[0]), awvalid_(p[1]), awready_(p[2]), wdata_(p[3]), wstrb_(p[4]), wvalid_(p[5]), wready_(p[6]),
          bresp_(p[7]), bvalid_(p[8]), bready_(p[9]), araddr_(p[10]), arvalid_(p[11]), arready_(p[12]), rdata_(p[13]),
          rresp_(p[14]), rvalid_(p[15]), rready_(p[16]) {}

    void begin_write(std::uint64_t address, std::uint64_t value) {
        set(awaddr_, address);
        set(wdata_, value);
        set(wstrb_, (1ULL << wdata_.bytes) - 1);
        address_ = data_ = awaited_ = true;
    }
    void begin_read(std::uint64_t address) {
        set(araddr_, address);
        asked_ = awaited_ = true;
    }
    void reset() override {
        address_ = data_ = asked_ = awaited_ = false;
        for (const auto* field : {&awvalid_, &wvalid_, &arvalid_, &bready_, &rready_}) set(*field, 0);
    }
    void drive() override {
        set(awvalid_, address_);
        set(wvalid_, data_);
        set(arvalid_, asked_);
        set(bready_, 1);
        set(rready_, 1);
    }
    bool sample(std::int64_t cycle) override {
        if (!awaited_) return false;
        bool moved = false;
        moved |= taken(address_, awready_);
        moved |= taken(data_, wready_);
        moved |= taken(asked_, arready_);
        if (*bvalid_.port) {
            response = get(bresp_);
            awaited_ = false;
        } else if (*rvalid_.port) {
            response = get(rresp_);
            value = get(rdata_);
            awaited_ = false;
        }
        moved |= !awaited_;
        if (moved) transferred(cycle);
        return moved;
    }
    bool busy() const override { return awaited_; }

    std::uint64_t value = 0, response = 0;

  private:
    static bool taken(bool& offered, const Field& ready) {
        const bool transfer = offered && *ready.port;
        if (transfer) offered = false;
        return transfer;
    }

    Field awaddr_, awvalid_, awready_, wdata_, wstrb_, wvalid_, wready_, bresp_, bvalid_, bready_;
    Field araddr_, arvalid_, arready_, rdata_, rresp_, rvalid_, rready_;
    bool address_ = false, data_ = false, asked_ = false, awaited_ = false;
};

}  // namespace

#endif
