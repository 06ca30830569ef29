#define MEGAKERNEL_PTX  // in whose place this is
// Runs common/megakernel.cu on a CPU: each thread of the GPU is a context of its own, and where it would wait it lets
// the next one run. This shows whether the plan is right. It shows nothing about PTX or the order of memory accesses.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

#define UNROLLED
#define ROLLED
#define __device__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
struct float2 { float x, y; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct Index { unsigned x; } threadIdx, blockIdx, gridDim;
using std::max, std::min;

constexpr int LANES = 32;
struct Barrier {
    int here = 0, passed = 0;
};
struct Warp {
    Barrier barrier;
    char exchanged[LANES][32];
};
struct Multiprocessor {
    std::vector<Warp> warps;
    Barrier all, consumers, cluster;  // cluster: of the first block of one
    char* memory;
};
struct Context {
    ucontext_t at;
    unsigned thread, block;
    bool ended = false;
    std::unique_ptr<char[]> stack;
};
inline std::vector<Multiprocessor> chip;
inline std::vector<Context> contexts;
inline Context* running;
inline ucontext_t scheduler;

inline void let_others_run() { swapcontext(&running->at, &scheduler); }
inline void meet(Barrier& barrier, int threads) {
    int before = barrier.passed;
    if (++barrier.here == threads) barrier.here = 0, barrier.passed++;
    while (barrier.passed == before) let_others_run();
}
inline Multiprocessor& here() { return chip[blockIdx.x]; }
inline Warp& warp_here() { return here().warps[threadIdx.x / LANES]; }
inline void __syncwarp() { meet(warp_here().barrier, LANES); }
template <class T>
T from_lane(T v, int lane) {
    static_assert(sizeof(T) <= 32 && std::is_trivially_copyable_v<T>);
    Warp& warp = warp_here();
    memcpy(warp.exchanged[threadIdx.x % LANES], &v, sizeof(T));
    __syncwarp();
    memcpy(&v, warp.exchanged[lane], sizeof(T));
    __syncwarp();
    return v;
}
template <class T>
T __shfl_xor_sync(unsigned, T v, int bits) { return from_lane(v, threadIdx.x % LANES ^ bits); }
template <class T>
T __shfl_sync(unsigned, T v, int lane) { return from_lane(v, lane); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned chosen) {
    return chosen == 0x5410 ? b << 16 | (a & 0xffff) : (b & 0xffff0000u) | a >> 16;
}
inline bool __all_sync(unsigned, bool mine) {
    Warp& warp = warp_here();
    warp.exchanged[threadIdx.x % LANES][0] = mine;
    __syncwarp();
    bool all = true;
    for (auto& one : warp.exchanged) all &= one[0];
    __syncwarp();
    return all;
}
inline void __syncthreads() { meet(here().all, here().warps.size() * LANES); }
inline void __threadfence() {}
inline void __trap() { abort(); }
template <class T>
T atomicAdd(T* p, T v) { return std::exchange(*p, *p + v); }
template <class T>
T atomicExch(T* p, T v) { return std::exchange(*p, v); }
template <class T>
T atomicMax(T* p, T v) { return std::exchange(*p, max(*p, v)); }
inline float __uint_as_float(unsigned v) { float f; memcpy(&f, &v, 4); return f; }
inline unsigned __float_as_uint(float f) { unsigned v; memcpy(&v, &f, 4); return v; }
inline long long __float2ll_rn(float v) { return llrintf(v); }
inline float __ll2float_rn(long long v) { return v; }
inline float rsqrtf(float v) { return 1 / sqrtf(v); }
inline float __expf(float v) { return expf(v); }

// In the place of common/megakernel_ptx.cuh.
using u32 = unsigned;
using u64 = unsigned long long;
using bf16 = unsigned short;
constexpr int CHUNK = 16384;
inline char* shared_memory() { return here().memory; }
inline void load_two(const u64* p, u64& first, u64& second) { first = p[0], second = p[1]; }
inline void add(u64* p, u64 v) { *p += v; }
inline u32 rounded(float v) { u32 bits = __float_as_uint(v); return (bits + 0x7fff + (bits >> 16 & 1)) >> 16; }
inline u32 pair(float first, float second) { return rounded(second) << 16 | rounded(first); }
template <int THREADS>
void barrier_of() { meet(here().consumers, THREADS); }
struct Counted {  // an mbarrier
    uint8_t arrivals, missing;
    uint16_t turns;
    int bytes;  // that are expected and not yet there; all of a copy arrive at once
    void changed() { if (!missing && !bytes) missing = arrivals, turns++; }
};
inline Counted& counted(u64* barrier) { return *(Counted*)barrier; }
inline void barrier_init(u64* barrier, u32 arrivals) { counted(barrier) = {(uint8_t)arrivals, (uint8_t)arrivals, 0, 0}; }
inline void arrive(u64* barrier) { counted(barrier).missing--, counted(barrier).changed(); }
inline void expect(u64* barrier, u32 bytes) { counted(barrier).bytes += bytes, arrive(barrier); }
inline void cluster_barrier() { meet(chip[blockIdx.x / CLUSTER * CLUSTER].cluster, CLUSTER * here().warps.size() * LANES); }
inline void send(void* to, u32 v, u32 rank, u64* barrier) {
    char* there = chip[blockIdx.x / CLUSTER * CLUSTER + rank].memory;
    memcpy(there + ((char*)to - here().memory), &v, 4);
    Counted& b = *(Counted*)(there + ((char*)barrier - here().memory));
    b.bytes -= 4, b.changed();
}
inline void await(u64* barrier, int parity) {
    while (counted(barrier).turns % 2 == parity) let_others_run();
}
inline u64 streamed() { return 0; }
inline void copy_chunk(char* to, const char* from, u64* barrier, u64) { memcpy(to, from, CHUNK); arrive(barrier); }
inline void copy_16(void* to, const void* from) { memcpy(to, from, 16); }
inline void copies_landed() {}
inline void forget(u32&) {}
inline void prefetch(const void*) {}
inline u64 nanoseconds() { static u64 now = 0; return ++now; }
inline float bf16_at(u32 pair, int n) { return __uint_as_float(n ? pair & 0xffff0000u : pair << 16); }
inline void multiply(float (&sum)[4], uint4 weights, const u32 (&x)[2]) {  // as PTX defines the fragments
    struct Operands { u32 a[4], b[2]; } mine = {{weights.x, weights.y, weights.z, weights.w}, {x[0], x[1]}};
    int lane = threadIdx.x % LANES, group = lane / 4, four = lane % 4;
    Warp& warp = warp_here();
    memcpy(warp.exchanged[lane], &mine, sizeof mine);
    __syncwarp();
    for (int n = 0; n < 4; n++) {
        int row = group + n / 2 * 8, column = 2 * four + n % 2;
        for (int k = 0; k < 16; k++) {
            auto& left = *(Operands*)warp.exchanged[row % 8 * 4 + k % 8 / 2];
            auto& right = *(Operands*)warp.exchanged[column * 4 + k % 8 / 2];
            sum[n] += bf16_at(left.a[row / 8 + k / 8 * 2], k % 2) * bf16_at(right.b[k / 8], k % 2);
        }
    }
    __syncwarp();
}

template <class Kernel>
void launch(Kernel kernel, unsigned blocks, unsigned threads, size_t shared) {
    static Kernel* kept;
    kept = &kernel;
    chip.clear(), contexts.clear();
    chip.resize(blocks), contexts.resize(blocks * threads);
    gridDim.x = blocks;
    for (auto& one : chip) one.warps.resize(threads / LANES), one.memory = (char*)aligned_alloc(1024, (shared + 1023) / 1024 * 1024);
    size_t left = contexts.size();
    for (size_t n = 0; n < contexts.size(); n++) {
        Context& one = contexts[n];
        one.thread = n % threads, one.block = n / threads;
        one.stack.reset(new char[65536]);
        getcontext(&one.at);
        one.at.uc_stack.ss_sp = one.stack.get(), one.at.uc_stack.ss_size = 65536, one.at.uc_link = &scheduler;
        makecontext(&one.at, (void (*)())+[] { (*kept)(); running->ended = true; }, 0);
    }
    while (left)
        for (auto& one : contexts)
            if (!one.ended) {
                running = &one, threadIdx.x = one.thread, blockIdx.x = one.block;
                swapcontext(&scheduler, &one.at);
                left -= one.ended;
            }
    for (auto& one : chip) free(one.memory);
}
