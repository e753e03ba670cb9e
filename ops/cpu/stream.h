// The streaming pass, generic over the type Vec of the including namespace. Included by one stream_*.cpp per
// instruction set, inside that set's namespace and under its target; hence no include guard.

template <Source S>
static inline Vec::F load_grad(const Step& s, int64_t i) {
    if constexpr (S == kFp32) return Vec::load(static_cast<const float*>(s.grad) + i);
    if constexpr (S == kBf16) return Vec::load_bf16(static_cast<const uint16_t*>(s.grad) + i);
    if constexpr (S == kFp16) return Vec::load_fp16(static_cast<const uint16_t*>(s.grad) + i);
    return Vec::set(0.0f);
}

// What is left of stream_as below when no whole vector fits.
template <Source S, Form M>
static int64_t stream_tail(const Step& s, int64_t i, int64_t end, const Thresholds& thresholds, float* values,
                           int32_t* indices, float* velocities) {
    int64_t m = 0;
    for (; i < end; ++i) {
        float u = 0.0f;
        const float a = accumulated_at(s, S, M, i, &u);
        const bool zeroed = key_of(a) >= thresholds.zeroed;
        s.residual[i] = zeroed ? 0.0f : a;
        if constexpr (M == kVelocity) s.velocity[i] = zeroed ? 0.0f : u;
        if (key_of(a) >= thresholds.candidate) {
            if constexpr (M == kVelocity) velocities[m] = u;
            values[m] = a;
            indices[m++] = static_cast<int32_t>(i);
        }
    }
    return m;
}

// 1. accumulate  2. compare as integers  3. store with the likely winners zeroed: a free mask on a store that is made
// anyway, where zeroing later would cost k scattered writes  4. append what passed.
// Dense: append without asking first whether there is anything to append. It costs more instructions but no
// mispredicted branch, and pays when about every second vector holds a candidate.
template <Source S, Form M, bool Dense>
static int64_t stream_as(const Step& s, int64_t begin, int64_t end, const Thresholds& thresholds, float* values,
                         int32_t* indices, float* velocities) {
    int64_t m = 0, i = begin;
    // key > threshold - 1, signed: right for 0 and for kAboveAll.
    const auto below_candidate = Vec::set_key(thresholds.candidate - 1);
    const auto below_zeroed = Vec::set_key(thresholds.zeroed - 1);
    const auto decay = Vec::set(s.decay), momentum = Vec::set(s.momentum);
    for (; i + Vec::kWidth <= end; i += Vec::kWidth) {
        auto a = Vec::load(s.residual + i);
        auto u = a;
        if constexpr (M == kVelocity) u = Vec::load(s.velocity + i);
        if constexpr (S != kNone) {
            auto added = load_grad<S>(s, i);
            if constexpr (M == kVelocity) u = added = Vec::add(Vec::mul(momentum, u), added);
            a = Vec::add(M == kPlain ? a : Vec::mul(decay, a), added);
        }
        const auto zeroed = Vec::greater(a, below_zeroed);
        Vec::store(s.residual + i, Vec::cleared(a, zeroed));
        if constexpr (M == kVelocity) Vec::store(s.velocity + i, Vec::cleared(u, zeroed));
        const auto mask = Vec::greater(a, below_candidate);
        if (Dense || Vec::any(mask)) {
            if constexpr (M == kVelocity) Vec::append(velocities + m, u, mask);
            m += Vec::append(values + m, indices + m, a, mask, static_cast<int32_t>(i));
        }
    }
    float* const velocities_left = M == kVelocity ? velocities + m : nullptr;
    return m + stream_tail<S, M>(s, i, end, thresholds, values + m, indices + m, velocities_left);
}

template <Source S, Form M>
static int64_t stream(const Step& s, int64_t begin, int64_t end, const Thresholds& thresholds, float* values,
                      int32_t* indices, float* velocities) {
    return thresholds.dense ? stream_as<S, M, true>(s, begin, end, thresholds, values, indices, velocities)
                            : stream_as<S, M, false>(s, begin, end, thresholds, values, indices, velocities);
}

static int64_t positions(const float* values, int64_t m, Key from, Key to, int32_t* out) {
    const auto below_from = Vec::set_key(from - 1), below_to = Vec::set_key(to - 1);
    float unused[Vec::kWidth];
    int64_t n = 0, i = 0;
    for (; i + Vec::kWidth <= m; i += Vec::kWidth) {
        const auto a = Vec::load(values + i);
        const auto mask = Vec::without(Vec::greater(a, below_from), Vec::greater(a, below_to));
        if (Vec::any(mask)) n += Vec::append(unused, out + n, a, mask, static_cast<int32_t>(i));
    }
    for (; i < m; ++i) {
        const Key key = key_of(values[i]);
        if (key >= from && key < to) out[n++] = static_cast<int32_t>(i);
    }
    return n;
}

static int64_t compact(const float* values, const int32_t* indices, int64_t m, Key from, float* out_values,
                       int32_t* out_indices, int64_t room) {
    const auto below = Vec::set_key(from - 1);
    int64_t n = 0, i = 0;
    for (; i + Vec::kWidth <= m && n + Vec::kWidth <= room; i += Vec::kWidth) {
        const auto a = Vec::load(values + i);
        const auto mask = Vec::greater(a, below);
        Vec::F at;  // indices travel as bit patterns: nothing computes with them
        std::memcpy(&at, indices + i, sizeof at);
        float packed[Vec::kWidth];
        Vec::append(out_values + n, a, mask);
        Vec::append(packed, at, mask);
        std::memcpy(out_indices + n, packed, sizeof packed);
        n += Vec::count(mask);
    }
    for (; i < m && n < room; ++i) {
        if (key_of(values[i]) < from) continue;
        out_values[n] = values[i];
        out_indices[n++] = indices[i];
    }
    return n;
}

template <Source S>
static constexpr void fill(Variant& v) {
    v.stream[S][kPlain] = stream<S, kPlain>;
    v.stream[S][kDecay] = stream<S, kDecay>;
    v.stream[S][kVelocity] = stream<S, kVelocity>;
}

static inline Variant table(const char* name) {
    Variant v{};
    v.name = name;
    v.dense_from = Vec::kDenseFrom;
    v.positions = positions;
    v.compact = compact;
    v.encode_values = encode_values;
    v.decode_values = decode_values;
    fill<kNone>(v);
    fill<kFp32>(v);
    fill<kBf16>(v);
    fill<kFp16>(v);
    return v;
}
