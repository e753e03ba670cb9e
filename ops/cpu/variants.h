// One copy of the streaming pass and of the value codecs per instruction set, chosen at run time.
#pragma once
#include "common.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dss {

namespace generic {
#include "vec_generic.h"
#include "codec_values.h"
#include "stream.h"
}  // namespace generic

#if defined(__x86_64__)
namespace sse2 {
#include "vec_sse2.h"
#include "codec_values.h"
#include "stream.h"
}  // namespace sse2

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,popcnt"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c,popcnt")
#endif
namespace avx2 {
#include "vec_avx2.h"
#include "codec_values.h"
#include "stream.h"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,f16c,popcnt"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,f16c,popcnt")
#endif
namespace avx512 {
#include "vec_avx512.h"
#include "codec_values.h"
#include "stream.h"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

constexpr int kVariants = 4;

// The tables, in the order of the `isa` numbers; an entry this processor cannot run has no name.
inline const Variant* variants() {
    static const struct Table {
        Variant all[kVariants];
        Table() : all{} {
            all[0] = generic::variant("generic");
#if defined(__x86_64__)
            __builtin_cpu_init();
            all[1] = sse2::variant("sse2");
            // The tables are built by plain code: `variant` of a wider set is never called where it cannot run.
            if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) all[2] = avx2::variant("avx2");
            if (__builtin_cpu_supports("avx512f")) all[3] = avx512::variant("avx512");
#endif
        }
    } table;
    return table.all;
}

}  // namespace dss
