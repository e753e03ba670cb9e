// Exactly k of the candidates, or, when the guess was bad, of the whole vector: on the device, without asking the host.

struct Select {
    float* residual;          // [n]
    float* velocity;          // [n] or null
    const float* values;      // candidates in index order, [capacity]
    const int* indices;
    const float* velocities;  // null without velocity
    u32 n;
    u32 k;
    u32 capacity;
    u32 bits;                 // leading key bits that the search settles: 31 is exact
};

#define SELECT_PARAMETERS                                                                                          \
    float *residual, float *velocity, float *values, int *indices, float *velocities, u32 n, u32 k, u32 capacity, \
        u32 bits
#define SELECT_FROM_PARAMETERS {residual, velocity, values, indices, velocities, n, k, capacity, bits}

// Are the candidates complete? Otherwise they were put back and the whole vector is searched.
__device__ __forceinline__ bool use_candidates(const Select& s, const State* state) {
    return state->total >= s.k && state->total <= s.capacity;
}

// A grid-stride pass; does nothing after a good guess.
extern "C" __global__ void __launch_bounds__(THREADS)
put_back(SELECT_PARAMETERS, const State* state) {
    Select s = SELECT_FROM_PARAMETERS;
    if (use_candidates(s, state)) return;
    u32 m = state->total < s.capacity ? state->total : s.capacity;
    for (u32 j = blockIdx.x * THREADS + threadIdx.x; j < m; j += gridDim.x * THREADS) {
        s.residual[s.indices[j]] = s.values[j];
        if (s.velocity) s.velocity[s.indices[j]] = s.velocities[j];
    }
}

