// megakernel.cu's sizes, what is where in memory, and which block computes what. The host defines the names in capitals
// that are not defined here: the model's sizes, those of the ring of weights, and how the MLP is shared.
#pragma once

#include "megakernel_ptx.cuh"

constexpr int DIM = 128, WARPS = 8, THREADS = 32 * WARPS;
constexpr int PER = 32 / WARPS, COLUMNS = 16 * PER;  // of a chunk, for each warp: mma instructions, columns
constexpr int QKV_TILES = 4 * DIM / 16 / CLUSTER;    // of a block
constexpr int ACROSS = HIDDEN / 512;                 // chunks of a tile of 16 rows
constexpr int DOWN = HIDDEN / CLUSTER / 128;         // chunks of 128 rows and 64 columns below each other in a block
constexpr int UNIT = 64;                             // columns of act, the least that a cluster computes
constexpr int UNIT_TILES = UNIT / 8 / CLUSTER, UNIT_CHUNKS = UNIT_TILES * ACROSS + DOWN;  // of a block
constexpr int ATTENTION_CHUNKS = QKV_TILES * ACROSS + DOWN * 2 * DIM / 64;
constexpr int TOGETHER = ACROSS % 2 ? 1 : 2;         // chunks of a tile that a warp takes at a time
constexpr int AHEAD = 64;                            // tokens of a split that are copied into shared memory
constexpr int SPLITS = CLUSTER / BATCH;              // of the text in attention: one block each
constexpr int TILES = BATCH == 1 ? 8 : 4;            // at most, between two barriers of the block
constexpr int RED = TILES * BATCH * 16 + 8;          // floats of a warp's results; 8 avoid bank conflicts
constexpr u32 SPINS = 1 << 22;
constexpr float FIXED = 1 << 28;  // of the residual stream: steps of 4e-9, and 1e8 at most
static_assert(HEADS == 2 * KV_HEADS && HIDDEN % (128 * CLUSTER) == 0 && HIDDEN % 512 == 0 && INTER % UNIT == 0, "sizes");
static_assert(VOCAB % 16 == 0 && BATCH <= 4 && BATCH <= CLUSTER && CLUSTER <= 8 && 8 % CLUSTER == 0, "sizes");

enum Message { STREAM, NEWEST, PARTS, ACT, MESSAGES };  // what the blocks of a cluster send each other
struct Shared {  // behind the ring
    float red[2][WARPS][RED];
    float squares[2][WARPS][BATCH];
    alignas(16) bf16 heads[4][DIM];  // of the new token: two queries, key, value
    float attended[WARPS][2][DIM];
    float peak[WARPS][2], sum[WARPS][2], newest_peak[2];
    alignas(16) bf16 stream[BATCH][HIDDEN + 16];
    alignas(16) bf16 keys[AHEAD][DIM], values[AHEAD][DIM];
    alignas(16) bf16 head_norms[2][DIM];
    float rope[2][DIM];  // cosines, sines
    alignas(16) u32 newest[BATCH][4][DIM / 2];  // what heads is made from
    alignas(16) u32 parts[CLUSTER][DIM + 8];    // of a split: two heads' weighted values, and how much they weigh
    alignas(16) bf16 act[BATCH][MOST * UNIT + 16];
    u64 full[STAGES], empty[STAGES], sent[MESSAGES];
};
static_assert(STAGES * CHUNK + sizeof(Shared) == SHARED, "the host asks for another size");

__device__ void block_barrier() { barrier_of<THREADS>(); }  // without the producer
__device__ u64 fixed(float v) { return ((u64)__float2ll_rn(v * FIXED) << 8) + 1; }
__device__ float value(u64 word) { return __ll2float_rn((long long)word >> 8) / FIXED; }
__device__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ float wide(bf16 v) { return __uint_as_float((u32)v << 16); }
__device__ u32 word(const uint4& four, int n) { return n == 0 ? four.x : n == 1 ? four.y : n == 2 ? four.z : four.w; }
template <int FROM, int TO>
__device__ float total(float v) {  // over lanes that differ in these bits
    UNROLLED for (int bit = FROM; bit <= TO; bit *= 2) v += __shfl_xor_sync(~0u, v, bit);
    return v;
}

// What is read and written in global memory.
struct Arguments {
    const char* weights;     // of each block for all layers, then of the head
    const bf16* head_norms;  // [LAYERS, 2, DIM]: of queries and of keys
    const bf16* rope;        // [cache_len, 2, DIM]: cosines, sines
    const bf16* embedding;
    long long *text, *position;  // text: [BATCH, room]
    bf16* logits;                // [BATCH, VOCAB]
    u64* stream;                 // [2 sets, 2 * LAYERS, BATCH, HIDDEN]: sums
    u64* state;                  // step, blocks that have ended, likeliest token of each sequence
    u64* stamps;                 // [blocks, 2 * (5 * LAYERS + 1) + 1]: with STAMPS, nanoseconds; 0 where a block has no tile
    const int* units;            // [clusters + 1]: of act, in front of each cluster's
    int room, cache_len;
    float eps, scaling;
    bf16* caches[LAYERS][2];  // keys, values: [BATCH, KV_HEADS, cache_len, DIM]
};

// A split's older tokens are begin to end. A warp takes 16 of them at a time. One split has the newest token, too.
struct Item {
    int sequence, begin = 0, end = 0;
    bool there = false, newest = false;
    u64 cache;
    __device__ void choose(const Arguments& a, int head, int rank, int at) {
        there = head < KV_HEADS && rank < BATCH * SPLITS;
        sequence = rank / SPLITS;
        int split = rank % SPLITS, each = (at + SPLITS - 1) / SPLITS;
        begin = min(at, split * each), end = min(at, begin + each), newest = split == SPLITS - 1;
        cache = ((u64)sequence * KV_HEADS + head) * a.cache_len * DIM;
    }
};
