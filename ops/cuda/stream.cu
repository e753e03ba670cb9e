// Guess a threshold from a sample, then one pass over the data: add, compare, append candidates in index order, store.

#define SAMPLE_THREADS 512
#define SAMPLES 16384
#define SAMPLE_LINE 8  // neighbours read together: one 32-byte sector of fp32

__device__ __forceinline__ float accumulated_at(const Accumulate& s, u32 i) {
    float a = s.residual[i], u = 0.0f;
#if VELOCITY
    u = s.velocity[i];
#endif
#if GRAD
    add_up(s, to_float(s.grad[i]), &a, &u);
#endif
    return a;
}

__device__ __forceinline__ u32 scatter_bits(u32 x) {  // a 32-bit integer hash (Wellons' lowbias32)
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

// 1. each thread reads 32 of the 16384 samples  2. count them by their leading 11 bits, then by the next 10
// 3. state->guess = lower edge of what holds the sample of the given rank: at least `rank` samples are not below it.
extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS, 1)
sample(ACCUMULATE_PARAMETERS, State* state, u32 rank) {
    Accumulate s = ACCUMULATE_FROM_PARAMETERS;
    __shared__ u32 counts[BINS];
    __shared__ u32 sums[SAMPLE_THREADS / WARP];
    __shared__ u32 found[3];
    u32 t = threadIdx.x;
    Key keys[SAMPLES / SAMPLE_THREADS];
    u32 lines = SAMPLES / SAMPLE_LINE, stratum = s.n / lines;  // n > SAMPLES, so a stratum holds a line
#pragma unroll
    for (u32 i = 0; i < SAMPLES / SAMPLE_THREADS; ++i) {
        u32 line = (i * SAMPLE_THREADS + t) / SAMPLE_LINE;
        u32 jitter = scatter_bits(line) % (stratum / SAMPLE_LINE) * SAMPLE_LINE;
        keys[i] = key_of(accumulated_at(s, line * stratum + jitter + t % SAMPLE_LINE));
    }
    Key prefix = 0;
    for (u32 level = 0; level < 2; ++level) {
        u32 shift = level == 0 ? 20 : 10, mask = level == 0 ? 0x7ffu : 0x3ffu;
        for (u32 b = t; b < BINS; b += SAMPLE_THREADS) counts[b] = 0;
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < SAMPLES / SAMPLE_THREADS; ++i)
            if (level == 0 || keys[i] >> 20 == prefix) atomicAdd(&counts[keys[i] >> shift & mask], 1u);
        __syncthreads();
        find_digit(counts, rank, sums, found);
        prefix = level == 0 ? found[0] : prefix << 10 | found[0];
        rank = found[1];
        __syncthreads();
    }
    if (t == 0) state->guess = prefix << 10;
}

// Tiles of 4096 elements. 1. take the next tile  2. load and accumulate 16 elements a thread  3. rank the candidates
// within the tile by ballots  4. look back for the number in all earlier tiles  5. append those that fit the buffer,
// and store the rest of the tile with the appended ones zeroed: what does not fit is not lost.
extern "C" __global__ void __launch_bounds__(THREADS, VELOCITY ? 2 : 3)
stream(ACCUMULATE_PARAMETERS, State* state, u64* tiles, float* values, int* indices, float* velocities, u32 capacity) {
    Accumulate s = ACCUMULATE_FROM_PARAMETERS;
    __shared__ u32 shared_tile;
    __shared__ u32 row_counts[ROWS];
    __shared__ u32 row_starts[ROWS];
    u32 t = threadIdx.x, lane = t % WARP, warp = t / WARP;
    if (t == 0) shared_tile = atomicAdd(&state->stream_ticket, 1u);
    __syncthreads();
    u32 tile = shared_tile;
    Key guess = state->guess;
    float a[PER_THREAD], u[PER_THREAD];
    u32 passed = 0;       // bit 4 * group + c: my element c of the group is a candidate
    u32 rank[GROUPS];     // of my first element among the candidates of its row
#pragma unroll
    for (u32 g = 0; g < GROUPS; ++g) {
        u32 first = tile * TILE + g * THREADS * 4 + t * 4;
        load_four(s, first, a + 4 * g, u + 4 * g);
        u32 before = 0, all = 0;
#pragma unroll
        for (u32 c = 0; c < 4; ++c) {
            bool candidate = first + c < s.n && key_of(a[4 * g + c]) >= guess;
            tally(candidate, lane, &before, &all);
            passed |= (u32)candidate << (4 * g + c);
        }
        rank[g] = before;
        if (lane == 0) row_counts[g * WARPS + warp] = all;
    }
    __syncthreads();
    if (warp == 0) {
        u32 mine = row_counts[lane];
        u32 up_to = warp_sum_up_to(mine, lane);
        u32 own = __shfl_sync(FULL_WARP, up_to, WARP - 1);
        u32 before = (u32)sum_before(tiles, tile, own, lane);
        row_starts[lane] = before + up_to - mine;
        if (lane == 0 && tile == gridDim.x - 1) state->total = before + own;
    }
    __syncthreads();
#pragma unroll
    for (u32 g = 0; g < GROUPS; ++g) {
        u32 first = tile * TILE + g * THREADS * 4 + t * 4;
        u32 at = row_starts[g * WARPS + warp] + rank[g];
#pragma unroll
        for (u32 c = 0; c < 4; ++c) {
            if (!(passed >> (4 * g + c) & 1u)) continue;
            if (at < capacity) {
                values[at] = a[4 * g + c];
                indices[at] = (int)(first + c);
                a[4 * g + c] = 0.0f;
#if VELOCITY
                velocities[at] = u[4 * g + c];
                u[4 * g + c] = 0.0f;
#endif
            }
            ++at;
        }
        store_four(s, first, a + 4 * g, u + 4 * g);
    }
}
