// AVX2 with F16C: eight lanes.
#include "vec_x86.h"

struct Vec {
    static constexpr int kWidth = 8;
    using F = __m256;
    using Mask = __m256i;

    static inline F load(const float* p) { return _mm256_loadu_ps(p); }
    static inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static inline __m128i load_halves(const uint16_t* p) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    }
    static inline F load_bf16(const uint16_t* p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(p)), 16));
    }
    static inline F load_fp16(const uint16_t* p) { return _mm256_cvtph_ps(load_halves(p)); }
    static inline F set(float x) { return _mm256_set1_ps(x); }
    static inline __m256i set_key(Key k) { return _mm256_set1_epi32(static_cast<int>(k)); }
    static inline F add(F a, F b) { return _mm256_add_ps(a, b); }
    static inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static inline Mask greater(F a, __m256i below) {
        return _mm256_cmpgt_epi32(_mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7fffffff)), below);
    }
    static inline F cleared(F a, Mask m) { return _mm256_andnot_ps(_mm256_castsi256_ps(m), a); }
    static inline unsigned bits(Mask m) { return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(m))); }
    static inline bool any(Mask m) { return bits(m) != 0; }
    static inline void append(float* out, F a, Mask m) {
        alignas(32) float lanes[kWidth];
        _mm256_store_ps(lanes, a);
        append_bits(out, lanes, bits(m));
    }
    static inline int append(float* values, int32_t* indices, F a, Mask m, int32_t first) {
        alignas(32) float lanes[kWidth];
        _mm256_store_ps(lanes, a);
        return append_bits(values, indices, lanes, bits(m), first);
    }
};
