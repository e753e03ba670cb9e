// The candidates of one thread, and finding the k-th largest key among the candidates of all.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <new>
#include <vector>

#include "common.h"

namespace dss {

constexpr int64_t kSlack = 32;  // a vector's worth of entries may be written behind the last one

// Growing arrays of (value, index[, velocity]) in index order; realloc'd, so that growing touches no new page twice.
struct Buffer {
    float* values = nullptr;
    int32_t* indices = nullptr;
    float* velocities = nullptr;
    int64_t m = 0, capacity = 0;
    bool with_velocity = false;
    std::vector<Key> scratch;

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

// The k-th largest (k >= 1) of the keys; reorders them.
inline Key kth_of(std::vector<Key>& keys, int64_t k) {
    std::nth_element(keys.begin(), keys.begin() + (k - 1), keys.end(), std::greater<Key>());
    return keys[static_cast<size_t>(k - 1)];
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

inline void gather_bin(const Buffer& b, Key first, int bin, std::vector<Key>& keys) {
    keys.clear();
    for (int64_t i = 0; i < b.m; ++i) {
        const Key key = key_of(b.values[i]);
        if (bin_of(key, first) == bin) keys.push_back(key);
    }
}

}  // namespace dss
