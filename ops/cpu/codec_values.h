// fp32 values to bytes and back, once per instruction set: plain loops over blocks of 128 that compilers vectorise.
// At -O2 that takes a fixed number of turns, hence the blocks everywhere. Included within a namespace by stream_*.cpp.
// reference_codec.py is the specification.

constexpr float kLargestAbsmax = 0x1.fffffcp+127f;  // the scale may be rounded up: the top code must not overflow
constexpr float kSmallestScale = 0x1p-126f;
constexpr float kTwoThirds = 0x1.555556p-1f, kThird = 0x1.555556p-2f;
constexpr float kRounder = 0x1.8p+23f;  // adding it rounds to an integer, halves to even, left in the lowest bits
constexpr uint32_t kRounderBits = 0x4b400000u;

// a or b without a branch: compilers do not vectorise all conditionals.
static inline uint32_t choose(bool which, uint32_t a, uint32_t b) {
    const uint32_t mask = 0u - static_cast<uint32_t>(which);
    return (a & mask) | (b & ~mask);
}

// The code of a half: rounded and finite, except for Inf (`inf`, with its sign) and NaN (`nan`, without).
static inline uint16_t half_code(uint32_t bits, uint32_t rounded, uint32_t inf, uint32_t nan) {
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t finite = choose(rounded < inf, rounded, inf - 1);
    const uint32_t code = choose(magnitude < 0x7f800000u, finite, inf) | (bits >> 16 & 0x8000u);
    return static_cast<uint16_t>(choose(magnitude > 0x7f800000u, nan, code));
}

static inline uint16_t to_bf16(uint32_t bits) {
    const uint32_t magnitude = bits & 0x7fffffffu;
    return half_code(bits, (magnitude + 0x7fffu + (magnitude >> 16 & 1u)) >> 16, 0x7f80u, 0x7fc0u);
}

static inline uint16_t to_fp16(uint32_t bits) {
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Below 2^-14 one step is 2^-24, which is a step of the numbers around 0.5: adding 0.5 rounds.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    return half_code(bits, choose(magnitude < 0x38800000u, subnormal, normal), 0x7c00u, 0x7e00u);
}

template <uint16_t to_half(uint32_t), float from_half(uint16_t)>
static void encode_halves(int64_t k, float* values, uint16_t* out) {
    int64_t i = 0;
    uint16_t codes[kScaleBlock];  // apart from `out`, which the compiler cannot tell from `values`
    for (; i + kScaleBlock <= k; i += kScaleBlock) {
        for (int j = 0; j < kScaleBlock; ++j) codes[j] = to_half(bits_of(values[i + j]));
        for (int j = 0; j < kScaleBlock; ++j) values[i + j] -= from_half(codes[j]);
        std::memcpy(out + i, codes, sizeof codes);
    }
    for (; i < k; ++i) values[i] -= from_half(out[i] = to_half(bits_of(values[i])));
    if (k % 2) out[k] = 0;
}

template <float from_half(uint16_t)>
static void decode_halves(int64_t k, const uint16_t* in, float* values) {
    int64_t i = 0;
    for (; i + kScaleBlock <= k; i += kScaleBlock)
        for (int j = 0; j < kScaleBlock; ++j) values[i + j] = from_half(in[i + j]);
    for (; i < k; ++i) values[i] = from_half(in[i]);
}

static float scale_of(const float* values, float top) {
    int32_t absmax = 0;
    for (int i = 0; i < kScaleBlock; ++i) {
        const int32_t magnitude = static_cast<int32_t>(bits_of(values[i]) & 0x7fffffffu);
        absmax = absmax < magnitude ? magnitude : absmax;
    }
    if (absmax >= 0x7f800000) return float_of(0x7fc00000u);
    const float size = float_of(static_cast<uint32_t>(absmax));
    const float scale = (size < kLargestAbsmax ? size : kLargestAbsmax) / top;
    return scale < kSmallestScale ? 0.0f : scale;
}

// Codes of `Bits` bits, `8 / Bits` in a byte, lowest first.
template <int Bits>
static inline void pack(const uint8_t* codes, uint8_t* out) {
    for (int j = 0; j < kScaleBlock * Bits / 8; ++j) {
        if constexpr (Bits == 8) out[j] = codes[j];
        if constexpr (Bits == 4) out[j] = static_cast<uint8_t>(codes[2 * j] | codes[2 * j + 1] << 4);
        if constexpr (Bits == 2)
            out[j] = static_cast<uint8_t>(codes[4 * j] | codes[4 * j + 1] << 2 | codes[4 * j + 2] << 4 |
                                          codes[4 * j + 3] << 6);
    }
}
template <int Bits>
static inline void unpack(const uint8_t* in, uint8_t* codes) {
    constexpr int kPerByte = 8 / Bits;
    for (int j = 0; j < kScaleBlock * Bits / 8; ++j)
        for (int c = 0; c < kPerByte; ++c)
            codes[kPerByte * j + c] = static_cast<uint8_t>(in[j] >> Bits * c & ((1 << Bits) - 1));
}

// What a code stands for, times the scale; `third` is a third of the scale.
template <int Bits>
static inline float level(uint8_t code, float scale, float third) {
    if constexpr (Bits == 2)
        return float_of(bits_of(code & 1 ? scale : third) ^ static_cast<uint32_t>(code & 2) << 30);
    return static_cast<float>(static_cast<int8_t>(code << (8 - Bits)) >> (8 - Bits)) * scale;
}

