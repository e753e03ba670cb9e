// out[indices] += values for one peer: indices are distinct, so this needs no atomics and has one possible result.
extern "C" __global__ void __launch_bounds__(THREADS)
scatter_add(float* out, u32 n, const int* indices, const float* values, u32 k) {
    for (u64 j = (u64)blockIdx.x * THREADS + threadIdx.x; j < k; j += (u64)gridDim.x * THREADS) {
        if ((u32)indices[j] >= n) trap();  // reported at the next synchronisation, like torch's own index checks
        out[indices[j]] = __fadd_rn(out[indices[j]], values[j]);
    }
}
