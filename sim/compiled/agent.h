// What every part of the player knows: a port of the design, pauses, and a bus that is played cycle by cycle.

#ifndef KVANT_AGENT_H
#define KVANT_AGENT_H

#include <cstdint>
#include <cstring>

namespace {

constexpr std::int64_t kNever = -1;

struct Field {
    std::uint8_t* port;
    std::size_t bytes;
    std::uint32_t top_mask;  // of the highest word, or of the whole value if it is narrower
};

// xorshift64*: the pauses of a stream depend on its own seed alone.
class Pauses {
  public:
    void start(std::uint64_t seed, double probability) {
        state_ = seed | 1;
        threshold_ = static_cast<std::uint64_t>(probability * 4294967296.0);
    }
    bool next() {
        if (!threshold_) return false;
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        return (state_ * 2685821657736338717ULL >> 32) < threshold_;
    }

  private:
    std::uint64_t state_ = 1, threshold_ = 0;
};

// One bus of the design.
class Agent {
  public:
    virtual ~Agent() = default;
    virtual void reset() = 0;                       // all signals idle, nothing offered or waiting
    virtual void drive() = 0;                       // inputs of the cycle that begins
    virtual bool sample(std::int64_t cycle) = 0;    // whether something was transferred
    virtual bool busy() const = 0;                  // whether something is still to be transferred
    virtual int fault() const { return 0; }         // 0, or how a rule was broken; see FAULTS in model.py

    std::uint64_t count = 0;  // transfers since the last mark
    std::int64_t first = kNever, last = kNever;

  protected:
    void transferred(std::int64_t cycle) {
        if (first == kNever) first = cycle;
        last = cycle;
        ++count;
    }
};

}  // namespace

#endif
