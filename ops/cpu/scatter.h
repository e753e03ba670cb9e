// out[indices] += values for one peer's payload. Indices are distinct, so threads never meet in an element.
#pragma once
#include "pool.h"

namespace dss {

inline bool scatter_add(float* out, int64_t n, const int32_t* indices, const float* values, int64_t k, int threads) {
    if (k == 0) return true;
    bool ascending = indices[0] >= 0 && indices[k - 1] < n;
    for (int64_t j = 1; j < k; ++j) ascending &= indices[j - 1] < indices[j];
    if (!ascending) return false;
    Pool::run(threads, [&](int t) {
        const int64_t end = k * (t + 1) / threads;
        for (int64_t j = k * t / threads; j < end; ++j) out[indices[j]] += values[j];
    });
    return true;
}

}  // namespace dss
