// Feeds the CPU decoders damaged bytes, in buffers of exactly the right size, under the sanitizers.
//
// What comes out is checked by the law that makes the encodings one-to-one: either the bytes are reported corrupt and the
// indices are 0..k-1, or encoding the indices gives the same bytes again.
// Usage: fuzz_codec MUTATIONS SEED. Prints how many mutations of each kind were reported, and how many gave other indices.
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "codec_indices.h"

namespace values {
using namespace dss;
#include "codec_values.h"
}  // namespace values

namespace {

using namespace dss;

uint64_t state;
uint64_t random_bits() {
    uint64_t z = (state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
int64_t below(int64_t bound) { return bound <= 0 ? 0 : static_cast<int64_t>(random_bits() % static_cast<uint64_t>(bound)); }

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "broken: %s\n", what);
    std::abort();
}

// As index_layout of layout.py: small sizes, with n now and then near 2^31.
IndexLayout random_layout() {
    IndexLayout s{};
    s.encoding = static_cast<Encoding>(below(4));
    s.n = below(8) || s.encoding == kBitmap || s.encoding == kChunk12 ? below(3000) : 0x7fffffff - below(3);
    if (s.encoding == kChunk12) {
        s.n += below(3) * 4096;
        s.k_c = static_cast<int32_t>(below(40));
        s.k = s.n / 4096 * s.k_c + std::min<int64_t>(s.k_c, s.n % 4096);
    } else {
        s.k = std::min(s.n, below(4) ? below(100) : below(3000));
    }
    if (s.encoding == kInt32) s.width = 32;
    if (s.encoding == kChunk12) s.width = 12;
    if (s.encoding == kBitmap) s.bits = s.n;
    if (s.encoding == kEliasFano && s.k) {
        while ((s.n / s.k) >> (s.width + 1)) ++s.width;
        s.bits = s.k + ((s.n - 1) >> s.width);
    }
    return s;
}

// Ascending, and of chunk12 k_c in every chunk: a run of jumps that leaves room for those to come.
void random_indices(const IndexLayout& s, uint32_t* indices) {
    const int64_t each = s.encoding == kChunk12 ? std::max(1, s.k_c) : s.k;
    for (int64_t i = 0, next = 0; i < s.k; ++i) {
        int64_t end = s.n;
        if (s.encoding == kChunk12) {
            end = std::min(s.n, (i / each + 1) * 4096);
            if (i % each == 0) next = i / each * 4096;
        }
        const int64_t to_come = std::min(s.k, (i / each + 1) * each) - i;
        const int64_t slack = end - next - to_come;
        next += below(std::min(slack + 1, 2 * slack / to_come + 2));
        indices[i] = static_cast<uint32_t>(next++);
    }
}

enum Kind { kFlip, kCut, kShift, kNoise, kKinds };
const char* const kNames[kKinds] = {"bits flipped", "end lost", "bytes shifted", "random bytes"};

void damage(Kind kind, uint8_t* bytes, int64_t size) {
    if (kind == kFlip)
        for (int64_t flips = 1 + below(3); flips; --flips) bytes[below(size)] ^= static_cast<uint8_t>(1 << below(8));
    if (kind == kCut) {
        const int64_t from = below(size);
        std::memset(bytes + from, 0, static_cast<size_t>(size - from));
    }
    if (kind == kShift) std::rotate(bytes, bytes + 1 + below(size), bytes + size);
    if (kind == kNoise)
        for (int64_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(random_bits());
}

int64_t total_bytes(const IndexLayout& s) { return s.field_bytes() + 4 * s.vector_words(); }

struct Tally {
    int64_t reported[kKinds] = {}, same[kKinds] = {}, others[kKinds] = {};
};

// One payload, damaged several times over. Returns how many.
int64_t fuzz_indices(Tally& tally) {
    const IndexLayout s = random_layout();
    const int64_t size = total_bytes(s);
    const size_t bytes = static_cast<size_t>(size), room = static_cast<size_t>(s.k + kDecodeSlack);
    std::unique_ptr<uint32_t[]> indices(new uint32_t[static_cast<size_t>(s.k)]), buffer(new uint32_t[room]);
    uint32_t* const got = buffer.get();
    std::unique_ptr<uint8_t[]> sound(new uint8_t[bytes]), hurt(new uint8_t[bytes]), again(new uint8_t[bytes]);
    random_indices(s, indices.get());
    require(encode_indices(s, indices.get(), sound.get()), "ascending indices are encoded");
    require(decode_indices(s, sound.get(), got) == 0, "sound bytes are sound");
    require(std::equal(indices.get(), indices.get() + s.k, got), "sound bytes give the indices back");
    if (size == 0) return 0;
    const int64_t rounds = 16;
    for (int64_t round = 0; round < rounds; ++round) {
        const Kind kind = static_cast<Kind>(below(kKinds));
        std::copy_n(sound.get(), bytes, hurt.get());
        damage(kind, hurt.get(), size);
        if (std::equal(hurt.get(), hurt.get() + size, sound.get())) {
            ++tally.same[kind];
        } else if (decode_indices(s, hurt.get(), got)) {
            ++tally.reported[kind];
            for (int64_t i = 0; i < s.k; ++i) require(got[i] == i, "corrupt: 0..k-1");
        } else {
            ++tally.others[kind];
            for (int64_t i = 0; i < s.k; ++i)
                require(got[i] < s.n && (i == 0 || got[i - 1] < got[i]), "sound: ascending below n");
            require(encode_indices(s, got, again.get()), "what was decoded can be encoded");
            require(std::equal(hurt.get(), hurt.get() + size, again.get()), "and gives the same bytes");
        }
    }
    return rounds;
}

// Any bytes decode, any floats encode.
void fuzz_values() {
    const ValueType type = static_cast<ValueType>(below(6));
    const int64_t bits[] = {32, 16, 16, 8, 4, 2}, k = below(3) ? below(400) : 128 * below(4);
    const int64_t scales = type >= kValueInt8 ? (k + kScaleBlock - 1) / kScaleBlock : 0;
    const size_t size = static_cast<size_t>(4 * (scales + (k * bits[type] + 31) / 32));
    std::unique_ptr<float[]> floats(new float[static_cast<size_t>(k)]);
    std::unique_ptr<uint32_t[]> words(new uint32_t[size / 4]);  // aligned as messages are
    for (size_t i = 0; i < size / 4; ++i) words[i] = static_cast<uint32_t>(random_bits());
    uint8_t* bytes = reinterpret_cast<uint8_t*>(words.get());
    values::decode_values(type, k, bytes, floats.get());
    const bool all = below(2) == 0;
    for (int64_t i = 0; i < k; ++i)
        floats[i] = float_of(static_cast<uint32_t>(random_bits()) & (all ? ~0u : 0xbfffffffu));
    values::encode_values(type, k, floats.get(), bytes);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) return 2;
    const int64_t wanted = std::atoll(argv[1]);
    state = static_cast<uint64_t>(std::atoll(argv[2]));
    Tally tally;
    for (int64_t done = 0; done < wanted;) {
        done += fuzz_indices(tally);
        fuzz_values();
    }
    for (int kind = 0; kind < kKinds; ++kind)
        std::printf("%s: %lld reported, %lld other indices, %lld unchanged\n", kNames[kind],
                    static_cast<long long>(tally.reported[kind]), static_cast<long long>(tally.others[kind]),
                    static_cast<long long>(tally.same[kind]));
    return 0;
}