// One block of 128: codes into `codes`, in `values` what was lost. Returns the scale.
template <int Bits>
static float quantize(float* values, uint8_t* codes) {
    const float scale = scale_of(values, Bits == 8 ? 127.0f : Bits == 4 ? 7.0f : 1.0f);
    if (!(scale > 0.0f)) {
        std::memset(codes, 0, kScaleBlock);
        for (int i = 0; i < kScaleBlock; ++i) values[i] -= scale;  // 0, or NaN
        return scale;
    }
    const float inner = scale * kTwoThirds, third = scale * kThird;
    for (int i = 0; i < kScaleBlock; ++i) {
        if constexpr (Bits == 2) {
            const uint32_t bits = bits_of(values[i]);
            codes[i] = static_cast<uint8_t>(bits >> 31 << 1 | (float_of(bits & 0x7fffffffu) > inner ? 1u : 0u));
            values[i] -= level<2>(codes[i], scale, third);
        } else {
            // No further than the top code: the scale is normal, so the quotient is within 2^-22 of it.
            const float rounded = values[i] / scale + kRounder;
            codes[i] = static_cast<uint8_t>((bits_of(rounded) - kRounderBits) & ((1u << Bits) - 1));
            values[i] -= (rounded - kRounder) * scale;
        }
    }
    return scale;
}

template <int Bits>
static void encode_scaled(int64_t k, float* values, uint8_t* out) {
    constexpr int64_t kBytes = kScaleBlock * Bits / 8;
    uint8_t* codes_out = out + 4 * ((k + kScaleBlock - 1) / kScaleBlock);
    uint8_t codes[kScaleBlock];
    for (int64_t first = 0; first < k; first += kScaleBlock, out += 4, codes_out += kBytes) {
        const int64_t count = k - first < kScaleBlock ? k - first : kScaleBlock;
        float* block = values + first;
        float padded[kScaleBlock] = {};
        if (count < kScaleBlock) {
            std::memcpy(padded, block, static_cast<size_t>(count) * 4);
            block = padded;
        }
        const float scale = quantize<Bits>(block, codes);
        std::memcpy(out, &scale, 4);
        if (count == kScaleBlock) {
            pack<Bits>(codes, codes_out);
            continue;
        }
        uint8_t packed[kBytes];
        std::memset(codes + count, 0, static_cast<size_t>(kScaleBlock - count));
        pack<Bits>(codes, packed);
        std::memcpy(codes_out, packed, static_cast<size_t>((count * Bits + 31) / 32 * 4));
        std::memcpy(values + first, padded, static_cast<size_t>(count) * 4);
    }
}

template <int Bits>
static void decode_scaled(int64_t k, const uint8_t* in, float* values) {
    constexpr int64_t kBytes = kScaleBlock * Bits / 8;
    const uint8_t* codes_in = in + 4 * ((k + kScaleBlock - 1) / kScaleBlock);
    uint8_t codes[kScaleBlock];
    for (int64_t first = 0; first < k; first += kScaleBlock, in += 4, codes_in += kBytes) {
        const int64_t count = k - first < kScaleBlock ? k - first : kScaleBlock;
        uint8_t packed[kBytes] = {};
        std::memcpy(packed, codes_in, static_cast<size_t>((count * Bits + 31) / 32 * 4));
        unpack<Bits>(packed, codes);
        float scale;
        std::memcpy(&scale, in, 4);
        const float third = scale * kThird;
        if (count == kScaleBlock)
            for (int i = 0; i < kScaleBlock; ++i) values[first + i] = level<Bits>(codes[i], scale, third);
        else
            for (int64_t i = 0; i < count; ++i) values[first + i] = level<Bits>(codes[i], scale, third);
    }
}

static void encode_values(ValueType type, int64_t k, float* values, uint8_t* out) {
    switch (type) {
        case kValueFp32:
            std::memcpy(out, values, static_cast<size_t>(k) * 4);
            std::memset(values, 0, static_cast<size_t>(k) * 4);
            return;
        case kValueBf16: return encode_halves<to_bf16, from_bf16>(k, values, reinterpret_cast<uint16_t*>(out));
        case kValueFp16: return encode_halves<to_fp16, from_fp16>(k, values, reinterpret_cast<uint16_t*>(out));
        case kValueInt8: return encode_scaled<8>(k, values, out);
        case kValueInt4: return encode_scaled<4>(k, values, out);
        case kValueInt2: return encode_scaled<2>(k, values, out);
    }
}

static void decode_values(ValueType type, int64_t k, const uint8_t* in, float* values) {
    switch (type) {
        case kValueFp32: std::memcpy(values, in, static_cast<size_t>(k) * 4); return;
        case kValueBf16: return decode_halves<from_bf16>(k, reinterpret_cast<const uint16_t*>(in), values);
        case kValueFp16: return decode_halves<from_fp16>(k, reinterpret_cast<const uint16_t*>(in), values);
        case kValueInt8: return decode_scaled<8>(k, in, values);
        case kValueInt4: return decode_scaled<4>(k, in, values);
        case kValueInt2: return decode_scaled<2>(k, in, values);
    }
}
