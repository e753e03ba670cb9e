// What all kernels share. Header-free on purpose: NVRTC then needs nothing on the user's machine, and the same source
// compiles for the CPU under a host shim (tests/ops/shim).
typedef unsigned int Key;  // bits & 0x7fffffff; orders like the magnitude
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef HOST_SHIM  // the two lines of PTX; the shim has its own
__device__ __forceinline__ float half_to_float(unsigned short h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}
__device__ __forceinline__ void trap() { asm("trap;"); }
#endif

#define KEY_NAN 0x7f800001u    // all NaNs count as this one, whatever their payload
#define KEY_ABOVE 0x80000000u  // stands above every key
#define WARP 32
#define FULL_WARP 0xffffffffu
#define THREADS 256            // of every kernel but the sample's
#define WARPS (THREADS / WARP)
#define PER_THREAD 16          // elements of a tile in a thread's registers: 4 groups of 4 neighbours
#define GROUPS (PER_THREAD / 4)
#define TILE (THREADS * PER_THREAD)
#define ROWS (GROUPS * WARPS)  // runs of 128 neighbours, each read by one warp: 32, so one warp can scan their counts
#define BINS 2048

// Written by the kernels of one call, zeroed before it. One cache line would do; nothing here is hot.
struct State {
    Key guess;             // the streaming pass takes keys from here up as candidates
    u32 total;             // candidates found (may exceed the buffer)
    u32 stream_ticket;     // next tile of the streaming pass
    u32 emit_ticket;       // next tile of the emission
    u32 blocks_done;       // blocks that finished the current radix level
    u32 wanted;            // rank still to be found inside `prefix`; at the end: how many of the band are emitted
    u32 band;              // entries that share `prefix`
    Key prefix;            // leading bits of the k-th key settled so far
    u32 histogram[BINS];   // of the current radix level
};

__device__ __forceinline__ Key key_of(float x) {
    Key key = __float_as_uint(x) & 0x7fffffffu;
    return key < KEY_NAN ? key : KEY_NAN;
}

__device__ __forceinline__ u32 lanes_below(u32 lane) { return (1u << lane) - 1u; }

// Counts a vote of every lane of a full warp: `before` those of lower lanes, `all` those of the warp, both added on.
__device__ __forceinline__ void tally(bool vote, u32 lane, u32* before, u32* all) {
    u32 votes = __ballot_sync(FULL_WARP, vote);
    *before += __popc(votes & lanes_below(lane));
    *all += __popc(votes);
}

// Inclusive sum over the lanes of a full warp.
__device__ __forceinline__ u32 warp_sum_up_to(u32 x, u32 lane) {
    for (u32 step = 1; step < WARP; step *= 2) {
        u32 below = __shfl_up_sync(FULL_WARP, x, step);
        if (lane >= step) x += below;
    }
    return x;
}

// From counts of keys by digit: the digit that holds the rank-th largest key, and its rank among the keys of that
// digit. Every thread of the block calls it. `sums` is shared, one word per warp; so is result: digit, rank, count.
__device__ __forceinline__ void find_digit(const u32* counts, u32 rank, u32* sums, u32* result) {
    u32 t = threadIdx.x, lane = t % WARP, each = BINS / blockDim.x;
    u32 top = BINS - 1 - t * each;  // thread 0 holds the largest digits
    u32 mine = 0;
    for (u32 i = 0; i < each; ++i) mine += counts[top - i];
    u32 up_to = warp_sum_up_to(mine, lane);
    if (lane == WARP - 1) sums[t / WARP] = up_to;
    __syncthreads();
    for (u32 w = 0; w < t / WARP; ++w) up_to += sums[w];
    u32 above = up_to - mine;
    if (above < rank && rank <= up_to) {
        u32 digit = top;
        for (; above + counts[digit] < rank; --digit) above += counts[digit];
        result[0] = digit;
        result[1] = rank - above;
        result[2] = counts[digit];
    }
    __syncthreads();
}

// Decoupled look-back (Merrill and Garland, 2016): the sum over all earlier tiles. Tiles are handed out in ascending
// order by a ticket, so that every tile waited for is already running. The word carries flag and sum together: a reader
// sees both or neither, and no fence is needed.
#define TILE_EMPTY 0ull
#define TILE_OWN (1ull << 62)     // the tile's own sum
#define TILE_UP_TO (2ull << 62)   // the sum of all tiles up to and with this one
#define TILE_SUM ((1ull << 62) - 1)

// All lanes of one warp call it; `own` is the same in each. Returns the sum before this tile and publishes the one up
// to it.
__device__ __forceinline__ u64 sum_before(volatile u64* tiles, u32 tile, u64 own, u32 lane) {
    if (tile == 0) {
        if (lane == 0) tiles[0] = TILE_UP_TO | own;
        return 0;
    }
    if (lane == 0) tiles[tile] = TILE_OWN | own;
    u64 before = 0;
    for (i64 last = (i64)tile - 1;; last -= WARP) {
        i64 at = last - lane;
        u64 word = TILE_UP_TO;  // before the first tile stands an empty sum
        if (at >= 0) word = tiles[at];
        while (__any_sync(FULL_WARP, word == TILE_EMPTY)) {
            __nanosleep(20);
            if (at >= 0) word = tiles[at];
        }
        u32 complete = __ballot_sync(FULL_WARP, (word & TILE_UP_TO) != 0);
        u32 stop = complete ? __ffs(complete) - 1 : WARP - 1;  // nearest tile that knows everything before it
        u64 part = lane <= stop ? word & TILE_SUM : 0;
        for (u32 step = WARP / 2; step; step /= 2) part += __shfl_down_sync(FULL_WARP, part, step);
        before += __shfl_sync(FULL_WARP, part, 0);
        if (complete) break;
    }
    if (lane == 0) tiles[tile] = TILE_UP_TO | (before + own);
    return before;
}
