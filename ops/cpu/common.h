// Types shared by the parts of the CPU tier. No Python or torch header: the library is loaded by ctypes.
#pragma once
#include <cstdint>
#include <cstring>

namespace dss {

using Key = uint32_t;  // bits & 0x7fffffff: orders like the magnitude; 2^31 stands above every key
constexpr Key kNan = 0x7f800001u;  // all NaNs count as this one, whatever their payload
constexpr Key kAboveAll = 0x80000000u;
constexpr int64_t kSlack = 32;    // a vector's worth of entries may be written behind the last one
constexpr int64_t kBlock = 4096;  // elements between two looks at the space left in a candidate buffer

enum Source : int32_t { kNone = 0, kFp32 = 1, kBf16 = 2, kFp16 = 3 };  // what is added; kNone: nothing
enum Form : int32_t { kPlain = 0, kDecay = 1, kVelocity = 2 };
constexpr int kSources = 4, kForms = 3;

// One call, as Python fills it in (same order as the ctypes structure in native.py).
struct Step {
    float* residual;      // [n], in and out
    const void* grad;     // [n] of `source`, or null
    float* velocity;      // [n], in and out, or null
    float* values;        // [k], out
    int32_t* indices;     // [k], out
    int64_t n;
    int64_t k;            // for chunked: entries a chunk
    uint64_t seed;        // draws the start in mstopk's band
    int64_t candidates;   // out
    float decay;
    float momentum;
    int32_t source;
    int32_t threads;
    int32_t isa;          // index into the table of variants, see variants.h
    int32_t samplings;    // mstopk: bits settled, 1..31; 31 with take_first: exact top-k
    int32_t take_first;   // 1: of the band, take the lowest indices; 0: a run from a random start
    int32_t chunk;        // chunked: elements a chunk
    Key guess;            // first threshold to try; kAboveAll + 1: sample it
    Key threshold;        // out
};

inline Form form_of(const Step& s) {
    return s.velocity != nullptr ? kVelocity : (s.decay != 1.0f ? kDecay : kPlain);
}

inline uint32_t bits_of(float x) {
    uint32_t b;
    std::memcpy(&b, &x, 4);
    return b;
}
inline float float_of(uint32_t b) {
    float x;
    std::memcpy(&x, &b, 4);
    return x;
}
inline Key key_of(float x) {
    const Key key = bits_of(x) & 0x7fffffffu;
    return key < kNan ? key : kNan;
}
// The least threshold above `key`. No threshold lies between two NaN payloads, so the streaming pass may compare raw
// bits: for thresholds up to kNan, and for kAboveAll, that comes to the same as comparing keys.
inline Key next_above(Key key) { return key < kNan ? key + 1 : kAboveAll; }

inline float from_bf16(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

// Shift the 10-bit mantissa into place and let one multiplication re-bias the exponent: exact, subnormals included.
inline float from_fp16(uint16_t h) {
    const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fff) << 13;
    uint32_t b = bits_of(float_of(magnitude) * 0x1p112f);
    if (magnitude >= (0x7c00u << 13)) b |= 0x7f800000u;  // Inf and NaN keep their exponent of ones
    return float_of(b | static_cast<uint32_t>(h & 0x8000) << 16);
}

inline float grad_at(const Step& s, int32_t source, int64_t i) {
    switch (source) {
        case kFp32: return static_cast<const float*>(s.grad)[i];
        case kBf16: return from_bf16(static_cast<const uint16_t*>(s.grad)[i]);
        case kFp16: return from_fp16(static_cast<const uint16_t*>(s.grad)[i]);
        default: return 0.0f;
    }
}

// The accumulated element i, without storing it; the sample and the tails use it.
inline float accumulated_at(const Step& s, int32_t source, Form form, int64_t i, float* velocity_out) {
    if (source == kNone) {
        if (form == kVelocity) *velocity_out = s.velocity[i];
        return s.residual[i];
    }
    float added = grad_at(s, source, i);
    if (form == kVelocity) {
        const float kept = s.momentum * s.velocity[i];
        added = kept + added;
        *velocity_out = added;
    }
    const float old = form == kPlain ? s.residual[i] : s.decay * s.residual[i];
    return old + added;
}

// What the streaming pass compares with. Which value `zeroed` has changes the time and never the result.
struct Thresholds {
    Key candidate;  // keys from here up are appended
    Key zeroed;     // >= candidate; keys from here up are stored as 0 at once, because they will probably be emitted
    bool dense;     // many candidates are expected: append without asking first whether there are any
};

// Adds elements [begin, end) up, stores them, the likely winners as 0, and appends the candidates in index order.
// Returns how many; the buffers have room for end - begin plus one vector.
using Stream = int64_t (*)(const Step&, int64_t begin, int64_t end, const Thresholds&, float* values, int32_t* indices,
                           float* velocities);
// Positions in values[0..m) of the keys in [from, to), ascending, into `out` (room for m plus one vector).
using Positions = int64_t (*)(const float* values, int64_t m, Key from, Key to, int32_t* out);
// Copies the entries with key >= from to the front of out_values and out_indices, in order, writing at most `room`.
using Compact = int64_t (*)(const float* values, const int32_t* indices, int64_t m, Key from, float* out_values,
                            int32_t* out_indices, int64_t room);
// Codecs of k values; encoding leaves what was lost in `values`. The order of VALUE_BITS in layout.py.
enum ValueType : int32_t { kValueFp32, kValueBf16, kValueFp16, kValueInt8, kValueInt4, kValueInt2 };
constexpr int kScaleBlock = 128;  // values that share a scale
using EncodeValues = void (*)(ValueType type, int64_t k, float* values, uint8_t* out);
using DecodeValues = void (*)(ValueType type, int64_t k, const uint8_t* in, float* values);

struct Variant {
    const char* name;
    double dense_from;  // density from which appending without asking is faster
    Stream stream[kSources][kForms];
    Positions positions;
    Compact compact;
    EncodeValues encode_values;
    DecodeValues decode_values;
};

}  // namespace dss
