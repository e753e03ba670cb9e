// CUDA's built-in variables and functions in terms of the shim's fibers; included by shim.h.
#pragma once

namespace shim {

template <class T>
uint64_t to_bits(T x) {
    uint64_t bits = 0;
    std::memcpy(&bits, &x, sizeof x);
    return bits;
}
template <class T>
T from_bits(uint64_t bits) {
    T x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

}  // namespace shim

#define threadIdx (shim::fiber->thread)
#define blockIdx (shim::block->index)
#define blockDim (shim::block_dim)
#define gridDim (shim::grid_dim)
#define __syncthreads() shim::barrier(__LINE__)
#define __syncwarp() shim::collective(shim::kSyncWarp, 0xffffffffu, 0, 0)

inline unsigned __ballot_sync(unsigned mask, bool p) {
    return static_cast<unsigned>(shim::collective(shim::kBallot, mask, p, 0));
}
inline bool __any_sync(unsigned mask, bool p) { return shim::collective(shim::kAny, mask, p, 0) != 0; }
template <class T>
T __shfl_sync(unsigned mask, T x, unsigned lane) {
    return shim::from_bits<T>(shim::collective(shim::kShuffle, mask, shim::to_bits(x), static_cast<int>(lane)));
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, unsigned by) {
    return shim::from_bits<T>(shim::collective(shim::kShuffleUp, mask, shim::to_bits(x), static_cast<int>(by)));
}
template <class T>
T __shfl_down_sync(unsigned mask, T x, unsigned by) {
    return shim::from_bits<T>(shim::collective(shim::kShuffleDown, mask, shim::to_bits(x), static_cast<int>(by)));
}
template <class T>
T atomicAdd(T* p, T x) {
    shim::maybe_preempt();
    T old = *p;
    *p += x;
    return old;
}
template <class T>
T atomicExch(T* p, T x) {
    shim::maybe_preempt();
    T old = *p;
    *p = x;
    return old;
}
template <class T>
T atomicMin(T* p, T x) {
    shim::maybe_preempt();
    T old = *p;
    if (x < old) *p = x;
    return old;
}
template <class T>
T atomicOr(T* p, T x) {
    shim::maybe_preempt();
    T old = *p;
    *p |= x;
    return old;
}
inline void __threadfence() {}
inline void __nanosleep(unsigned) { shim::yield(); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline unsigned __float_as_uint(float x) { return static_cast<unsigned>(shim::to_bits(x)); }
inline float __uint_as_float(unsigned x) { return shim::from_bits<float>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline void trap() { shim::fail("trap"); }
inline float half_to_float(unsigned short h) {
    _Float16 x;
    std::memcpy(&x, &h, sizeof x);
    return static_cast<float>(x);
}
