// A small sample of the accumulated vector, to guess thresholds from. It decides about time, never about results.
#pragma once
#include <cmath>

#include "candidates.h"
#include "common.h"

namespace dss {

constexpr int64_t kLinesAhead = 16;                // sampled lines that are fetched ahead
constexpr int64_t kLine = 16;                      // elements sampled side by side: a cache line of fp32

inline uint64_t mix(uint64_t z) {  // splitmix64
    z += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

struct Sample {
    const Step& step;
    const Form form;
    std::vector<Key>& keys;  // empty: not drawn yet

    // The sample's s-th largest estimates the threshold; three standard deviations of s more make a guess that
    // is too high rare, at the price of some more candidates.
    Thresholds thresholds(int64_t widen) const {
        if (keys.empty()) draw();
        const auto size = static_cast<int64_t>(keys.size());
        const double share = static_cast<double>(size) * static_cast<double>(step.k) / static_cast<double>(step.n);
        const auto estimate = std::min(size, std::max<int64_t>(1, std::llround(share)));
        auto rank = static_cast<int64_t>(static_cast<double>(widen) * (share + 3.0 * std::sqrt(share) + 1.0));
        if (size == step.n && widen == 1) rank = step.k;
        if (rank > size) return {0, kth_of(keys, estimate, size), false};
        return {kth_of(keys, rank, size), kth_of(keys, std::min(estimate, rank), size), false};
    }

    // Lines of 16 neighbours, one at a jittered place in each of equal strata; small inputs are taken whole.
    void draw() const {
        if (step.n <= 2 * kBlock) return draw_line(0, step.n);
        const int64_t lines = std::min<int64_t>(1024, std::max<int64_t>(64, step.n / 128 / kLine));
        const int64_t stratum = step.n / lines;
        const auto places = static_cast<uint64_t>(stratum / kLine);
        const auto first = [&](int64_t line) {
            return line * stratum + static_cast<int64_t>(mix(static_cast<uint64_t>(line)) % places) * kLine;
        };
        for (int64_t line = 0; line < lines; ++line) {
            if (line + kLinesAhead < lines) fetch_line(first(line + kLinesAhead));
            draw_line(first(line), first(line) + kLine);
        }
    }

    void fetch_line(int64_t i) const {
        const int64_t grad_bytes = step.source == kFp32 ? 4 : 2;
        __builtin_prefetch(step.residual + i);
        if (step.source != kNone) __builtin_prefetch(static_cast<const char*>(step.grad) + i * grad_bytes);
        if (form == kVelocity) __builtin_prefetch(step.velocity + i);
    }

    void draw_line(int64_t begin, int64_t end) const {
        float unused;
        for (int64_t i = begin; i < end; ++i)
            keys.push_back(key_of(accumulated_at(step, step.source, form, i, &unused)));
    }
};

}  // namespace dss
