// Ascending indices to bytes and back: fields of `width` bits, then a vector of bits; ops/layout.py says what they are.
// Streams of bits are little-endian words of 32. `step` is 1 where an index's number is added to its bit (Elias-Fano),
// `k_c` the entries of each chunk of chunk12, else 0.

#define BIT_TILE (THREADS * 32)  // bits of a tile: one word a thread

struct Code {
    u32 k;
    u32 n;
    u32 width;  // 0..32
    u32 bits;   // of the vector
    u32 step;
    u32 k_c;
};

// One by one, as every launcher can pass numbers.
#define CODE_PARAMETERS u32 k, u32 n, u32 width, u32 bits, u32 step, u32 k_c
#define CODE_FROM_PARAMETERS {k, n, width, bits, step, k_c}

__device__ __forceinline__ u32 field_mask(u32 width) { return (u32)((1ull << width) - 1ull); }

// An index that may be encoded; otherwise a trap, which is reported at the next synchronisation.
__device__ __forceinline__ u32 checked_index(const Code& s, const u32* indices, u32 i) {
    u32 index = indices[i];
    bool sound = index < s.n && (i == 0 || indices[i - 1] < index);
    if (s.k_c) sound = sound && index >> s.width == i / s.k_c;
    if (!sound) trap();
    return index;
}

// One thread for each word: no two write the same, so that nothing has to be zeroed.
extern "C" __global__ void __launch_bounds__(THREADS)
write_fields(const u32* indices, CODE_PARAMETERS, u32* out, u32 words) {
    Code s = CODE_FROM_PARAMETERS;
    u32 w = blockIdx.x * THREADS + threadIdx.x;
    if (w >= words) return;
    u64 first = 32ull * w;
    u32 word = 0;
    for (u64 i = first / s.width; i < s.k && i * s.width < first + 32; ++i) {
        u32 field = checked_index(s, indices, (u32)i) & field_mask(s.width);
        i64 shift = (i64)(i * s.width) - (i64)first;
        word |= shift < 0 ? field >> -shift : field << shift;
    }
    out[w] = word;
}

// One thread for each index, into zeroed words. The lanes of a warp whose bits share a word stand side by side: they are
// joined first, and one of them stores.
extern "C" __global__ void __launch_bounds__(THREADS)
write_bits(const u32* indices, CODE_PARAMETERS, u32* out) {
    Code s = CODE_FROM_PARAMETERS;
    u32 i = blockIdx.x * THREADS + threadIdx.x, lane = threadIdx.x % WARP;
    u32 word = 0xffffffffu, set = 0;  // behind the last index: a word that is none
    if (i < s.k) {
        u32 bit = (checked_index(s, indices, i) >> s.width) + i * s.step;
        word = bit / 32;
        set = 1u << bit % 32;
    }
    for (u32 by = 1; by < WARP; by *= 2) {
        u32 other_word = __shfl_up_sync(FULL_WARP, word, by), other_set = __shfl_up_sync(FULL_WARP, set, by);
        if (lane >= by && other_word == word) set |= other_set;
    }
    u32 next = __shfl_down_sync(FULL_WARP, word, 1);
    if (i < s.k && (lane == WARP - 1 || next != word)) atomicOr(&out[word], set);
}

// Field i; a field that lies across two words has both.
__device__ __forceinline__ u32 field_at(const u32* fields, u32 width, u64 i) {
    if (width == 0) return 0;
    u64 bit = i * width;
    u32 shift = (u32)(bit % 32);
    u64 both = fields[bit / 32];
    if (shift + width > 32) both |= (u64)fields[bit / 32 + 1] << 32;
    return (u32)(both >> shift) & field_mask(width);
}

// The bits behind the last field are zero. For one thread to ask.
__device__ __forceinline__ bool field_pad_is_zero(const Code& s, const u32* fields) {
    u64 used = (u64)s.k * s.width;
    return used % 32 == 0 || fields[used / 32] >> used % 32 == 0;
}

// Indices without a vector of bits: int32 and chunk12, where the chunk follows from the place.
extern "C" __global__ void __launch_bounds__(THREADS)
read_fields(const u32* fields, CODE_PARAMETERS, u32* indices, u32* corrupt) {
    Code s = CODE_FROM_PARAMETERS;
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i == 0 && !field_pad_is_zero(s, fields)) *corrupt = 1;
    if (i < s.k) indices[i] = field_at(fields, s.width, i) + (s.k_c ? i / s.k_c << s.width : 0);
}

// Tiles of 8192 bits. 1. take the next tile  2. count the bits of each word  3. list the set ones, in shared memory, and
// look back for the number in all earlier tiles  4. write their indices side by side. More than k are not written.
extern "C" __global__ void __launch_bounds__(THREADS)
read_bits(const u32* fields, const u32* vector, CODE_PARAMETERS, u32* ticket, u64* tiles, u32* indices, u32* corrupt) {
    Code s = CODE_FROM_PARAMETERS;
    __shared__ u32 shared_tile;
    __shared__ u32 shared_before;
    __shared__ u32 sums[WARPS];
    __shared__ unsigned short found[BIT_TILE];
    u32 t = threadIdx.x, lane = t % WARP, warp = t / WARP;
    if (t == 0) shared_tile = atomicAdd(ticket, 1u);
    __syncthreads();
    u32 tile = shared_tile, at = tile * THREADS + t;
    u32 word = (u64)at * 32 < s.bits ? vector[at] : 0;
    if (s.bits % 32 && at == s.bits / 32 && word >> s.bits % 32) {
        *corrupt = 1;
        word &= (1u << s.bits % 32) - 1u;
    }
    u32 mine = __popc(word), up_to = warp_sum_up_to(mine, lane);
    if (lane == WARP - 1) sums[warp] = up_to;
    __syncthreads();
    u32 own = 0;
    for (u32 w = 0; w < WARPS; ++w) {
        if (w == warp) up_to += own;
        own += sums[w];
    }
    for (u32 j = up_to - mine; word; word &= word - 1) found[j++] = (unsigned short)(t * 32 + __ffs(word) - 1);
    if (warp == 0) {
        u32 before = (u32)sum_before(tiles, tile, own, lane);
        if (lane == 0) {
            shared_before = before;
            if (tile == gridDim.x - 1 && before + own != s.k) *corrupt = 1;
            if (tile == 0 && !field_pad_is_zero(s, fields)) *corrupt = 1;
        }
    }
    __syncthreads();
    for (u32 j = t; j < own; j += THREADS) {
        u32 i = shared_before + j;
        if (i >= s.k) return;
        u32 bit = tile * BIT_TILE + found[j];
        indices[i] = (bit - i * s.step) << s.width | field_at(fields, s.width, i);
    }
}

// Do they ascend below n?
extern "C" __global__ void __launch_bounds__(THREADS)
check_indices(const u32* indices, u32 k, u32 n, u32* corrupt) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i < k && (indices[i] >= n || (i > 0 && indices[i - 1] >= indices[i]))) *corrupt = 1;
}

// 0..k-1 in place of what corrupt bytes gave; nothing to do after sound ones.
extern "C" __global__ void __launch_bounds__(THREADS)
replace_corrupt(u32* indices, u32 k, const u32* corrupt) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i < k && *corrupt) indices[i] = i;
}
