// Top k of every chunk: the streaming pass over one chunk at a time, guided by the threshold of the chunk before.
#pragma once
#include <mutex>

#include "selector.h"

namespace dss {

constexpr Key kGuessMargin = 1u << 21;  // a quarter of an octave below the last threshold

class ChunkSelector {
   public:
    explicit ChunkSelector(const Step& step) : s_(step), variant_(variants()[step.isa]), form_(form_of(step)) {
        b_.reserve(s_.chunk, form_ == kVelocity);
        dense_ = static_cast<double>(s_.k) > variant_.dense_from * s_.chunk;
    }

    // Chunks [first, last). Returns the smallest emitted key.
    Key run(int64_t first, int64_t last) {
        Key smallest = kAboveAll;
        for (int64_t c = first; c < last; ++c) {
            const int64_t begin = c * s_.chunk, end = std::min(s_.n, begin + s_.chunk);
            smallest = std::min(smallest, select(begin, end, s_.k * c));
        }
        return smallest;
    }
    int64_t candidates() const { return candidates_; }

   private:
    // 1. stream with the guess, and lower ones until there are enough  2. k-th key  3. emit or put back
    Key select(int64_t begin, int64_t end, int64_t out) {
        const int64_t k = std::min(s_.k, end - begin);
        Key guess = last_ > kGuessMargin ? last_ - kGuessMargin : 0;
        Source source = static_cast<Source>(s_.source);
        for (;;) {
            float* const velocities = form_ == kVelocity ? b_.velocities : nullptr;
            const Thresholds both{guess, guess, dense_};
            b_.m = variant_.stream[source][form_](s_, begin, end, both, b_.values, b_.indices, velocities);
            if (b_.m >= k) break;
            for (int64_t j = 0; j < b_.m; ++j) restore(j);
            source = kNone;
            guess = guess > 4 * kGuessMargin ? guess - 4 * kGuessMargin : 0;
        }
        candidates_ += b_.m;
        b_.scratch.resize(static_cast<size_t>(b_.m));
        for (int64_t j = 0; j < b_.m; ++j) b_.scratch[static_cast<size_t>(j)] = key_of(b_.values[j]);
        last_ = kth_of(b_.scratch, k, b_.m);
        int64_t ties = k;
        for (int64_t j = 0; j < b_.m; ++j) ties -= key_of(b_.values[j]) > last_;
        for (int64_t j = 0; j < b_.m; ++j) {
            const Key key = key_of(b_.values[j]);
            if (key > last_ || (key == last_ && ties-- > 0)) {
                s_.values[out] = b_.values[j];
                s_.indices[out++] = b_.indices[j];
            } else {
                restore(j);
            }
        }
        return last_;
    }

    void restore(int64_t j) {
        s_.residual[b_.indices[j]] = b_.values[j];
        if (form_ == kVelocity) s_.velocity[b_.indices[j]] = b_.velocities[j];
    }

    const Step& s_;
    const Variant& variant_;
    Form form_;
    Buffer b_;
    bool dense_;
    Key last_ = 0;
    int64_t candidates_ = 0;
};

inline void select_chunked(Step& s) {
    const int64_t chunks = (s.n + s.chunk - 1) / s.chunk;
    const int threads = std::max(1, s.threads);
    Key smallest = kAboveAll;
    std::mutex guard;
    s.candidates = 0;
    Pool::run(threads, [&](int t) {
        ChunkSelector mine(s);
        const Key key = mine.run(chunks * t / threads, chunks * (t + 1) / threads);
        std::lock_guard<std::mutex> lock(guard);
        smallest = std::min(smallest, key);
        s.candidates += mine.candidates();
    });
    s.threshold = smallest;
}

}  // namespace dss
