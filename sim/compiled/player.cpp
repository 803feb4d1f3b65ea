// Plays streams on a Verilated model: the loop that `kvant.sim.compiled` compiles together with a design.
//
// Every input of the design is a register of the wrapper `driven`, so that one evaluation per clock edge settles the
// whole design. A cycle is therefore: `drive` writes the inputs of the cycle, the rising edge takes them over and
// settles the outputs, `sample` looks at what is transferred. What is transferred reaches the design's registers at the
// next edge, so a run may stop and go on without a bubble.
//
// `bind`, in the generated part that includes this file, names the ports of the design. Values are little-endian
// words as Verilator keeps them: 1, 2, 4 or 8 bytes, above 64 bits a multiple of 4.

#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "Vmodel.h"
#include "verilated.h"

#include "agent.h"
#include "axi.h"

namespace {

constexpr std::size_t kFields = 4;  // payload fields of a stream: data, user, keep, last

// What is to be sent, or where what comes is put: one buffer per field, `count` records in each.
struct Segment {
    std::uint64_t count;
    std::array<std::uint8_t*, kFields> fields;
};

class Stream : public Agent {
  public:
    Stream(std::uint8_t* valid, std::uint8_t* ready, std::vector<Field> fields)
        : valid_(valid), ready_(ready), fields_(std::move(fields)) {}

    void push(std::uint64_t count, std::uint8_t* const* buffers) {
        if (!count) return;
        Segment segment{count, {}};
        for (std::size_t i = 0; i < fields_.size(); ++i) segment.fields[i] = buffers[i];
        segments_.push_back(segment);
    }
    void drop() {
        segments_.clear();
        position_ = 0;
    }
    bool busy() const override { return !segments_.empty(); }
    std::uint64_t queued() const {
        std::uint64_t sum = 0;
        for (const auto& segment : segments_) sum += segment.count;
        return sum - position_;
    }

    Pauses pauses;

  protected:
    void advance() {
        if (++position_ == segments_.front().count) {
            segments_.pop_front();
            position_ = 0;
        }
    }

    std::uint8_t* const valid_;
    std::uint8_t* const ready_;
    const std::vector<Field> fields_;
    std::deque<Segment> segments_;
    std::uint64_t position_ = 0;
};

class Source final : public Stream {
  public:
    using Stream::Stream;

    void reset() override {
        offering_ = high_ = false;
        if (valid_) *valid_ = 0;
        for (const auto& field : fields_) std::memset(field.port, 0, field.bytes);
    }
    void drive() override {
        const bool pause = pauses.next();
        if (offering_) return;
        if (!pause && !segments_.empty()) {
            const Segment& segment = segments_.front();
            for (std::size_t i = 0; i < fields_.size(); ++i) {
                const std::size_t bytes = fields_[i].bytes;
                std::memcpy(fields_[i].port, segment.fields[i] + position_ * bytes, bytes);
            }
            offering_ = high_ = true;
            if (valid_) *valid_ = 1;
        } else if (high_) {
            high_ = false;
            if (valid_) *valid_ = 0;
            for (const auto& field : fields_) complement(field);  // a design that looks at it now fails
        }
    }
    bool sample(std::int64_t cycle) override {
        if (!offering_ || (ready_ && !*ready_)) return false;
        offering_ = false;
        advance();
        transferred(cycle);
        return true;
    }

  private:
    static void complement(const Field& field) {
        if (field.bytes < 4) {
            std::uint32_t value = 0;
            std::memcpy(&value, field.port, field.bytes);
            value = ~value & field.top_mask;
            std::memcpy(field.port, &value, field.bytes);
            return;
        }
        for (std::size_t at = 0; at < field.bytes; at += 4) {
            std::uint32_t word;
            std::memcpy(&word, field.port + at, 4);
            word = ~word & (at + 4 == field.bytes ? field.top_mask : ~0U);
            std::memcpy(field.port + at, &word, 4);
        }
    }

    bool offering_ = false, high_ = false;
};

class Sink final : public Stream {
  public:
    using Stream::Stream;

    void discard(bool wanted) { discarded_ = wanted; }
    void reset() override {
        is_ready_ = !ready_;
        waiting_ = false;
        if (ready_) *ready_ = 0;
    }
    void drive() override {
        if (!ready_) return;
        is_ready_ = !pauses.next() && (discarded_ || !segments_.empty());
        *ready_ = is_ready_;
    }
    bool sample(std::int64_t cycle) override {
        if (valid_ && !*valid_) {
            if (waiting_) fault_ = 1;
            return false;
        }
        if (waiting_ && changed()) fault_ = 2;
        if (!is_ready_) {
            keep();
            return false;
        }
        waiting_ = false;
        if (!discarded_) {
            if (segments_.empty()) {
                fault_ = 3;
                return false;
            }
            const Segment& segment = segments_.front();
            for (std::size_t i = 0; i < fields_.size(); ++i) {
                const std::size_t bytes = fields_[i].bytes;
                std::memcpy(segment.fields[i] + position_ * bytes, fields_[i].port, bytes);
            }
            advance();
        }
        transferred(cycle);
        return true;
    }
    int fault() const override { return fault_; }
    bool waits() const { return waiting_; }

