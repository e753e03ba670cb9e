// Error-feedback selection on the CPU: one streaming pass over the data, then exact selection among few candidates.
//
// 1. guess a threshold from a small sample     2. stream: add, compare, zero, append candidates (stream.h)
// 3. fewer than k candidates: put them back and stream again with a lower guess
// 4. find the k-th key among the candidates    5. emit the winners in index order, put the others back
// A bad guess costs time and never changes the result: too low, and full buffers are pruned, which raises the
// threshold in flight; too high, and step 3 repeats the pass. Threads own ranges of indices, so their results, taken
// in order, do not depend on how many there are.
#pragma once
#include <cmath>

#include "candidates.h"
#include "common.h"
#include "pool.h"
#include "variants.h"

namespace dss {

constexpr int64_t kKeepBytes = int64_t{64} << 20;  // scratch above this is given back after the call
constexpr int64_t kLine = 16;                      // elements sampled side by side: a cache line of fp32

inline uint64_t mix(uint64_t z) {  // splitmix64
    z += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

struct Scratch {  // one per calling thread, kept between calls so that its pages need not be touched anew
    std::vector<Buffer> buffers;
    std::vector<Histogram> histograms;
    std::vector<std::vector<Key>> bins;
    std::vector<Key> sample;
};

class Selector {
   public:
    Selector(Step& step, Scratch& scratch)
        : s_(step), scratch_(scratch), variant_(variants()[step.isa]), threads_(std::max(1, step.threads)) {
        form_ = s_.velocity != nullptr ? kVelocity : (s_.decay != 1.0f ? kDecay : kPlain);
        while (static_cast<int>(scratch_.buffers.size()) < threads_) {
            scratch_.buffers.emplace_back();
            scratch_.histograms.emplace_back();
            scratch_.bins.emplace_back();
        }
        blocks_ = (s_.n + kBlock - 1) / kBlock;
    }

    void run() {
        collect();
        if (s_.k == 0) return;
        s_.threshold = kth_key();
        Key lower = s_.threshold, upper = lower + 1;
        if (s_.samplings < 31) {  // the band of the search: all keys that share the settled leading bits
            const int open = 31 - s_.samplings;
            lower = lower >> open << open;
            upper = lower + (Key{1} << open);
            s_.threshold = lower;
            if (lower < lowest_) recollect(lower);
        }
        emit(lower, upper);
        release();
    }

   private:
    int64_t begin(int t) const { return std::min(s_.n, blocks_ * t / threads_ * kBlock); }

    // Step 1. The sample's s-th largest estimates the threshold; four standard deviations of s more make a guess that
    // is too high rare, at the price of some more candidates.
    Key sampled_guess(int64_t widen) {
        auto& sample = scratch_.sample;
        if (sample.empty()) draw();
        const auto size = static_cast<int64_t>(sample.size());
        const double share = static_cast<double>(size) * static_cast<double>(s_.k) / static_cast<double>(s_.n);
        const bool whole = size == s_.n;
        const double rank = (whole ? share : share + 4.0 * std::sqrt(share) + 1.0) * static_cast<double>(widen);
        if (rank >= static_cast<double>(size) && !(whole && widen == 1)) return 0;
        return kth_of(sample, std::min(size, std::max<int64_t>(1, std::llround(rank))));
    }

    // Lines of 16 neighbours, one at a jittered place in each of equal strata; small inputs are taken whole.
    void draw() {
        if (s_.n <= 2 * kBlock) return draw_line(0, s_.n);
        const int64_t lines = std::min<int64_t>(1024, std::max<int64_t>(64, s_.n / 128 / kLine));
        const int64_t stratum = s_.n / lines;
        const auto places = static_cast<uint64_t>(stratum / kLine);
        for (int64_t l = 0; l < lines; ++l) {
            const int64_t first = l * stratum + static_cast<int64_t>(mix(static_cast<uint64_t>(l)) % places) * kLine;
            draw_line(first, first + kLine);
        }
    }

    void draw_line(int64_t begin, int64_t end) {
        float unused;
        for (int64_t i = begin; i < end; ++i)
            scratch_.sample.push_back(key_of(accumulated_at(s_, s_.source, form_, i, &unused)));
    }

    // Steps 2 and 3.
    void collect() {
        scratch_.sample.clear();
        Key guess = s_.guess > kAboveAll ? sampled_guess(1) : (s_.guess > kNan ? kAboveAll : s_.guess);
        for (int64_t widen = 4;; widen *= 4) {
            stream_all(guess, true);
            if (total() >= s_.k) return;
            put_back();
            // From here on nothing is added any more, so a sample must see the residual alone.
            const bool fresh = s_.source != kNone;
            s_.source = kNone;
            if (fresh) scratch_.sample.clear();
            const Key next = sampled_guess(widen);
            guess = next < guess ? next : 0;
        }
    }

    // All of a band is wanted that reaches below the candidates: once more, with nothing added and nothing pruned.
    void recollect(Key lower) {
        put_back();
        s_.source = kNone;
        stream_all(lower, false);
    }

    int64_t total() const {
        int64_t m = 0;
        for (int t = 0; t < threads_; ++t) m += scratch_.buffers[static_cast<size_t>(t)].m;
        return m;
    }

    void stream_all(Key guess, bool may_prune) {
        std::vector<Key> lowest(static_cast<size_t>(threads_));
        Pool::run(threads_, [&](int t) { lowest[static_cast<size_t>(t)] = stream_range(t, guess, may_prune); });
        guess_ = guess;
        lowest_ = *std::max_element(lowest.begin(), lowest.end());
        s_.candidates = total();
    }

    // Returns the lowest key of which the range's candidates are known to be complete.
    Key stream_range(int t, Key threshold, bool may_prune) {
        Buffer& b = scratch_.buffers[static_cast<size_t>(t)];
        const Stream stream = variant_.stream[s_.source][form_];
        const bool velocity = form_ == kVelocity;
        const int64_t limit = 2 * s_.k + 16 * kBlock, end = begin(t + 1);
        b.m = 0;
        b.reserve(std::min(limit, (s_.k + s_.k / 2) / threads_ + 2 * kBlock), velocity);
        for (int64_t i = begin(t); i < end; i += kBlock) {
            const int64_t stop = std::min(end, i + kBlock);
            if (b.capacity - b.m < stop - i) {
                if (may_prune && b.m + kBlock > limit) {
                    threshold = prune(b);
                } else {
                    b.reserve(std::max(2 * b.capacity, b.m + 2 * kBlock), velocity);
                }
            }
            float* const velocities = velocity ? b.velocities + b.m : nullptr;
            b.m += stream(s_, i, stop, threshold, b.values + b.m, b.indices + b.m, velocities);
        }
        return threshold;
    }

    // Keeps the k best of a buffer that holds more, ties by lowest index, and puts the others back. What comes later
    // has higher indices, so it must now exceed the k-th strictly: the returned threshold.
    Key prune(Buffer& b) {
        b.scratch.resize(static_cast<size_t>(b.m));
        for (int64_t j = 0; j < b.m; ++j) b.scratch[static_cast<size_t>(j)] = key_of(b.values[j]);
        const Key kth = kth_of(b.scratch, s_.k);
        int64_t ties = s_.k - count_from(b, next_above(kth)), kept = 0;
        for (int64_t j = 0; j < b.m; ++j) {
            const Key key = key_of(b.values[j]);
            if (key > kth || (key == kth && ties-- > 0)) {
                b.values[kept] = b.values[j];
                b.indices[kept] = b.indices[j];
                if (form_ == kVelocity) b.velocities[kept] = b.velocities[j];
                ++kept;
            } else {
                restore(b, j);
            }
        }
        b.m = kept;
        return next_above(kth);
    }

    void restore(const Buffer& b, int64_t j) {
        s_.residual[b.indices[j]] = b.values[j];
        if (form_ == kVelocity) s_.velocity[b.indices[j]] = b.velocities[j];
    }

    void put_back() {
        Pool::run(threads_, [&](int t) {
            const Buffer& b = scratch_.buffers[static_cast<size_t>(t)];
            for (int64_t j = 0; j < b.m; ++j) restore(b, j);
        });
    }

    static int64_t count_from(const Buffer& b, Key lower) {
        int64_t count = 0;
        for (int64_t j = 0; j < b.m; ++j) count += key_of(b.values[j]) >= lower;
        return count;
    }

    // Step 4: one histogram above the guess, then the members of one bin.
    Key kth_key() {
        Pool::run(threads_, [&](int t) {
            const auto at = static_cast<size_t>(t);
            scratch_.histograms[at].count(scratch_.buffers[at].values, scratch_.buffers[at].m, guess_);
        });
        int64_t rank = 0;
        const int bin = bin_of_kth(scratch_.histograms, threads_, s_.k, &rank);
        Pool::run(threads_, [&](int t) {
            gather_bin(scratch_.buffers[static_cast<size_t>(t)], guess_, bin, scratch_.bins[static_cast<size_t>(t)]);
        });
        auto& keys = scratch_.bins[0];
        for (int t = 1; t < threads_; ++t) {
            const auto& more = scratch_.bins[static_cast<size_t>(t)];
            keys.insert(keys.end(), more.begin(), more.end());
        }
        return kth_of(keys, rank);
    }

    // Step 5: all from `upper` up, and of the band [lower, upper) a run of the right length from `start`.
    void emit(Key lower, Key upper) {
        std::vector<int64_t> above(static_cast<size_t>(threads_)), band(static_cast<size_t>(threads_));
        Pool::run(threads_, [&](int t) {
            const Buffer& b = scratch_.buffers[static_cast<size_t>(t)];
            above[static_cast<size_t>(t)] = count_from(b, upper);
            band[static_cast<size_t>(t)] = count_from(b, lower) - above[static_cast<size_t>(t)];
        });
        int64_t all_above = 0, all_band = 0;
        for (int t = 0; t < threads_; ++t) {
            all_above += above[static_cast<size_t>(t)];
            all_band += band[static_cast<size_t>(t)];
        }
        const int64_t wanted = s_.k - all_above;
        const auto starts = static_cast<uint64_t>(all_band - wanted + 1);
        const int64_t start = s_.take_first ? 0 : static_cast<int64_t>(((mix(s_.seed) >> 32) * starts) >> 32);
        std::vector<int64_t> out(static_cast<size_t>(threads_)), before(static_cast<size_t>(threads_));
        int64_t seen_above = 0, seen_band = 0;
        for (int t = 0; t < threads_; ++t) {
            const int64_t taken = std::min(std::max<int64_t>(seen_band - start, 0), wanted);
            out[static_cast<size_t>(t)] = seen_above + taken;
            before[static_cast<size_t>(t)] = seen_band;
            seen_above += above[static_cast<size_t>(t)];
            seen_band += band[static_cast<size_t>(t)];
        }
        Pool::run(threads_, [&](int t) {
            const auto at = static_cast<size_t>(t);
            emit_range(scratch_.buffers[at], lower, upper, out[at], before[at] - start, wanted);
        });
    }

    void emit_range(const Buffer& b, Key lower, Key upper, int64_t out, int64_t rank, int64_t wanted) {
        for (int64_t j = 0; j < b.m; ++j) {
            const Key key = key_of(b.values[j]);
            bool take = key >= upper;
            if (!take && key >= lower) {
                take = rank >= 0 && rank < wanted;
                ++rank;
            }
            if (take) {
                s_.values[out] = b.values[j];
                s_.indices[out++] = b.indices[j];
            } else {
                restore(b, j);
            }
        }
    }

    void release() {
        for (auto& b : scratch_.buffers)
            if (b.capacity * 12 > kKeepBytes) b.release();
        for (auto& keys : scratch_.bins)
            if (static_cast<int64_t>(keys.capacity()) * 4 > kKeepBytes) std::vector<Key>().swap(keys);
    }

    Step& s_;
    Scratch& scratch_;
    const Variant& variant_;
    int threads_;
    Form form_ = kPlain;
    int64_t blocks_ = 0;
    Key guess_ = 0, lowest_ = 0;
};

}  // namespace dss
