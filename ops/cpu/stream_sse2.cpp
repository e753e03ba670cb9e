// The streaming pass for every x86-64 processor.
#if defined(__x86_64__)
#include <emmintrin.h>

#include "common.h"

namespace dss::sse2 {
#include "vec_sse2.h"
#include "codec_values.h"
#include "stream.h"
Variant variant() { return table("sse2"); }
}  // namespace dss::sse2
#endif
