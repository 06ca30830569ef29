// Operations that megakernel.cu needs and C++ has no word for. Tests put plain C++ in the place of this file.
#ifndef MEGAKERNEL_PTX
#define MEGAKERNEL_PTX

#define UNROLLED _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;
constexpr int CHUNK = 16384;  // bytes that are copied at a time

__device__ u32 address(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }
__device__ char* shared_memory() {
    extern __shared__ __align__(1024) char ring[];
    return ring;
}
__device__ void load_two(const u64* p, u64& first, u64& second) {
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(p) : "memory");
}
__device__ void add(u64* p, u64 v) { asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
__device__ u32 pair(float first, float second) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}
__device__ void multiply(float (&sum)[4], uint4 weights, const u32 (&x)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(weights.x), "r"(weights.y), "r"(weights.z), "r"(weights.w), "r"(x[0]), "r"(x[1]));
}
template <int THREADS>
__device__ void barrier_of() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }
__device__ void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ void arrive(u64* barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory"); }
// For data of this block's shared memory, so it acquires at the block's scope, also where other blocks of the cluster have
// written them: a wait that acquires at the cluster's scope empties the L1 cache.
__device__ void await(u64* barrier, int parity) {
    asm volatile("{ .reg .pred p;\n\tAGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n\t@!p bra AGAIN; }"
                 ::"r"(address(barrier)), "r"(parity) : "memory");
}
// Shared memory of the cluster's blocks: what is sent counts at the receiver's barrier, which expects so many bytes.
__device__ void cluster_barrier() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ u32 address_in(const void* shared, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address(shared)), "r"(rank));
    return there;
}
__device__ void send(void* to, u32 v, u32 rank, u64* barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                 ::"r"(address_in(to, rank)), "r"(v), "r"(address_in(barrier, rank)) : "memory");
}
__device__ void expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(bytes) : "memory");
}
__device__ u64 streamed() {  // what is used once leaves the L2 cache first
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ void copy_chunk(char* to, const char* from, u64* barrier, u64 policy) {
    expect(barrier, CHUNK);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(address(to)), "l"(from), "n"(CHUNK), "r"(address(barrier)), "l"(policy) : "memory");
}
__device__ void copy_16(void* to, const void* from) {  // as many bytes
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(to)), "l"(from) : "memory");
}
__device__ void copies_landed() { asm volatile("cp.async.wait_all;" ::: "memory"); }  // those of this thread
// The compiler does not know that the number stays the same, so it keeps nothing that follows from it in registers.
__device__ void forget(u32& number) { asm volatile("" : "+r"(number)); }
__device__ void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
__device__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}
#endif
