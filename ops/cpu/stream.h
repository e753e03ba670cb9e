// The streaming pass, generic over the vector type V of the including namespace. Included once per instruction set
// (see variants.h), inside that set's namespace and under its target; hence no include guard.

template <Source S>
static inline Vec::F load_grad(const Step& s, int64_t i) {
    if constexpr (S == kFp32) return Vec::load(static_cast<const float*>(s.grad) + i);
    if constexpr (S == kBf16) return Vec::load_bf16(static_cast<const uint16_t*>(s.grad) + i);
    if constexpr (S == kFp16) return Vec::load_fp16(static_cast<const uint16_t*>(s.grad) + i);
    return Vec::set(0.0f);
}

// 1. accumulate  2. compare as integers  3. store with the candidates zeroed: a free mask on a store that is made
// anyway, where zeroing later would cost k scattered writes  4. append what passed.
template <Source S, Form M>
static int64_t stream(const Step& s, int64_t begin, int64_t end, Key threshold, float* values, int32_t* indices,
                      float* velocities) {
    int64_t m = 0, i = begin;
    const auto below = Vec::set_key(threshold - 1);  // key > threshold - 1 as signed: right for 0 and for kAboveAll
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
        const auto mask = Vec::greater(a, below);
        Vec::store(s.residual + i, Vec::cleared(a, mask));
        if constexpr (M == kVelocity) Vec::store(s.velocity + i, Vec::cleared(u, mask));
        if (Vec::any(mask)) {
            if constexpr (M == kVelocity) Vec::append(velocities + m, u, mask);
            m += Vec::append(values + m, indices + m, a, mask, static_cast<int32_t>(i));
        }
    }
    for (; i < end; ++i) {
        float u = 0.0f;
        const float a = accumulated_at(s, S, M, i, &u);
        const bool candidate = key_of(a) >= threshold;
        s.residual[i] = candidate ? 0.0f : a;
        if constexpr (M == kVelocity) s.velocity[i] = candidate ? 0.0f : u;
        if (candidate) {
            if constexpr (M == kVelocity) velocities[m] = u;
            values[m] = a;
            indices[m++] = static_cast<int32_t>(i);
        }
    }
    return m;
}

template <Source S>
static constexpr void fill(Variant& v) {
    v.stream[S][kPlain] = stream<S, kPlain>;
    v.stream[S][kDecay] = stream<S, kDecay>;
    v.stream[S][kVelocity] = stream<S, kVelocity>;
}

static inline Variant variant(const char* name) {
    Variant v{};
    v.name = name;
    fill<kNone>(v);
    fill<kFp32>(v);
    fill<kBf16>(v);
    fill<kFp16>(v);
    return v;
}
