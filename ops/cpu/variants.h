// One copy of the streaming pass and of the value codecs per instruction set (stream_*.cpp), chosen at run time.
#pragma once
#include "common.h"

namespace dss {

namespace generic { Variant variant(); }
#if defined(__x86_64__)
namespace sse2 { Variant variant(); }
namespace avx2 { Variant variant(); }
namespace avx512 { Variant variant(); }
#endif

constexpr int kVariants = 4;

// The tables, in the order of the `isa` numbers; an entry this processor cannot run has no name.
inline const Variant* variants() {
    static const struct Table {
        Variant all[kVariants];
        Table() : all{} {
            all[0] = generic::variant();
#if defined(__x86_64__)
            __builtin_cpu_init();
            all[1] = sse2::variant();
            // Code of a wider set, this call included, never runs where the processor does not have it.
            if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) all[2] = avx2::variant();
            if (__builtin_cpu_supports("avx512f")) all[3] = avx512::variant();
#endif
        }
    } table;
    return table.all;
}

}  // namespace dss
