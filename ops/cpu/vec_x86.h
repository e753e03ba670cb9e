// What the x86 variants share: walking the set bits of a movemask. Included inside each variant's namespace.
static inline int append_bits(float* values, int32_t* indices, const float* lanes, unsigned bits, int32_t first) {
    int n = 0;
    for (; bits; bits &= bits - 1, ++n) {
        const int lane = __builtin_ctz(bits);
        values[n] = lanes[lane];
        indices[n] = first + lane;
    }
    return n;
}
static inline void append_bits(float* out, const float* lanes, unsigned bits) {
    for (; bits; bits &= bits - 1) *out++ = lanes[__builtin_ctz(bits)];
}
