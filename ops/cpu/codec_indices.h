// Ascending indices to bytes and back; ops/layout.py says what the parts are and where they stand.
#pragma once
#include <algorithm>

#include "common.h"

namespace dss {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "streams of bits are written as little-endian words");

enum Encoding : int32_t { kInt32 = 0, kEliasFano = 1, kBitmap = 2, kChunk12 = 3 };
constexpr int64_t kDecodeSlack = 64;  // a word's worth of indices may be written behind the k-th

// class IndexLayout of layout.py (same order as the ctypes structure in native_codec.py).
struct IndexLayout {
    int64_t k, n;
    int64_t bits;  // of the bit vector
    int32_t width;  // of a field, 0..32
    int32_t k_c;
    Encoding encoding;

    int64_t field_bytes() const { return (k * width + 31) / 32 * 4; }
    bool has_no_bytes() const { return k == 0 && bits == 0; }
    int64_t vector_words() const { return (bits + 31) / 32; }
    // The low bits of an index that are its field.
    uint32_t mask() const { return static_cast<uint32_t>((uint64_t{1} << width) - 1); }
};

template <class T>
inline T load_as(const uint8_t* p) {
    T x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline void store_word(uint8_t* p, uint32_t x) { std::memcpy(p, &x, sizeof x); }

inline bool ascends(const uint32_t* indices, int64_t k, int64_t n) {
    if (k == 0) return true;
    constexpr int kBlock = 64;  // -O2 vectorises loops of a fixed length
    uint32_t wrong = indices[k - 1] >= n;
    int64_t i = 1;
    for (; i + kBlock <= k; i += kBlock)
        for (int j = 0; j < kBlock; ++j) wrong |= indices[i + j - 1] >= indices[i + j] ? 1u : 0u;
    for (; i < k; ++i) wrong |= indices[i - 1] >= indices[i] ? 1u : 0u;
    return wrong == 0;
}

// k_c in every chunk, given that they ascend: each chunk's first and last lie in it.
inline bool fills_chunks(const IndexLayout& s, const uint32_t* indices) {
    for (int64_t first = 0, chunk = 0; first < s.k; first += s.k_c, ++chunk) {
        const int64_t last = std::min<int64_t>(first + s.k_c, s.k) - 1;
        if (indices[first] >> s.width != chunk || indices[last] >> s.width != chunk) return false;
    }
    return true;
}

inline void write_fields(const IndexLayout& s, const uint32_t* indices, uint8_t* out) {
    uint64_t word = 0;
    int filled = 0;
    for (int64_t i = 0; i < s.k; ++i) {
        word |= static_cast<uint64_t>(indices[i] & s.mask()) << filled;
        filled += s.width;
        if (filled < 32) continue;
        store_word(out, static_cast<uint32_t>(word));
        out += 4;
        word >>= 32;
        filled -= 32;
    }
    if (filled) store_word(out, static_cast<uint32_t>(word));
}

// Sets bit (index >> width) + i * step of a zeroed vector. The word is kept in a register and stored each time: reading
// back what was just stored would be slow, and so would be to guess when a word is full.
inline void write_bits(const IndexLayout& s, const uint32_t* indices, uint8_t* out) {
    std::memset(out, 0, static_cast<size_t>(s.vector_words()) * 4);
    const int64_t step = s.encoding == kEliasFano;
    int64_t at = 0;
    uint32_t word = 0;
    for (int64_t i = 0; i < s.k; ++i) {
        const int64_t bit = (indices[i] >> s.width) + i * step;
        word = (word & (0u - static_cast<uint32_t>(bit >> 5 == at))) | 1u << (bit & 31);
        at = bit >> 5;
        store_word(out + 4 * at, word);
    }
}

// False, having written nothing, for indices that cannot be encoded.
inline bool encode_indices(const IndexLayout& s, const uint32_t* indices, uint8_t* out) {
    if (s.has_no_bytes()) return true;  // the pointers may be null then
    if (!ascends(indices, s.k, s.n) || (s.encoding == kChunk12 && !fills_chunks(s, indices))) return false;
    if (s.encoding == kInt32) {
        std::memcpy(out, indices, static_cast<size_t>(s.k) * 4);
        return true;
    }
    if (s.width) write_fields(s, indices, out);
    if (s.bits) write_bits(s, indices, out + s.field_bytes());
    return true;
}

// The places of the set bits less their number times `step`; false when there are not k of them or a pad bit is set.
inline bool read_bits(const IndexLayout& s, const uint8_t* in, uint32_t* indices) {
    const uint32_t step = s.encoding == kEliasFano;
    const int64_t words = s.vector_words();
    const uint32_t unused = s.bits % 32 ? ~0u << s.bits % 32 : 0;
    if (words && (load_as<uint32_t>(in + 4 * (words - 1)) & unused)) return false;
    int64_t i = 0;
    for (int64_t w = 0; w < words; w += 2) {
        uint64_t word = w + 1 < words ? load_as<uint64_t>(in + 4 * w) : load_as<uint32_t>(in + 4 * w);
        for (; word; word &= word - 1, ++i)
            indices[i] = static_cast<uint32_t>(32 * w + __builtin_ctzll(word)) - static_cast<uint32_t>(i) * step;
        if (i > s.k) return false;
    }
    return i == s.k;
}

// indices[i] = indices[i] << width | field i. Fields are read by eight bytes at a time, the last ones from a copy.
inline void read_fields(const IndexLayout& s, const uint8_t* in, uint32_t* indices) {
    const int64_t bytes = s.field_bytes(), width = s.width;
    const int64_t near_end = std::max<int64_t>(0, std::min(s.k, bytes < 8 ? 0 : (8 * (bytes - 8) + 7) / width));
    const uint32_t mask = s.mask();
    for (int64_t i = 0; i < near_end; ++i) {
        const uint64_t bytes_there = load_as<uint64_t>(in + (i * width >> 3));
        indices[i] = indices[i] << width | (static_cast<uint32_t>(bytes_there >> (i * width & 7)) & mask);
    }
    uint8_t last[24] = {};
    const int64_t from = near_end * width >> 3;
    std::memcpy(last, in + from, static_cast<size_t>(bytes - from));
    for (int64_t i = near_end; i < s.k; ++i) {
        const uint64_t bytes_there = load_as<uint64_t>(last + ((i * width >> 3) - from));
        indices[i] = indices[i] << width | (static_cast<uint32_t>(bytes_there >> (i * width & 7)) & mask);
    }
}

inline bool field_pad_is_zero(const IndexLayout& s, const uint8_t* in) {
    const int64_t used = s.k * s.width;
    return used % 32 == 0 || load_as<uint32_t>(in + used / 32 * 4) >> used % 32 == 0;
}

// Whether the bytes are sound; `indices` has room for k and kDecodeSlack more. All numbers stay below 2^32: a bit of the
// Elias-Fano vector stands below k + n / 2^width, and k * 2^width <= n < 2^31.
inline bool read_indices(const IndexLayout& s, const uint8_t* in, uint32_t* indices) {
    if (s.has_no_bytes()) return true;
    if (s.encoding == kInt32) {
        std::memcpy(indices, in, static_cast<size_t>(s.k) * 4);
        return ascends(indices, s.k, s.n);
    }
    if (s.encoding == kChunk12) {
        for (int64_t first = 0, chunk = 0; first < s.k; first += s.k_c, ++chunk)
            std::fill(indices + first, indices + std::min<int64_t>(first + s.k_c, s.k), static_cast<uint32_t>(chunk));
    } else if (!read_bits(s, in + s.field_bytes(), indices)) {
        return false;
    }
    if (s.width) read_fields(s, in, indices);
    return field_pad_is_zero(s, in) && ascends(indices, s.k, s.n);
}

// Returns 1 for corrupt bytes; the indices are then 0..k-1.
inline int decode_indices(const IndexLayout& s, const uint8_t* in, uint32_t* indices) {
    if (read_indices(s, in, indices)) return 0;
    for (int64_t i = 0; i < s.k; ++i) indices[i] = static_cast<uint32_t>(i);
    return 1;
}

}  // namespace dss
