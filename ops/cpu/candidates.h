// The candidates of one thread, and finding the k-th largest key among the candidates of all.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <new>
#include <vector>

#include "common.h"

namespace dss {

// Growing arrays of (value, index[, velocity]) in index order; realloc'd, so that growing touches no new page twice.
struct Buffer {
    float* values = nullptr;
    int32_t* indices = nullptr;
    float* velocities = nullptr;
    int64_t m = 0, capacity = 0;
    bool with_velocity = false;
    std::vector<Key> scratch;
    std::vector<int32_t> positions;

    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    Buffer(Buffer&& b) noexcept : values(b.values), indices(b.indices), velocities(b.velocities), m(b.m),
          capacity(b.capacity), with_velocity(b.with_velocity) {
        b.values = b.velocities = nullptr;
        b.indices = nullptr;
    }
    ~Buffer() { release(); }

    void release() {
        std::free(values);
        std::free(indices);
        std::free(velocities);
        values = velocities = nullptr;
        indices = nullptr;
        m = capacity = 0;
        std::vector<Key>().swap(scratch);
        std::vector<int32_t>().swap(positions);
    }
    void reserve(int64_t wanted, bool velocity) {
        if (wanted <= capacity && velocity <= with_velocity) return;
        wanted = std::max(wanted, capacity);
        grow(values, wanted);
        grow(indices, wanted);
        if (velocity) grow(velocities, wanted);
        with_velocity = velocity || with_velocity;
        if (with_velocity && !velocity) grow(velocities, wanted);
        capacity = wanted;
    }

   private:
    template <class T>
    static void grow(T*& p, int64_t wanted) {
        void* q = std::realloc(p, static_cast<size_t>(wanted + kSlack) * sizeof(T));
        if (q == nullptr) throw std::bad_alloc();
        p = static_cast<T*>(q);
    }
};

// The k-th largest (k >= 1) of the first m keys. A count by the leading 12 of their 31 bits leaves one bin's worth of
// keys to be partitioned, which spares the partition's mispredicted branches.
inline Key kth_of(const std::vector<Key>& keys, int64_t k, int64_t m) {
    constexpr int kShift = 31 - 12;
    if (m < 2048) {
        std::vector<Key> few(keys.begin(), keys.begin() + m);
        std::nth_element(few.begin(), few.begin() + (k - 1), few.end(), std::greater<Key>());
        return few[static_cast<size_t>(k - 1)];
    }
    std::vector<uint32_t> count(size_t{1} << 12);
    for (int64_t j = 0; j < m; ++j) ++count[keys[static_cast<size_t>(j)] >> kShift];
    size_t bin = count.size() - 1;
    for (; k > count[bin]; --bin) k -= count[bin];
    std::vector<Key> members;
    members.reserve(count[bin]);
    for (int64_t j = 0; j < m; ++j)
        if (keys[static_cast<size_t>(j)] >> kShift == bin) members.push_back(keys[static_cast<size_t>(j)]);
    std::nth_element(members.begin(), members.begin() + (k - 1), members.end(), std::greater<Key>());
    return members[static_cast<size_t>(k - 1)];
}

// Counts of keys in 4096 equal bins from `first` up, the last bin taking everything above: as the guess lies just
// below the k-th key, the low bins hold it and resolve it finely.
constexpr int kBins = 4096, kBinShift = 11;
inline int bin_of(Key key, Key first) {
    const Key bin = (key - first) >> kBinShift;
    return bin < kBins - 1 ? static_cast<int>(bin) : kBins - 1;
}

struct Histogram {
    // Four tables taken in turn: equal bins in a row would make each increment wait for the one before.
    std::vector<uint32_t> table = std::vector<uint32_t>(4 * kBins);

    void count(const float* values, int64_t m, Key first) {
        std::fill(table.begin(), table.end(), 0u);
        for (int64_t i = 0; i < m; ++i) {
            const int bin = bin_of(key_of(values[i]), first);
            ++table[static_cast<size_t>((i & 3) * kBins + bin)];
        }
    }
    int64_t at(int bin) const {
        const size_t b = static_cast<size_t>(bin);
        return int64_t{table[b]} + table[b + kBins] + table[b + 2 * kBins] + table[b + 3 * kBins];
    }
};

// From the histograms of several threads: the bin of the k-th largest, and its rank k' within the bin.
inline int bin_of_kth(const std::vector<Histogram>& histograms, int threads, int64_t k, int64_t* rank) {
    for (int bin = kBins - 1;; --bin) {
        int64_t here = 0;
        for (int t = 0; t < threads; ++t) here += histograms[static_cast<size_t>(t)].at(bin);
        if (k <= here || bin == 0) {
            *rank = k;
            return bin;
        }
        k -= here;
    }
}

// Positions of a buffer's keys in [from, to), in its own scratch.
inline int64_t find_positions(const Variant& variant, Buffer& b, Key from, Key to) {
    if (b.positions.size() < static_cast<size_t>(b.m + kSlack)) b.positions.resize(static_cast<size_t>(b.m + kSlack));
    return variant.positions(b.values, b.m, from, to, b.positions.data());
}

// The keys of one bin of the histogram.
inline void gather_bin(const Variant& variant, Buffer& b, Key first, int bin, std::vector<Key>& keys) {
    const Key from = first + (static_cast<Key>(bin) << kBinShift);
    const Key to = bin == kBins - 1 || from + (1u << kBinShift) > kNan ? kAboveAll : from + (1u << kBinShift);
    const int64_t found = find_positions(variant, b, from, to);
    keys.resize(static_cast<size_t>(found));
    for (int64_t j = 0; j < found; ++j)
        keys[static_cast<size_t>(j)] = key_of(b.values[b.positions[static_cast<size_t>(j)]]);
}

}  // namespace dss
