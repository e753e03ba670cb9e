// residual = decay * residual + u, where u = grad, or velocity = momentum * velocity + grad. GRAD chooses what the
// gradient is (0 none, 1 fp32, 2 bf16, 3 fp16), VELOCITY whether there is one.
// Rounded after every operation, never fused.
#ifndef GRAD
#define GRAD 1
#endif
#ifndef VELOCITY
#define VELOCITY 0
#endif

#if GRAD == 2 || GRAD == 3
typedef unsigned short Grad;
#else
typedef float Grad;
#endif

struct Accumulate {
    float* residual;
    const Grad* grad;
    float* velocity;
    float decay;
    float momentum;
    u32 n;
    u32 aligned;  // all three pointers allow reading four neighbours at once
};

// Kernels take the fields one by one: every launcher can pass numbers, not every one can pass structures.
#define ACCUMULATE_PARAMETERS \
    float *residual, const Grad *grad, float *velocity, float decay, float momentum, u32 n, u32 aligned
#define ACCUMULATE_FROM_PARAMETERS {residual, grad, velocity, decay, momentum, n, aligned}

__device__ __forceinline__ float to_float(Grad g) {
#if GRAD == 2
    return __uint_as_float((u32)g << 16);
#elif GRAD == 3
    return half_to_float(g);
#else
    return g;
#endif
}

__device__ __forceinline__ void add_up(const Accumulate& s, float g, float* a, float* u) {
#if GRAD
#if VELOCITY
    g = *u = __fadd_rn(__fmul_rn(s.momentum, *u), g);
#endif
    *a = __fadd_rn(s.decay == 1.0f ? *a : __fmul_rn(s.decay, *a), g);
#endif
}

// Elements first .. first + 3, accumulated; beyond the end: a = 0, to be ignored by its index.
__device__ __forceinline__ void load_four(const Accumulate& s, u32 first, float* a, float* u) {
    if (s.aligned && first + 3 < s.n) {
        float4 r = *(const float4*)(s.residual + first);
        a[0] = r.x; a[1] = r.y; a[2] = r.z; a[3] = r.w;
#if VELOCITY
        float4 v = *(const float4*)(s.velocity + first);
        u[0] = v.x; u[1] = v.y; u[2] = v.z; u[3] = v.w;
#endif
#if GRAD == 1
        float4 g = *(const float4*)(s.grad + first);
        add_up(s, g.x, a, u); add_up(s, g.y, a + 1, u + 1); add_up(s, g.z, a + 2, u + 2); add_up(s, g.w, a + 3, u + 3);
#elif GRAD
        ushort4 g = *(const ushort4*)(s.grad + first);
        add_up(s, to_float(g.x), a, u); add_up(s, to_float(g.y), a + 1, u + 1);
        add_up(s, to_float(g.z), a + 2, u + 2); add_up(s, to_float(g.w), a + 3, u + 3);
#endif
        return;
    }
#pragma unroll
    for (u32 c = 0; c < 4; ++c) {
        a[c] = 0.0f;
        u[c] = 0.0f;
        if (first + c >= s.n) continue;
        a[c] = s.residual[first + c];
#if VELOCITY
        u[c] = s.velocity[first + c];
#endif
#if GRAD
        add_up(s, to_float(s.grad[first + c]), a + c, u + c);
#endif
    }
}

__device__ __forceinline__ void store_four(const Accumulate& s, u32 first, const float* a, const float* u) {
    if (s.aligned && first + 3 < s.n) {
        *(float4*)(s.residual + first) = make_float4(a[0], a[1], a[2], a[3]);
#if VELOCITY
        *(float4*)(s.velocity + first) = make_float4(u[0], u[1], u[2], u[3]);
#endif
        return;
    }
#pragma unroll
    for (u32 c = 0; c < 4 && first + c < s.n; ++c) {
        s.residual[first + c] = a[c];
#if VELOCITY
        s.velocity[first + c] = u[c];
#endif
    }
}