  private:
    void keep() {
        waiting_ = true;
        kept_.clear();
        for (const auto& field : fields_) kept_.insert(kept_.end(), field.port, field.port + field.bytes);
    }
    bool changed() const {
        std::size_t at = 0;
        for (const auto& field : fields_) {
            if (std::memcmp(kept_.data() + at, field.port, field.bytes)) return true;
            at += field.bytes;
        }
        return false;
    }

    bool is_ready_ = false, discarded_ = false, waiting_ = false;
    int fault_ = 0;
    std::vector<std::uint8_t> kept_;
};

enum Outcome { kDone = 0, kSlice = 1, kLimit = 2, kIdle = 3, kFault = 4 };

class Player {
  public:
    Player();
    ~Player() {
        enter();
        model->final();
        model.reset();
    }

    // Verilator's runtime takes the thread's context for the model's: there may be several models.
    void enter() const { Verilated::threadContextp(context.get()); }
    void edge() {
        model->clk = 0;
        model->eval();
        model->clk = 1;
        model->eval();
    }
    void reset(int cycles) {
        enter();
        *rst = 1;
        for (auto& agent : agents) agent->reset();
        for (int i = 0; i < cycles; ++i) edge();
        *rst = 0;
        cycle = last_transfer = 0;
    }
    // One cycle; whether something was transferred.
    bool step() {
        for (auto* agent : order) agent->drive();
        edge();
        bool moved = false;
        for (auto* agent : order) moved |= agent->sample(cycle);
        if (moved) last_transfer = cycle;
        ++cycle;
        return moved;
    }
    int run(std::int64_t limit, std::int64_t idle, double seconds) {
        enter();
        const auto begin = Clock::now();
        for (unsigned steps = 1;; ++steps) {
            // Only a transfer ends a run or, as a rule, breaks a rule; a waiting payload may change without one.
            if (step() && !busy()) return fault() ? kFault : kDone;
            if (steps % 256) continue;
            const int outcome = look(begin, limit, idle, seconds);
            if (outcome != kDone) return outcome;
        }
    }
    // Until the lowest bit of a plain port is high.
    int wait(const Field& port, std::int64_t limit, std::int64_t idle, double seconds) {
        enter();
        const auto begin = Clock::now();
        for (unsigned steps = 1; !(*port.port & 1); ++steps) {
            step();
            if (steps % 256) continue;
            const int outcome = look(begin, limit, idle, seconds);
            if (outcome != kDone) return outcome;
        }
        return fault() ? kFault : kDone;
    }
    bool busy() const {
        for (auto* agent : order)
            if (agent->busy()) return true;
        return false;
    }
    // Number of the first stream or bus that broke a rule, plus one, and how; 0 if none did.
    int fault() const {
        for (std::size_t i = 0; i < order.size(); ++i)
            if (order[i]->fault()) return static_cast<int>(i + 1) | order[i]->fault() << 16;
        return 0;
    }

    std::unique_ptr<VerilatedContext> context = std::make_unique<VerilatedContext>();
    std::unique_ptr<Vmodel> model;
    std::uint8_t* rst = nullptr;
    std::uint8_t no_reset = 0;
    std::vector<std::unique_ptr<Agent>> agents;
    std::vector<Agent*> order;  // streams, then memories, then registers
    std::vector<Memory*> memories;
    std::vector<Registers*> registers;
    std::vector<Field> plain;  // ports of no stream and no bus
    std::int64_t cycle = 0, last_transfer = 0;

  private:
    using Clock = std::chrono::steady_clock;

