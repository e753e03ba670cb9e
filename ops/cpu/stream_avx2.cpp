// The streaming pass for processors with AVX2 and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include "common.h"

// For what follows only: an inline function of the headers above may be the copy that every processor runs.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,popcnt"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c,popcnt")
#endif

namespace dss::avx2 {
#include "vec_avx2.h"
#include "codec_values.h"
#include "stream.h"
Variant variant() { return table("avx2"); }
}  // namespace dss::avx2

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
