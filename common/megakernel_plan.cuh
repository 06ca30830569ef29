// megakernel.cu's sizes, what is where in memory, and which block computes what. The host defines the names in capitals
// that are not defined here: the model's sizes, and those of the ring of weights.
#pragma once

#include "megakernel_ptx.cuh"

constexpr int DIM = 128, WARPS = 8, THREADS = 32 * WARPS, CHUNK_COLUMNS = 512;
constexpr int QKV = (HEADS + 2 * KV_HEADS) * DIM, ACROSS = HIDDEN / CHUNK_COLUMNS, HALF = INTER / 2 / CHUNK_COLUMNS;
constexpr int PHASES = 4 * LAYERS + 1;  // those with weights
constexpr int PART = DIM + 2;           // words of a split: two heads' weighted values, and how much they weigh
constexpr int TILES = 4;                // at most, between two barriers of the block
constexpr int PER = 32 / WARPS, COLUMNS = 16 * PER;  // of a chunk, for each warp: mma instructions, columns
constexpr int STRIP = COLUMNS * (HALF > ACROSS ? HALF : ACROSS);  // columns of the input that one warp multiplies
constexpr int RED = TILES * BATCH * 16 + 8;                  // floats of a warp's results; 8 avoid bank conflicts
constexpr u32 SPINS = 1 << 22;
constexpr float FIXED = 1 << 28;  // of the residual stream: steps of 4e-9, and 1e8 at most
static_assert(HEADS == 2 * KV_HEADS && HIDDEN % CHUNK_COLUMNS == 0 && INTER % (2 * CHUNK_COLUMNS) == 0, "sizes");
static_assert(VOCAB % 16 == 0 && BATCH <= 4, "sizes");

struct Shared {  // behind the ring
    float red[2][WARPS][RED];
    float squares[2][WARPS][BATCH];
    alignas(16) bf16 heads[4][DIM];         // of the new token: two queries, key, value
    float attended[WARPS][2][DIM];
    float peak[WARPS][2], sum[WARPS][2];
    alignas(16) bf16 strip[WARPS][BATCH][STRIP + 8];
    u64 full[STAGES], empty[STAGES];
};
static_assert(STAGES * CHUNK + sizeof(Shared) == SHARED, "the host asks for another size");

__device__ void block_barrier() { barrier_of<THREADS>(); }  // without the producer
__device__ void store(u64* p, u32 tag, u32 payload) { store(p, (u64)tag << 32 | payload); }
__device__ u64 fixed(float v) { return ((u64)__float2ll_rn(v * FIXED) << 8) + 1; }
__device__ float value(u64 word) { return __ll2float_rn((long long)word >> 8) / FIXED; }
__device__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ float wide(bf16 v) { return __uint_as_float((u32)v << 16); }
template <int FROM, int TO>
__device__ float total(float v) {  // over lanes that differ in these bits
    UNROLLED for (int bit = FROM; bit <= TO; bit *= 2) v += __shfl_xor_sync(~0u, v, bit);
    return v;
}

// What is read and written in global memory.
struct Arguments {
    const char* weights;
    const bf16* head_norms;  // [LAYERS, 2, DIM]: of queries and of keys
    const bf16* rope;        // [cache_len, 2, DIM]: cosines, sines
    const bf16* embedding;
    long long *text, *position;  // text: [BATCH, room]
    bf16* logits;                // [BATCH, VOCAB]
    u64 *stream;                 // [2 sets, 2 * LAYERS, BATCH, HIDDEN]: sums
    u64 *qkv, *act;              // [2, BATCH, QKV / 2], [2, BATCH, INTER / 2], layers in turn: tagged pairs of bf16
    u64* parts;                  // [2, BATCH, KV_HEADS, splits, PART]: likewise; the weights are tagged floats
    u64* state;                  // step, blocks that have ended, likeliest token of each sequence
    u64* stamps;                 // [blocks, 2 * (5 * LAYERS + 1) + 1]: with STAMPS, nanoseconds; 0 where a block has no tile
    int room, cache_len, splits;
    float eps, scaling;
    bf16* caches[LAYERS][2];  // keys, values: [BATCH, KV_HEADS, cache_len, DIM]
};

__device__ int tiles_of(int phase) {
    if (phase == PHASES - 1) return VOCAB / 16;
    int n = phase % 4;
    return n == 0 ? QKV / 16 : n == 1 ? KV_HEADS * HIDDEN / 64 : n == 2 ? INTER / 8 : HIDDEN / 8;
}
__device__ int chunks_of(int phase) {
    int n = phase % 4;
    return n == 1 ? 2 : n == 3 ? HALF : ACROSS;  // the head's number is that of a qkv
}

// This block's tiles: dealt out to the blocks in turn, and the next phase goes on where this one ended.
struct Deal {
    int phase = -1, first = 0, dealt = 0;
    __device__ void next() {
        if (phase >= 0) dealt += tiles_of(phase);
        phase++;
        while (dealt >= (int)gridDim.x) dealt -= gridDim.x;  // fewer instructions than a division
        first = (int)blockIdx.x - dealt;
        if (first < 0) first += gridDim.x;
    }
};

// A split's older tokens are begin to end. A warp takes 16 of them at a time, and the newest token by itself.
struct Item {
    int sequence, head, split, begin = 0, end = 0;
    bool there = false, newest;
    u64 cache;
    __device__ void choose(const Arguments& a, int number, int at) {
        there = number < BATCH * KV_HEADS * a.splits;
        split = number % a.splits, head = number / a.splits % KV_HEADS, sequence = number / a.splits / KV_HEADS;
        int each = (at + a.splits - 1) / a.splits;
        begin = min(at, split * each), end = min(at, begin + each), newest = split == a.splits - 1;
        cache = ((u64)sequence * KV_HEADS + head) * a.cache_len * DIM;
    }
};
