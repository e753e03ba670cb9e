// Four lanes by the compilers' vector extensions: ARM and every other processor. No intrinsics.
struct Vec {
    static constexpr int kWidth = 4;
    static constexpr double kDenseFrom = 0.03;
    typedef float F __attribute__((vector_size(16)));
    typedef int32_t I __attribute__((vector_size(16)));
    typedef int64_t L __attribute__((vector_size(16)));
    using Mask = I;  // -1 where true

    static inline F load(const float* p) {
        F x;
        std::memcpy(&x, p, sizeof x);
        return x;
    }
    static inline void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
    static inline F load_bf16(const uint16_t* p) {
        return F{from_bf16(p[0]), from_bf16(p[1]), from_bf16(p[2]), from_bf16(p[3])};
    }
    static inline F load_fp16(const uint16_t* p) {
        return F{from_fp16(p[0]), from_fp16(p[1]), from_fp16(p[2]), from_fp16(p[3])};
    }
    static inline F set(float x) { return F{x, x, x, x}; }
    static inline I set_key(Key k) {
        const int32_t x = static_cast<int32_t>(k);
        return I{x, x, x, x};
    }
    static inline F add(F a, F b) { return a + b; }
    static inline F mul(F a, F b) { return a * b; }
    static inline Mask greater(F a, I below) { return ((I)a & 0x7fffffff) > below; }
    static inline F cleared(F a, Mask m) { return (F)((I)a & ~m); }
    static inline bool any(Mask m) { return (((L)m)[0] | ((L)m)[1]) != 0; }
    static inline Mask without(Mask a, Mask b) { return a & ~b; }
    static inline int count(Mask m) { return -(m[0] + m[1] + m[2] + m[3]); }
    static inline void append(float* out, F a, Mask m) {
        for (int lane = 0; lane < kWidth; ++lane) {
            *out = a[lane];
            out -= m[lane];
        }
    }
    static inline int append(float* values, int32_t* indices, F a, Mask m, int32_t first) {
        int n = 0;
        for (int lane = 0; lane < kWidth; ++lane) {
            values[n] = a[lane];
            indices[n] = first + lane;
            n -= m[lane];
        }
        return n;
    }
};
