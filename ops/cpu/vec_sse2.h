// Plain x86-64: four lanes.
struct Vec {
    static constexpr int kWidth = 4;
    static constexpr double kDenseFrom = 0.03;
    using F = __m128;
    using Mask = __m128i;

    static inline F load(const float* p) { return _mm_loadu_ps(p); }
    static inline void store(float* p, F x) { _mm_storeu_ps(p, x); }
    static inline __m128i widen(const uint16_t* p) {
        return _mm_unpacklo_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), _mm_setzero_si128());
    }
    static inline F load_bf16(const uint16_t* p) { return _mm_castsi128_ps(_mm_slli_epi32(widen(p), 16)); }
    static inline F load_fp16(const uint16_t* p) {  // from_fp16, four at a time
        const __m128i h = widen(p);
        const __m128i magnitude = _mm_slli_epi32(_mm_and_si128(h, _mm_set1_epi32(0x7fff)), 13);
        const __m128i sign = _mm_slli_epi32(_mm_and_si128(h, _mm_set1_epi32(0x8000)), 16);
        const __m128i scaled = _mm_castps_si128(_mm_mul_ps(_mm_castsi128_ps(magnitude), _mm_set1_ps(0x1p112f)));
        const __m128i special = _mm_cmpgt_epi32(magnitude, _mm_set1_epi32((0x7c00 << 13) - 1));
        const __m128i exponent = _mm_and_si128(special, _mm_set1_epi32(0x7f800000));
        return _mm_castsi128_ps(_mm_or_si128(_mm_or_si128(scaled, exponent), sign));
    }
    static inline F set(float x) { return _mm_set1_ps(x); }
    static inline __m128i set_key(Key k) { return _mm_set1_epi32(static_cast<int>(k)); }
    static inline F add(F a, F b) { return _mm_add_ps(a, b); }
    static inline F mul(F a, F b) { return _mm_mul_ps(a, b); }
    static inline Mask greater(F a, __m128i below) {
        return _mm_cmpgt_epi32(_mm_and_si128(_mm_castps_si128(a), _mm_set1_epi32(0x7fffffff)), below);
    }
    static inline F cleared(F a, Mask m) { return _mm_andnot_ps(_mm_castsi128_ps(m), a); }
    static inline unsigned bits(Mask m) { return static_cast<unsigned>(_mm_movemask_ps(_mm_castsi128_ps(m))); }
    static inline bool any(Mask m) { return bits(m) != 0; }
    static inline Mask without(Mask a, Mask b) { return _mm_andnot_si128(b, a); }
    static inline int count(Mask m) { return __builtin_popcount(bits(m)); }
    // Lane by lane and free of branches: which of four lanes pass is not predictable.
    static inline void append(float* out, F a, Mask m) {
        alignas(16) float lanes[kWidth];
        alignas(16) int32_t passed[kWidth];  // -1 where passed
        _mm_store_ps(lanes, a);
        _mm_store_si128(reinterpret_cast<__m128i*>(passed), m);
        for (int lane = 0; lane < kWidth; ++lane) {
            *out = lanes[lane];
            out -= passed[lane];
        }
    }
    static inline int append(float* values, int32_t* indices, F a, Mask m, int32_t first) {
        alignas(16) float lanes[kWidth];
        alignas(16) int32_t passed[kWidth];
        _mm_store_ps(lanes, a);
        _mm_store_si128(reinterpret_cast<__m128i*>(passed), m);
        int n = 0;
        for (int lane = 0; lane < kWidth; ++lane) {
            values[n] = lanes[lane];
            indices[n] = first + lane;
            n -= passed[lane];
        }
        return n;
    }
};
