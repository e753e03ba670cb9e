// Error-feedback selection on the CPU: one streaming pass over the data, then exact selection among few candidates.
//
// 1. guess a threshold from a small sample     2. stream: add, compare, zero, append candidates (stream.h)
// 3. fewer than k candidates: put them back and stream again with a lower guess
// 4. find the k-th key among the candidates    5. emit the winners in index order, put the others back
// A bad guess costs time and never changes the result: too low, and full buffers are pruned, which raises the
// threshold in flight; too high, and step 3 repeats the pass. Step 2 zeroes what the sample says will be emitted, so
// that step 5 writes to scattered places only where the sample was wrong. Threads own ranges of indices, so their
// results, taken in order, do not depend on how many there are.
#pragma once
#include "candidates.h"
#include "common.h"
#include "pool.h"
#include "sample.h"
#include "variants.h"

namespace dss {

constexpr int64_t kKeepBytes = int64_t{64} << 20;  // scratch above this is given back after the call
constexpr int64_t kFixAhead = 24;                  // scattered writes whose lines are fetched ahead

struct Scratch {  // one per calling thread, kept between calls so that its pages need not be touched anew
    std::vector<Buffer> buffers;
    std::vector<Histogram> histograms;
    std::vector<std::vector<Key>> bins;
    std::vector<Key> sample;
};

class Selector {
   public:
    Selector(Step& step, Scratch& scratch)
        : s_(step), scratch_(scratch), variant_(variants()[step.isa]), threads_(std::max(1, step.threads)),
          form_(form_of(step)), sample_{step, form_, scratch.sample} {
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
        Key lower = s_.threshold, upper = next_above(lower);
        if (s_.samplings < 31) {  // the band of the search: all keys that share the settled leading bits
            const int open = 31 - s_.samplings;
            lower = lower >> open << open;
            upper = lower + (Key{1} << open);
            if (upper > kNan) upper = kAboveAll;
            s_.threshold = lower;
            if (lower < lowest_) recollect(lower);
        }
        emit(lower, upper);
        release();
    }

   private:
    int64_t begin(int t) const { return std::min(s_.n, blocks_ * t / threads_ * kBlock); }

    // Steps 2 and 3.
    void collect() {
        scratch_.sample.clear();
        Thresholds guess = sampled_or_given();
        for (int64_t widen = 4;; widen *= 4) {
            stream_all(guess, true);
            if (total() >= s_.k) return;
            put_back();
            // From here on nothing is added any more, so a sample must see the residual alone.
            if (s_.source != kNone) scratch_.sample.clear();
            s_.source = kNone;
            const Key tried = guess.candidate;
            guess = sample_.thresholds(widen);
            if (guess.candidate >= tried) guess.candidate = 0;
        }
    }

    Thresholds sampled_or_given() {
        if (s_.guess > kAboveAll) return sample_.thresholds(1);
        const Key guess = s_.guess > kNan ? kAboveAll : s_.guess;
        return {guess, guess, false};
    }

    // All of a band is wanted that reaches below the candidates: once more, with nothing added and nothing pruned.
    void recollect(Key lower) {
        put_back();
        s_.source = kNone;
        stream_all({lower, lower, false}, false);
    }

    int64_t total() const {
        int64_t m = 0;
        for (int t = 0; t < threads_; ++t) m += scratch_.buffers[static_cast<size_t>(t)].m;
        return m;
    }

    void stream_all(Thresholds thresholds, bool may_prune) {
        thresholds.zeroed = std::max(thresholds.zeroed, thresholds.candidate);
        thresholds.dense = static_cast<double>(s_.k) > variant_.dense_from * static_cast<double>(s_.n);
        std::vector<Key> lowest(static_cast<size_t>(threads_));
        Pool::run(threads_, [&](int t) { lowest[static_cast<size_t>(t)] = stream_range(t, thresholds, may_prune); });
        thresholds_ = thresholds;
        lowest_ = *std::max_element(lowest.begin(), lowest.end());
        s_.candidates = total();
    }

