// The rank-th largest key of a block's registers, settled 11, 10 and 10 bits at a time; leaves in *rank its rank among
// the keys equal to it. Every thread of the block calls it; the last three arguments are shared.
__device__ __forceinline__ Key settle(const float* a, u32 length, u32* rank, u32* counts, u32* sums, u32* found) {
    u32 t = threadIdx.x;
    Key prefix = 0;
    for (u32 level = 0; level < 3; ++level) {
        u32 shift = level == 0 ? 20 : level == 1 ? 10 : 0, width = level == 0 ? 11 : 10;
        for (u32 b = t; b < BINS; b += THREADS) counts[b] = 0;
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < PER_THREAD; ++i) {
            Key key = key_of(a[i]);
            bool inside = i / 4 * THREADS * 4 + t * 4 + i % 4 < length;
            if (inside && (level == 0 || key >> (shift + width) == prefix))
                atomicAdd(&counts[key >> shift & ((1u << width) - 1u)], 1u);
        }
        __syncthreads();
        find_digit(counts, *rank, sums, found);
        prefix = prefix << width | found[0];
        *rank = found[1];
        __syncthreads();
    }
    return prefix;
}

// The k_c largest of every chunk: one block a chunk, which it holds in registers; one pass over the data.
// 1. load and accumulate  2. settle the k_c-th key by counting in shared memory
// 3. rank what is taken by ballots (above the key: all; equal to it: the first)  4. write it, store the rest
extern "C" __global__ void __launch_bounds__(THREADS, VELOCITY ? 1 : 2)
chunked(ACCUMULATE_PARAMETERS, u32 k_c, u32 chunk, float* out_values, int* out_indices, u32* smallest_key) {
    Accumulate s = ACCUMULATE_FROM_PARAMETERS;
    __shared__ u32 counts[BINS];
    __shared__ u32 sums[WARPS];
    __shared__ u32 found[3];
    __shared__ u32 row_above[ROWS];
    __shared__ u32 row_equal[ROWS];
    u32 t = threadIdx.x, lane = t % WARP, warp = t / WARP;
    u32 begin = blockIdx.x * chunk;
    u32 length = s.n - begin < chunk ? s.n - begin : chunk;
    u32 k = k_c < length ? k_c : length;
    Accumulate part = s;
    part.n = begin + length;
    part.aligned = s.aligned && begin % 4 == 0;
    float a[PER_THREAD], u[PER_THREAD];
#pragma unroll
    for (u32 g = 0; g < GROUPS; ++g) load_four(part, begin + g * THREADS * 4 + t * 4, a + 4 * g, u + 4 * g);

    u32 rank = k;  // becomes: how many of those equal to the key are taken
    Key prefix = settle(a, length, &rank, counts, sums, found);
    u32 above = 0, equal = 0, above_rank[GROUPS], equal_rank[GROUPS];
#pragma unroll
    for (u32 g = 0; g < GROUPS; ++g) {
        u32 above_before = 0, above_all = 0, equal_before = 0, equal_all = 0;
#pragma unroll
        for (u32 c = 0; c < 4; ++c) {
            bool inside = g * THREADS * 4 + t * 4 + c < length;
            Key key = key_of(a[4 * g + c]);
            bool is_above = inside && key > prefix, is_equal = inside && key == prefix;
            tally(is_above, lane, &above_before, &above_all);
            tally(is_equal, lane, &equal_before, &equal_all);
            above |= (u32)is_above << (4 * g + c);
            equal |= (u32)is_equal << (4 * g + c);
        }
        above_rank[g] = above_before;
        equal_rank[g] = equal_before;
        if (lane == 0) {
            row_above[g * WARPS + warp] = above_all;
            row_equal[g * WARPS + warp] = equal_all;
        }
    }
    __syncthreads();
    if (warp == 0) {
        u32 my_above = row_above[lane], my_equal = row_equal[lane];
        row_above[lane] = warp_sum_up_to(my_above, lane) - my_above;
        row_equal[lane] = warp_sum_up_to(my_equal, lane) - my_equal;
    }
    __syncthreads();
#pragma unroll
    for (u32 g = 0; g < GROUPS; ++g) {
        u32 first = begin + g * THREADS * 4 + t * 4;
        u32 above_at = row_above[g * WARPS + warp] + above_rank[g];
        u32 equal_at = row_equal[g * WARPS + warp] + equal_rank[g];
#pragma unroll
        for (u32 c = 0; c < 4; ++c) {
            bool is_above = above >> (4 * g + c) & 1u, is_equal = equal >> (4 * g + c) & 1u;
            if (is_above || (is_equal && equal_at < rank)) {
                u32 at = blockIdx.x * k_c + above_at + (equal_at < rank ? equal_at : rank);
                out_values[at] = a[4 * g + c];
                out_indices[at] = (int)(first + c);
                a[4 * g + c] = 0.0f;
                u[4 * g + c] = 0.0f;
            }
            above_at += is_above;
            equal_at += is_equal;
        }
        store_four(part, first, a + 4 * g, u + 4 * g);
    }
    if (t == 0) atomicMin(smallest_key, prefix);
}
