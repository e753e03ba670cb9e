// Runs CUDA kernels on one CPU thread, to test them where there is no GPU.
//
// Every CUDA thread is a fiber. A seed decides which fiber of which resident block runs next, so that each seed is
// another interleaving; the same seed gives the same one. Shared memory is poisoned at the start of a block. Reported:
// deadlock, livelock, barriers that threads reach at different places or not at all, collectives with differing or
// wrong masks, lanes that have left, traps, overrun fiber stacks.
// Not modelled: memory order (everything here is sequentially consistent), dynamic shared memory, other clocks.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#define HOST_SHIM 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("shim_shared")))

struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) ushort4 { unsigned short x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// Bounds of the section that holds all __shared__ variables; the dummy makes sure that there is one.
__attribute__((section("shim_shared"), used)) static char shim_shared_dummy[16];
extern "C" char __start_shim_shared[], __stop_shim_shared[];

namespace shim {

struct Dim { unsigned x = 0, y = 0, z = 0; };
enum State { kRunnable, kInWarp, kAtBarrier, kDone };
constexpr size_t kStackBytes = SHIM_STACK_BYTES;
constexpr uint64_t kCanary = 0x5afe5afe5afe5afeull;
constexpr int kMaxIdleSweeps = 20000;

struct Fiber {
    void* sp = nullptr;
    uint64_t* stack = nullptr;
    State state = kRunnable;
    Dim thread;
    uint64_t value = 0, result = 0;
    bool ran_on = false;  // passed a barrier or an atomic since it was last looked at: more than polling
};

struct Warp {
    unsigned arrived = 0, mask = 0, exited = 0;
    int kind = 0, argument = 0;
};

struct Block {
    Dim index;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<char> shared;
    unsigned at_barrier = 0, done = 0;
    int barrier_line = 0;
};

inline Block* block;
inline Fiber* fiber;
inline Dim block_dim, grid_dim;
inline std::string error;
inline void* scheduler_sp;
inline void (*entry)(void**);
inline void** arguments;
inline uint64_t random_state;
inline std::vector<uint64_t*> free_stacks;

inline uint64_t random() {
    random_state += 0x9E3779B97F4A7C15ull;
    uint64_t z = random_state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

#if !defined(__x86_64__)
#error "the shim's fiber switch is written for x86-64"
#endif
// Saves the callee-saved registers and the stack pointer in *save, continues where `next` was saved.
extern "C" void shim_switch(void** save, void* next);
__asm__(
    ".text\n.local shim_switch\n.type shim_switch,@function\nshim_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n");

inline void yield() { shim_switch(&fiber->sp, scheduler_sp); }

// Reports and abandons the launch: the scheduler drops all fibers when it sees the message.
[[noreturn]] inline void fail(const std::string& what) {
    char where[96];
    std::snprintf(where, sizeof where, " (block %u, thread %u)", block->index.x, fiber->thread.x);
    if (error.empty()) error = what + where;
    yield();
    std::abort();
}

inline void finish() {
    Warp& warp = block->warps[fiber->thread.x / 32];
    const unsigned bit = 1u << fiber->thread.x % 32;
    if (warp.arrived) fail("a lane left while others wait in a collective");
    if (block->at_barrier) fail("a thread left while others wait at a barrier");
    warp.exited |= bit;
    fiber->state = kDone;
    ++block->done;
}

inline void fiber_main() {
    entry(arguments);
    finish();
    yield();
    std::abort();
}

inline void barrier(int line) {
    if (block->done) fail("barrier after some thread of the block has left");
    if (block->at_barrier && block->barrier_line != line) fail("threads wait at different barriers");
    block->barrier_line = line;
    fiber->ran_on = true;
    if (++block->at_barrier < block->fibers.size()) {
        fiber->state = kAtBarrier;
        return yield();
    }
    block->at_barrier = 0;
    for (Fiber& f : block->fibers)
        if (f.state == kAtBarrier) f.state = kRunnable;
}

enum Kind { kSyncWarp = 1, kBallot, kAny, kShuffle, kShuffleUp, kShuffleDown };

inline void complete(Warp& warp, Fiber* lanes) {
    uint64_t votes = 0;
    for (int i = 0; i < 32; ++i)
        if (warp.mask >> i & 1 && lanes[i].value) votes |= 1ull << i;
    for (int i = 0; i < 32; ++i) {
        if (!(warp.mask >> i & 1)) continue;
        int from = i;
        if (warp.kind == kShuffle) from = warp.argument;
        if (warp.kind == kShuffleUp) from = i - warp.argument < 0 ? i : i - warp.argument;
        if (warp.kind == kShuffleDown) from = i + warp.argument > 31 ? i : i + warp.argument;
        if (!(warp.mask >> from & 1)) fail("shuffle from a lane outside the mask");
        lanes[i].result = warp.kind == kBallot ? votes : warp.kind == kAny ? votes != 0 : lanes[from].value;
    }
    for (int i = 0; i < 32; ++i)
        if (lanes[i].state == kInWarp) lanes[i].state = kRunnable;
    warp.arrived = 0;
}

inline uint64_t collective(Kind kind, unsigned mask, uint64_t value, int argument) {
    Warp& warp = block->warps[fiber->thread.x / 32];
    const unsigned bit = 1u << fiber->thread.x % 32;
    if (!(mask & bit)) fail("a lane calls a collective without being in its mask");
    if (mask & warp.exited) fail("a collective's mask names a lane that has left");
    if (warp.arrived && (warp.kind != kind || warp.mask != mask || warp.argument != argument))
        fail("the lanes of a warp are in different collectives");
    warp.kind = kind, warp.mask = mask, warp.argument = argument;
    warp.arrived |= bit;  // no progress in the sense of ran_on: loops that poll use collectives too
    fiber->value = value;
    if (warp.arrived == mask) {
        complete(warp, &block->fibers[fiber->thread.x / 32 * 32]);
    } else {
        fiber->state = kInWarp;
        yield();
    }
    return fiber->result;
}

// Now and then another fiber comes between two accesses to memory that others see.
inline void maybe_preempt() {
    fiber->ran_on = true;
    if (random() % 8 == 0) yield();
}

inline uint64_t* take_stack() {
    if (!free_stacks.empty()) {
        uint64_t* stack = free_stacks.back();
        free_stacks.pop_back();
        return stack;
    }
    auto* stack = static_cast<uint64_t*>(std::aligned_alloc(64, kStackBytes));
    if (stack == nullptr) std::abort();
    return stack;
}

inline void start(Block& b, unsigned index) {
    b.index = {index, 0, 0};
    b.fibers.assign(block_dim.x, Fiber{});
    b.warps.assign(block_dim.x / 32, Warp{});
    b.shared.assign(static_cast<size_t>(__stop_shim_shared - __start_shim_shared), static_cast<char>(0xCD));
    b.at_barrier = b.done = 0;
    for (unsigned t = 0; t < block_dim.x; ++t) {
        Fiber& f = b.fibers[t];
        f.thread = {t, 0, 0};
        f.stack = take_stack();
        f.stack[0] = kCanary;
        uint64_t* top = f.stack + kStackBytes / 8 - 2;  // leaves rsp + 8 a multiple of 16 at the entry, as a call would
        *top = reinterpret_cast<uint64_t>(&fiber_main);
        f.sp = top - 6;
    }
}

inline void release(Block& b) {
    for (Fiber& f : b.fibers) {
        if (f.stack[0] != kCanary && error.empty()) error = "fiber stack overrun";
        free_stacks.push_back(f.stack);
    }
}

// Runs every runnable fiber of a block once, warps and lanes in a seeded order. Returns whether any got further.
inline bool sweep(Block& b) {
    std::memcpy(__start_shim_shared, b.shared.data(), b.shared.size());
    block = &b;
    bool progress = false;
    const unsigned warps = block_dim.x / 32, turn = static_cast<unsigned>(random()), flip = turn >> 16 & 31;
    for (unsigned w = 0; w < warps && error.empty(); ++w) {
        const unsigned warp = (w * (turn & 1 ? 1 : warps - 1) + (turn >> 1)) % warps;
        for (unsigned lane = 0; lane < 32 && error.empty(); ++lane) {
            fiber = &b.fibers[warp * 32 + (lane ^ flip)];
            if (fiber->state != kRunnable) continue;
            fiber->ran_on = false;
            shim_switch(&scheduler_sp, fiber->sp);
            progress |= fiber->ran_on || fiber->state == kDone;
        }
    }
    std::memcpy(b.shared.data(), __start_shim_shared, b.shared.size());
    return progress;
}

// All blocks of the grid, at most `resident` at a time, started in index order as a GPU does. Empty string: all went well.
inline const char* launch(void (*kernel)(void**), unsigned grid, unsigned threads, void** args, uint64_t seed,
                          unsigned resident) {
    entry = kernel, arguments = args, random_state = seed, error.clear();
    block_dim = {threads, 1, 1}, grid_dim = {grid, 1, 1};
    std::vector<Block> live(resident < grid ? resident : grid);
    unsigned next = 0, finished = 0;
    int idle = 0;
    for (Block& b : live) start(b, next++);
    while (finished < grid && error.empty()) {
        bool progress = false;
        const size_t first = random() % live.size();
        for (size_t i = 0; i < live.size() && error.empty(); ++i) {
            Block& b = live[(first + i) % live.size()];
            if (b.fibers.empty()) continue;
            if (live.size() > 1 && random() % 4 == 0) continue;  // a block may stand still for a while
            progress |= sweep(b);
            if (b.done < block_dim.x) continue;
            release(b);
            ++finished;
            b.fibers.clear();
            if (next < grid) start(b, next++);
        }
        idle = progress ? 0 : idle + 1;
        if (idle > kMaxIdleSweeps && error.empty()) error = "deadlock or livelock: no thread gets any further";
    }
    for (Block& b : live)
        if (!b.fibers.empty()) release(b);
    return error.c_str();
}

template <class... A, size_t... I>
void unpack(void (*f)(A...), void** args, std::index_sequence<I...>) {
    f(*static_cast<A*>(args[I])...);
}
template <class... A>
void call(void (*f)(A...), void** args) {
    unpack(f, args, std::index_sequence_for<A...>{});
}

}  // namespace shim

#include "intrinsics.h"