// One level of the search: counts the keys under the settled prefix by their next `width` bits, which is to count
// 2^width - 1 thresholds in one pass, and settles those bits. 1. count in shared memory  2. add up in global memory
// 3. the block that finishes last picks the digit and clears up for the next level.
extern "C" __global__ void __launch_bounds__(THREADS)
count_level(SELECT_PARAMETERS, State* state, u32 shift, u32 width) {
    Select s = SELECT_FROM_PARAMETERS;
    __shared__ u32 counts[BINS];
    __shared__ u32 sums[WARPS];
    __shared__ u32 found[3];
    __shared__ u32 is_last;
    u32 t = threadIdx.x;
    bool first_level = shift + width == 31;
    u32 rank = first_level ? s.k : state->wanted;
    Key prefix = state->prefix;
    bool of_candidates = use_candidates(s, state);
    const float* source = of_candidates ? s.values : s.residual;
    u32 length = of_candidates ? state->total : s.n;
    for (u32 b = t; b < BINS; b += THREADS) counts[b] = 0;
    __syncthreads();
    for (u64 i = (u64)blockIdx.x * THREADS + t; i < length; i += (u64)gridDim.x * THREADS) {
        Key key = key_of(source[i]);
        if (first_level || key >> (shift + width) == prefix)
            atomicAdd(&counts[key >> shift & ((1u << width) - 1u)], 1u);
    }
    __syncthreads();
    for (u32 b = t; b < BINS; b += THREADS)
        if (counts[b]) atomicAdd(&state->histogram[b], counts[b]);
    __threadfence();  // my counts before my ticket
    __syncthreads();
    if (t == 0) is_last = atomicAdd(&state->blocks_done, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (u32 b = t; b < BINS; b += THREADS) {
        counts[b] = atomicExch(&state->histogram[b], 0u);  // past the L1 cache, and cleared
    }
    __syncthreads();
    find_digit(counts, rank, sums, found);
    if (t == 0) {
        state->prefix = prefix << width | found[0];
        state->wanted = found[1];
        state->band = found[2];
        state->blocks_done = 0;
    }
}

__device__ __forceinline__ u32 band_start(u64 seed, u32 starts) {  // splitmix64, high bits
    u64 z = seed + 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    return (u32)(((z >> 32) * starts) >> 32);
}

// Ordered emission. Of the band (keys that share the settled bits) a run of `wanted` entries is taken, from its start
// or from a random one. 1. next tile  2. count, by row, what lies above the band and in it  3. look back for both
// counts, packed in one word  4. write what is taken, in index order; what stands wrongly (taken from the vector, or a
// candidate that is not taken) is zeroed or put back.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
emit(SELECT_PARAMETERS, State* state, u64* tiles, u64 seed, u32 take_first, float* out_values, int* out_indices,
     float* threshold, i64* looked_at) {
    Select s = SELECT_FROM_PARAMETERS;
    __shared__ u32 shared_tile;
    __shared__ u32 row_above[ROWS];
    __shared__ u32 row_band[ROWS];
    u32 t = threadIdx.x, lane = t % WARP, warp = t / WARP;
    bool of_candidates = use_candidates(s, state);
    const float* source = of_candidates ? s.values : s.residual;
    u32 length = of_candidates ? state->total : s.n;
    u32 tile_count = (u32)(((u64)length + TILE - 1) / TILE), open = 31 - s.bits;
    Key lower = state->prefix << open;
    u64 upper = (u64)lower + (1ull << open);
    u32 wanted = state->wanted;
    u32 start = take_first ? 0 : band_start(seed, state->band - wanted + 1);
    if (blockIdx.x == 0 && t == 0) {
        *threshold = __uint_as_float(lower);
        *looked_at = length;
    }
    for (;;) {
        __syncthreads();
        if (t == 0) shared_tile = atomicAdd(&state->emit_ticket, 1u);
        __syncthreads();
        u32 tile = shared_tile;
        if (tile >= tile_count) return;
        float a[PER_THREAD];
        u32 above = 0, band = 0, above_rank[GROUPS], band_rank[GROUPS];
#pragma unroll
        for (u32 g = 0; g < GROUPS; ++g) {
            u64 first = (u64)tile * TILE + g * THREADS * 4 + t * 4;
            u32 above_before = 0, above_all = 0, band_before = 0, band_all = 0;
#pragma unroll
            for (u32 c = 0; c < 4; ++c) {
                a[4 * g + c] = first + c < length ? source[first + c] : 0.0f;
                Key key = key_of(a[4 * g + c]);
                bool is_above = first + c < length && key >= upper;
                bool is_band = first + c < length && key < upper && key >= lower;
                tally(is_above, lane, &above_before, &above_all);
                tally(is_band, lane, &band_before, &band_all);
                above |= (u32)is_above << (4 * g + c);
                band |= (u32)is_band << (4 * g + c);
            }
            above_rank[g] = above_before;
            band_rank[g] = band_before;
            if (lane == 0) {
                row_above[g * WARPS + warp] = above_all;
                row_band[g * WARPS + warp] = band_all;
            }
        }
        __syncthreads();
        if (warp == 0) {
            u32 my_above = row_above[lane], my_band = row_band[lane];
            u32 above_up_to = warp_sum_up_to(my_above, lane), band_up_to = warp_sum_up_to(my_band, lane);
            u64 own_above = __shfl_sync(FULL_WARP, above_up_to, WARP - 1);
            u64 own = own_above << 31 | __shfl_sync(FULL_WARP, band_up_to, WARP - 1);
            u64 before = sum_before(tiles, tile, own, lane);
            row_above[lane] = (u32)(before >> 31) + above_up_to - my_above;
            row_band[lane] = (u32)(before & 0x7fffffffu) + band_up_to - my_band;
        }
        __syncthreads();
#pragma unroll
        for (u32 g = 0; g < GROUPS; ++g) {
            u32 above_at = row_above[g * WARPS + warp] + above_rank[g];
            u32 band_at = row_band[g * WARPS + warp] + band_rank[g];
#pragma unroll
            for (u32 c = 0; c < 4; ++c) {
                u32 i = (u32)((u64)tile * TILE + g * THREADS * 4 + t * 4 + c);
                if (i >= length) continue;
                bool is_above = above >> (4 * g + c) & 1u, is_band = band >> (4 * g + c) & 1u;
                bool take = is_above || (is_band && band_at >= start && band_at - start < wanted);
                u32 index = of_candidates ? (u32)s.indices[i] : i;
                if (take) {
                    u32 taken = band_at > start ? band_at - start : 0;
                    u32 at = above_at + (taken < wanted ? taken : wanted);
                    out_values[at] = a[4 * g + c];
                    out_indices[at] = (int)index;
                }
                if (take != of_candidates) {  // found in the vector and taken, or a candidate and not
                    s.residual[index] = take ? 0.0f : a[4 * g + c];
                    if (s.velocity) s.velocity[index] = take ? 0.0f : s.velocities[i];
                }
                above_at += is_above;
                band_at += is_band;
            }
        }
    }
}
