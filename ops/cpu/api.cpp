// The C interface that native.py loads.
#include "chunked.h"
#include "codec_indices.h"
#include "scatter.h"
#include "selector.h"

#define DSS_API extern "C" __attribute__((visibility("default")))

namespace {

dss::Scratch& scratch() {
    thread_local dss::Scratch mine;
    return mine;
}

template <class Work>
int status_of(const Work& work) {
    try {
        work();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}  // namespace

// The name of variant `isa`, or null when this processor cannot run it or there is no such variant.
DSS_API const char* dss_variant(int isa) {
    return isa >= 0 && isa < dss::kVariants ? dss::variants()[isa].name : nullptr;
}

// For the loader to compare with its own idea of the structure.
DSS_API int64_t dss_step_bytes() { return static_cast<int64_t>(sizeof(dss::Step)); }

// Selects as `step` says, 0 <= k <= n; for k = 0 the guess must be above every key. Returns 0,
// or 1 when memory ran out (the vectors are then unspecified).
DSS_API int dss_select(dss::Step* step) {
    return status_of([&] { dss::Selector(*step, scratch()).run(); });
}

// The same for k entries of every `chunk` elements, 1 <= k <= chunk.
DSS_API int dss_select_chunked(dss::Step* step) {
    return status_of([&] { dss::select_chunked(*step); });
}

// out[indices] += values. Returns 0, or 2 and has changed nothing when the indices do not ascend within 0..n-1.
DSS_API int dss_scatter_add(float* out, int64_t n, const int32_t* indices, const float* values, int64_t k,
                            int threads) {
    return dss::scatter_add(out, n, indices, values, k, threads) ? 0 : 2;
}

// Returns 0, or 2 and has written nothing when the indices cannot be encoded.
DSS_API int dss_encode_indices(const dss::IndexLayout* layout, const uint32_t* indices, uint8_t* out) {
    return dss::encode_indices(*layout, indices, out) ? 0 : 2;
}

// Returns 1 for corrupt bytes, else 0. `indices` has room for k + kDecodeSlack.
DSS_API int dss_decode_indices(const dss::IndexLayout* layout, const uint8_t* in, uint32_t* indices) {
    return dss::decode_indices(*layout, in, indices);
}

DSS_API void dss_encode_values(int isa, dss::ValueType type, int64_t k, float* values, uint8_t* out) {
    if (k > 0) dss::variants()[isa].encode_values(type, k, values, out);
}

DSS_API void dss_decode_values(int isa, dss::ValueType type, int64_t k, const uint8_t* in, float* values) {
    if (k > 0) dss::variants()[isa].decode_values(type, k, in, values);
}
