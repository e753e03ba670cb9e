// AVX2 with F16C: eight lanes.

// For each 8-bit mask the numbers of its set bits, lowest first: the permutation that moves passed lanes to the front.
struct Compress {
    alignas(8) uint8_t lanes[256][8];
    constexpr Compress() : lanes{} {
        for (int mask = 0; mask < 256; ++mask)
            for (int lane = 0, n = 0; lane < 8; ++lane)
                if (mask >> lane & 1) lanes[mask][n++] = static_cast<uint8_t>(lane);
    }
};
static constexpr Compress kCompress{};

struct Vec {
    static constexpr int kWidth = 8;
    static constexpr double kDenseFrom = 0.005;
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
    static inline Mask without(Mask a, Mask b) { return _mm256_andnot_si256(b, a); }
    static inline int count(Mask m) { return __builtin_popcount(bits(m)); }
    static inline __m256i to_front(unsigned mask) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(kCompress.lanes[mask])));
    }
    static inline void append(float* out, F a, Mask m) {
        _mm256_storeu_ps(out, _mm256_permutevar8x32_ps(a, to_front(bits(m))));
    }
    static inline int append(float* values, int32_t* indices, F a, Mask m, int32_t first) {
        const unsigned passed = bits(m);
        const __m256i lanes = to_front(passed);
        _mm256_storeu_ps(values, _mm256_permutevar8x32_ps(a, lanes));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(indices), _mm256_add_epi32(_mm256_set1_epi32(first), lanes));
        return __builtin_popcount(passed);
    }
};
