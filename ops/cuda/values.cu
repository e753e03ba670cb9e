// fp32 values to bytes and back, leaving what rounding lost. Rounded after every operation, never fused;
// ops/reference_codec.py is the specification.

#define LARGEST_ABSMAX 0x7f7ffffeu     // bits of 0x1.fffffcp+127: the scale may be rounded up, the top code must not overflow
#define SMALLEST_SCALE 0x00800000u     // 2^-126
#define TWO_THIRDS 0x3f2aaaabu
#define THIRD 0x3eaaaaabu
#define ROUNDER 0x4b400000u            // 1.5 * 2^23: adding it rounds to an integer, which is left in the lowest bits
#define QUIET_NAN 0x7fc00000u
#define SCALE_BLOCK 128                // values that share a scale: four a lane
#define PER_LANE (SCALE_BLOCK / WARP)

typedef unsigned short u16;
typedef unsigned char u8;

// A half from its rounded magnitude: finite values stay finite.
__device__ __forceinline__ u32 half_code(u32 bits, u32 rounded, u32 inf, u32 nan) {
    u32 magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return nan;
    u32 finite = rounded < inf ? rounded : inf - 1;
    return (magnitude < 0x7f800000u ? finite : inf) | (bits >> 16 & 0x8000u);
}

__device__ __forceinline__ u32 to_half(float x, u32 is_fp16) {
    u32 bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
    if (!is_fp16) return half_code(bits, (magnitude + 0x7fffu + (magnitude >> 16 & 1u)) >> 16, 0x7f80u, 0x7fc0u);
    // Below 2^-14 one step is 2^-24, which is a step of the numbers around 0.5: adding 0.5 rounds.
    u32 rounded = magnitude < 0x38800000u
                      ? __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0.5f)) - 0x3f000000u
                      : (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    return half_code(bits, rounded, 0x7c00u, 0x7e00u);
}

__device__ __forceinline__ float from_half(u32 code, u32 is_fp16) {
    return is_fp16 ? half_to_float((u16)code) : __uint_as_float(code << 16);
}

// One thread for two values, which share a word; behind an odd last one stands a zero.
extern "C" __global__ void __launch_bounds__(THREADS)
encode_halves(float* values, u32 k, u32 is_fp16, u32* out) {
    u64 first = 2 * ((u64)blockIdx.x * THREADS + threadIdx.x);
    u32 word = 0;
    for (u32 c = 0; c < 2 && first + c < k; ++c) {
        u32 code = to_half(values[first + c], is_fp16);
        values[first + c] = __fsub_rn(values[first + c], from_half(code, is_fp16));
        word |= code << 16 * c;
    }
    if (first < k) out[first / 2] = word;
}

extern "C" __global__ void __launch_bounds__(THREADS)
decode_halves(const u16* in, u32 k, u32 is_fp16, float* values) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i < k) values[i] = from_half(in[i], is_fp16);
}

__device__ __forceinline__ float scale_of(u32 absmax, u32 width) {
    if (absmax >= 0x7f800000u) return __uint_as_float(QUIET_NAN);
    float size = __uint_as_float(absmax < LARGEST_ABSMAX ? absmax : LARGEST_ABSMAX);
    float scale = __fdiv_rn(size, width == 8 ? 127.0f : width == 4 ? 7.0f : 1.0f);
    return scale < __uint_as_float(SMALLEST_SCALE) ? 0.0f : scale;
}

// What a code stands for, times the scale.
__device__ __forceinline__ float level(u32 code, u32 width, float scale) {
    if (width == 2) {
        float magnitude = code & 1u ? scale : __fmul_rn(scale, __uint_as_float(THIRD));
        return __uint_as_float(__float_as_uint(magnitude) ^ (code & 2u) << 30);
    }
    return __fmul_rn((float)((int)(code << (32 - width)) >> (32 - width)), scale);
}

__device__ __forceinline__ u32 code_of(float x, u32 width, float scale) {
    if (!(scale > 0.0f)) return 0;
    u32 bits = __float_as_uint(x);
    if (width == 2) {
        float inner = __fmul_rn(scale, __uint_as_float(TWO_THIRDS));
        return bits >> 31 << 1 | (__uint_as_float(bits & 0x7fffffffu) > inner ? 1u : 0u);
    }
    // No further than the top code: the scale is normal, so the quotient is within 2^-22 of it.
    float rounded = __fadd_rn(__fdiv_rn(x, scale), __uint_as_float(ROUNDER));
    return (__float_as_uint(rounded) - ROUNDER) & ((1u << width) - 1u);
}

// One warp a block of 128. 1. largest magnitude  2. scale  3. codes: a lane has four neighbours, 4, 2 or 1 bytes of code.
extern "C" __global__ void __launch_bounds__(THREADS)
encode_scaled(float* values, u32 k, u32 width, float* scales, u8* codes) {
    u64 block = (u64)blockIdx.x * WARPS + threadIdx.x / WARP;
    u32 lane = threadIdx.x % WARP;
    u64 first = block * SCALE_BLOCK + PER_LANE * lane;
    float x[PER_LANE];
    u32 absmax = 0;
#pragma unroll
    for (u32 c = 0; c < PER_LANE; ++c) {
        x[c] = first + c < k ? values[first + c] : 0.0f;
        u32 magnitude = __float_as_uint(x[c]) & 0x7fffffffu;
        absmax = absmax < magnitude ? magnitude : absmax;
    }
    for (u32 by = WARP / 2; by; by /= 2) {
        u32 other = __shfl_down_sync(FULL_WARP, absmax, by);
        absmax = absmax < other ? other : absmax;
    }
    float scale = scale_of(__shfl_sync(FULL_WARP, absmax, 0), width);
    if (lane == 0 && first < k) scales[block] = scale;
    u32 word = 0;
#pragma unroll
    for (u32 c = 0; c < PER_LANE; ++c) {
        if (first + c >= k) continue;
        u32 code = code_of(x[c], width, scale);
        values[first + c] = __fsub_rn(x[c], level(code, width, scale));
        word |= code << width * c;
    }
    u64 at = first * width / 8;                          // byte of my first code
    if (at >= ((u64)k * width + 31) / 32 * 4) return;    // lanes behind the last value write its pad
    if (width == 8) *(u32*)(codes + at) = word;
    else if (width == 4) *(u16*)(codes + at) = (u16)word;
    else codes[at] = (u8)word;
}

extern "C" __global__ void __launch_bounds__(THREADS)
decode_scaled(const float* scales, const u8* codes, u32 k, u32 width, float* values) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= k) return;
    u64 bit = (u64)i * width;
    u32 code = codes[bit / 8] >> bit % 8 & ((1u << width) - 1u);
    values[i] = level(code, width, scales[i / SCALE_BLOCK]);
}