    // Returns the lowest key from which up the range's candidates are complete.
    Key stream_range(int t, Thresholds thresholds, bool may_prune) {
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
                    thresholds.candidate = prune(b);
                    // What is zeroed must be appended. Both thresholds only rise, so whether an entry was zeroed can
                    // still be told later by comparing its key with the first `zeroed`.
                    thresholds.zeroed = std::max(thresholds.zeroed, thresholds.candidate);
                } else {
                    b.reserve(std::max(2 * b.capacity, b.m + 2 * kBlock), velocity);
                }
            }
            float* const velocities = velocity ? b.velocities + b.m : nullptr;
            b.m += stream(s_, i, stop, thresholds, b.values + b.m, b.indices + b.m, velocities);
        }
        return thresholds.candidate;
    }

    // Keeps the k best of a buffer that holds more, ties by lowest index, and puts the others back. What comes later
    // has higher indices, so it must now exceed the k-th strictly: the returned threshold.
    Key prune(Buffer& b) {
        b.scratch.resize(static_cast<size_t>(b.m));
        for (int64_t j = 0; j < b.m; ++j) b.scratch[static_cast<size_t>(j)] = key_of(b.values[j]);
        const Key kth = kth_of(b.scratch, s_.k, b.m);
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

    void prefetch(const Buffer& b, int64_t j) {
        __builtin_prefetch(s_.residual + b.indices[j], 1);
        if (form_ == kVelocity) __builtin_prefetch(s_.velocity + b.indices[j], 1);
    }

    void put_back() {
        Pool::run(threads_, [&](int t) {
            const Buffer& b = scratch_.buffers[static_cast<size_t>(t)];
            for (int64_t j = 0; j < b.m; ++j) restore(b, j);
        });
    }

    static int64_t count_from(const Buffer& b, Key lower) {
        int64_t count = 0;
        const auto below = static_cast<int32_t>(lower - 1);
        for (int64_t j = 0; j < b.m; ++j) count += static_cast<int32_t>(bits_of(b.values[j]) & 0x7fffffffu) > below;
        return count;
    }

    // Step 4: one histogram above the guess, then the members of one bin.
    Key kth_key() {
        Pool::run(threads_, [&](int t) {
            const auto at = static_cast<size_t>(t);
            scratch_.histograms[at].count(scratch_.buffers[at].values, scratch_.buffers[at].m, thresholds_.candidate);
        });
        int64_t rank = 0;
        const int bin = bin_of_kth(scratch_.histograms, threads_, s_.k, &rank);
        Pool::run(threads_, [&](int t) {
            const auto at = static_cast<size_t>(t);
            gather_bin(variant_, scratch_.buffers[at], thresholds_.candidate, bin, scratch_.bins[at]);
        });
        auto& keys = scratch_.bins[0];
        for (int t = 1; t < threads_; ++t) {
            const auto& more = scratch_.bins[static_cast<size_t>(t)];
            keys.insert(keys.end(), more.begin(), more.end());
        }
        const Key kth = kth_of(keys, rank, static_cast<int64_t>(keys.size()));
        above_ = s_.k - rank;
        ties_ = 0;
        for (const Key key : keys) {
            above_ += key > kth;
            ties_ += key == kth;
        }
        return kth;
    }

    // Step 5: all from `upper` up, and of the band [lower, upper) a run of the right length from `start`.
    void emit(Key lower, Key upper) {
        std::vector<int64_t> above(static_cast<size_t>(threads_)), band(static_cast<size_t>(threads_));
        if (threads_ == 1 && upper == next_above(s_.threshold)) {
            above[0] = above_;
            band[0] = ties_;
        } else {
            Pool::run(threads_, [&](int t) {
                const Buffer& b = scratch_.buffers[static_cast<size_t>(t)];
                above[static_cast<size_t>(t)] = count_from(b, upper);
                band[static_cast<size_t>(t)] = count_from(b, lower) - above[static_cast<size_t>(t)];
            });
        }
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
            const int64_t end = t + 1 < threads_ ? out[at + 1] : s_.k;
            if (wanted == all_band) return emit_all_from(scratch_.buffers[at], lower, out[at], end);
            emit_range(scratch_.buffers[at], lower, upper, out[at], end, before[at] - start, wanted);
        });
    }

    // The usual case: the whole band is taken, so one threshold decides.
    void emit_all_from(Buffer& b, Key lower, int64_t out, int64_t end) {
        variant_.compact(b.values, b.indices, b.m, lower, s_.values + out, s_.indices + out, end - out);
        const Key zeroed = thresholds_.zeroed;
        const int64_t wrong = find_positions(variant_, b, std::min(lower, zeroed), std::max(lower, zeroed));
        for (int64_t w = 0; w < wrong; ++w) {
            if (w + kFixAhead < wrong) prefetch(b, b.positions[static_cast<size_t>(w + kFixAhead)]);
            fix(b, b.positions[static_cast<size_t>(w)]);
        }
        // Candidates below both thresholds were neither zeroed nor emitted: they stand where they belong.
    }

    // An entry that the streaming pass stored wrongly: zeroed but not emitted, or the reverse.
    void fix(const Buffer& b, int64_t j) {
        if (key_of(b.values[j]) >= thresholds_.zeroed) return restore(b, j);
        s_.residual[b.indices[j]] = 0.0f;
        if (form_ == kVelocity) s_.velocity[b.indices[j]] = 0.0f;
    }

    // A run of the band is taken. Free of branches that depend on the data: they would be mispredicted all the time.
    void emit_range(Buffer& b, Key lower, Key upper, int64_t out, int64_t end, int64_t rank, int64_t wanted) {
        b.scratch.resize(static_cast<size_t>(b.m));  // here: the candidates that were stored wrongly
        int64_t wrong = 0, j = 0;
        for (; j < b.m && out < end; ++j) {
            const Key key = key_of(b.values[j]);
            const int in_band = (key >= lower) & (key < upper);
            const int take = (key >= upper) | (in_band & (rank >= 0) & (rank < wanted));
            rank += in_band;
            s_.values[out] = b.values[j];
            s_.indices[out] = b.indices[j];
            out += take;
            b.scratch[static_cast<size_t>(wrong)] = static_cast<Key>(j);
            wrong += take ^ static_cast<int>(key >= thresholds_.zeroed);
        }
        for (int64_t w = 0; w < wrong; ++w) {
            const int64_t at = b.scratch[static_cast<size_t>(w)];
            if (w + kFixAhead < wrong) prefetch(b, b.scratch[static_cast<size_t>(w + kFixAhead)]);
            fix(b, at);
        }
        for (; j < b.m; ++j) restore(b, j);
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
    Form form_;
    Sample sample_;
    int64_t blocks_ = 0;
    Thresholds thresholds_{};
    Key lowest_ = 0;
    int64_t above_ = 0, ties_ = 0;  // entries above the k-th key, and equal to it
};

}  // namespace dss
