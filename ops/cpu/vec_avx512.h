// AVX-512F: sixteen lanes. Compress goes to a register and is stored whole: compressing into memory is microcoded on
// some processors.
struct Vec {
    static constexpr int kWidth = 16;
    static constexpr double kDenseFrom = 0.002;
    using F = __m512;
    using Mask = __mmask16;

    static inline F load(const float* p) { return _mm512_loadu_ps(p); }
    static inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static inline __m256i load_halves(const uint16_t* p) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    }
    static inline F load_bf16(const uint16_t* p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_halves(p)), 16));
    }
    static inline F load_fp16(const uint16_t* p) { return _mm512_cvtph_ps(load_halves(p)); }
    static inline F set(float x) { return _mm512_set1_ps(x); }
    static inline __m512i set_key(Key k) { return _mm512_set1_epi32(static_cast<int>(k)); }
    static inline F add(F a, F b) { return _mm512_add_ps(a, b); }
    static inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static inline Mask greater(F a, __m512i below) {
        return _mm512_cmpgt_epi32_mask(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)), below);
    }
    static inline F cleared(F a, Mask m) { return _mm512_maskz_mov_ps(static_cast<Mask>(~m), a); }
    static inline bool any(Mask m) { return m != 0; }
    static inline Mask without(Mask a, Mask b) { return static_cast<Mask>(a & ~b); }
    static inline int count(Mask m) { return __builtin_popcount(m); }
    static inline void append(float* out, F a, Mask m) { _mm512_storeu_ps(out, _mm512_maskz_compress_ps(m, a)); }
    static inline int append(float* values, int32_t* indices, F a, Mask m, int32_t first) {
        const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const __m512i at = _mm512_add_epi32(_mm512_set1_epi32(first), lanes);
        _mm512_storeu_ps(values, _mm512_maskz_compress_ps(m, a));
        _mm512_storeu_si512(indices, _mm512_maskz_compress_epi32(m, at));
        return __builtin_popcount(m);
    }
};