    // Whether a run has to end, looked at now and then; kDone if not.
    int look(Clock::time_point begin, std::int64_t limit, std::int64_t idle, double seconds) const {
        if (fault()) return kFault;
        if (cycle >= limit) return kLimit;
        if (cycle - last_transfer >= idle) return kIdle;
        return std::chrono::duration<double>(Clock::now() - begin).count() > seconds ? kSlice : kDone;
    }
    template <class T>
    static std::uint8_t* at(T& port) {
        return reinterpret_cast<std::uint8_t*>(&port);
    }
    template <class T>
    static Field field(T& port, unsigned width) {
        const unsigned high = width % 32;
        return {at(port), sizeof(T), high ? (1U << high) - 1 : ~0U};
    }
    template <class Kind>
    void add(std::uint8_t* valid, std::uint8_t* ready, std::vector<Field> fields) {
        agents.push_back(std::make_unique<Kind>(valid, ready, std::move(fields)));
        order.push_back(agents.back().get());
    }
    template <class Bus>
    void add(std::vector<Bus*>& all, const std::vector<Field>& ports) {
        auto bus = std::make_unique<Bus>(ports);
        all.push_back(bus.get());
        order.push_back(bus.get());
        agents.push_back(std::move(bus));
    }
    void bind();
};

Player::Player() {
    enter();
    context->threads(KVANT_THREADS);
    model = std::make_unique<Vmodel>(context.get());
    rst = &no_reset;
    bind();
}

}  // namespace

#define KVANT_API extern "C" __attribute__((visibility("default")))

KVANT_API Player* kvant_open() { return new Player; }
KVANT_API void kvant_close(Player* player) { delete player; }
KVANT_API void kvant_reset(Player* player, int cycles) { player->reset(cycles); }
KVANT_API std::int64_t kvant_cycle(const Player* player) { return player->cycle; }
KVANT_API int kvant_fault(const Player* player) { return player->fault(); }

KVANT_API int kvant_run(Player* player, std::int64_t limit, std::int64_t idle, double seconds) {
    return player->run(limit, idle, seconds);
}
KVANT_API void kvant_steps(Player* player, std::int64_t cycles) {
    player->enter();
    for (std::int64_t i = 0; i < cycles; ++i) player->step();
}
KVANT_API void kvant_mark(Player* player) {
    for (auto* agent : player->order) {
        agent->count = 0;
        agent->first = agent->last = kNever;
    }
    player->last_transfer = player->cycle;
}
KVANT_API void kvant_push(Player* player, int stream, std::uint64_t count, std::uint8_t* const* buffers) {
    static_cast<Stream*>(player->order[stream])->push(count, buffers);
}
KVANT_API void kvant_drop(Player* player, int stream) { static_cast<Stream*>(player->order[stream])->drop(); }
KVANT_API void kvant_discard(Player* player, int stream, int wanted) {
    static_cast<Sink*>(player->order[stream])->discard(wanted);
}
KVANT_API int kvant_waits(const Player* player, int stream) {
    return static_cast<const Sink*>(player->order[stream])->waits();
}
KVANT_API void kvant_stall(Player* player, int stream, std::uint64_t seed, double probability) {
    static_cast<Stream*>(player->order[stream])->pauses.start(seed, probability);
}
// Transfers since the last mark, cycles of the first and last of them, transfers still queued.
KVANT_API void kvant_stream(const Player* player, int stream, std::int64_t* numbers) {
    const Agent* agent = player->order[stream];
    numbers[0] = static_cast<std::int64_t>(agent->count);
    numbers[1] = agent->first;
    numbers[2] = agent->last;
    numbers[3] = static_cast<std::int64_t>(static_cast<const Stream*>(agent)->queued());
}
KVANT_API void kvant_read(const Player* player, int port, std::uint8_t* value) {
    std::memcpy(value, player->plain[port].port, player->plain[port].bytes);
}
KVANT_API void kvant_write(Player* player, int port, const std::uint8_t* value) {
    std::memcpy(player->plain[port].port, value, player->plain[port].bytes);
}
KVANT_API int kvant_wait(
    Player* player, int port, std::int64_t limit, std::int64_t idle, double seconds) {
    return player->wait(player->plain[port], limit, idle, seconds);
}
KVANT_API void kvant_memory(
    Player* player, int memory, std::uint64_t base, std::uint64_t size, std::uint8_t* bytes, std::int64_t latency) {
    player->memories[memory]->attach(base, size, bytes, latency);
}
KVANT_API void kvant_memory_stall(Player* player, int memory, std::uint64_t seed, double probability) {
    player->memories[memory]->pauses.start(seed, probability);
}
// Words read and written since the model was opened.
KVANT_API void kvant_memory_words(const Player* player, int memory, std::uint64_t* numbers) {
    numbers[0] = player->memories[memory]->words_read;
    numbers[1] = player->memories[memory]->words_written;
}
KVANT_API void kvant_begin_write(Player* player, int registers, std::uint64_t address, std::uint64_t value) {
    player->registers[registers]->begin_write(address, value);
}
KVANT_API void kvant_begin_read(Player* player, int registers, std::uint64_t address) {
    player->registers[registers]->begin_read(address);
}
// Value and response of the last access.
KVANT_API void kvant_answer(const Player* player, int registers, std::uint64_t* numbers) {
    numbers[0] = player->registers[registers]->value;
    numbers[1] = player->registers[registers]->response;
}
