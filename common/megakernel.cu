// One decoding step of a Qwen3 model as one persistent kernel. common/megakernel.py compiles and launches it.
//
// Plan. Each SM runs one block for the whole step. A layer has five phases, and the language model's head follows:
//
//   phase     a tile of it                               waits for                     hands on
//   qkv       16 rows x HIDDEN, norm of its input        residual stream               queries, keys, values
//   attend    one sequence, key-value head and split     32 of the tiles of qkv        weighted values of its split
//   o         64 rows x the 2 heads of one kv head       the splits of these heads     addends of the stream
//   gate_up   8 gate and 8 up rows x HIDDEN, norm        residual stream               SiLU(gate) * up
//   down      16 rows x half of INTER                    half of gate_up               addends of the stream
//   head      16 rows x HIDDEN, norm                     residual stream               logits, likeliest token
//
// Weights. They depend on nothing, so one warp, the producer, copies them: chunks of 16 KB, in the order in which
// this block uses them, into a ring of STAGES slots in shared memory. It waits for free slots, never for data of
// other blocks. At most WINDOW copies are on their way at a time, since every other read would wait behind them.
// While the block waits for its input, the ring fills up for the phases that follow. The host has laid the weights
// out so that a chunk is contiguous and each thread finds its operands of mma.m16n8k16 in 16 bytes.
//
// Data between blocks. There is no grid-wide barrier. Readers poll the data itself, and two kinds of 64-bit words
// tell whether they are there:
// - a tagged word has its payload in the lower half and the layer's number since the first step in the upper half;
// - a word of the residual stream is a sum in fixed point. Its lowest 8 bits count the addends. Integer addition has
//   no rounding, so the order of the addends does not change the result. The words of the next step are set to 0
//   in this one: there are two sets.
// Both are read and written by relaxed operations of GPU scope on 64 bits. Such operations on the same location are
// morally strong and single-copy atomic, so payload and tag, or sum and count, never tear (PTX ISA, "Memory
// Consistency Model"). No other data are handed over before the choice of the token, so no fence is needed until
// then. The cache's new keys and values and the chosen token are read by the next launch, and a kernel sees
// everything that the kernel before it in the stream wrote.
//
// No deadlock. A block waits only for phases before its own, each block works through the phases in the same order,
// and all blocks are resident at the same time: the grid has one block per SM, and a cooperative launch fails
// otherwise. A wait that lasts a few million polls ends the kernel with an error.

#include "megakernel_plan.cuh"

struct Block {
    const Arguments& a;
    char* ring;
    Shared& s;
    int thread, warp, lane, slot = 0, turn = 0, buffer = 0, phase = 0;  // phase: 5 a layer
    u32 tag = 0;  // of the layer that is computed
    int set = 0, at = 0;
    int passes_on = 0;  // which of a lane's columns of the stream, as bits
    Item item;
    u64 best[BATCH] = {};  // logit and token of the likeliest so far, as a number that is larger for a likelier one

    __device__ Block(const Arguments& a, char* ring, Shared& s)
        : a(a), ring(ring), s(s), thread(threadIdx.x), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

    __device__ void stamp(int mark) {
#ifdef STAMPS
        if (thread == 0) a.stamps[blockIdx.x * (10 * LAYERS + 3) + mark] = nanoseconds();
#endif
    }
    __device__ void begins() { stamp(2 * phase); }      // and waits for its input
    __device__ void has_input() { stamp(2 * phase + 1); }
    __device__ void await(u64* barrier, int parity) {
        for (u32 spin = 0; !passed(barrier, parity); spin++)
            if (spin > SPINS) __trap();
    }
    // All lanes poll until each of the words of each lane is ready.
    template <int N, class Fetch, class Ready>
    __device__ void poll(u64 (&word)[N], Fetch fetch, Ready ready) {
        for (u32 spin = 0;; spin++) {
            bool all = true;
            fetch();
            UNROLLED for (int n = 0; n < N; n++) all &= ready(word[n]);
            if (__all_sync(~0u, all)) return;
            if (spin > SPINS) __trap();
        }
    }
    template <int N, class Where>
    __device__ void poll_tagged(u64 (&word)[N], Where where) {
        auto fetch = [&] {
            UNROLLED for (int n = 0; n < N; n++) word[n] = load(where(n));
        };
        poll(word, fetch, [this](u64 w) { return (u32)(w >> 32) == tag; });
    }

    __device__ void produce() {
        u64 policy = streamed();
        const char* begins = a.weights;
        int number = 0;
        Deal deal;
        for (int phase = 0; phase < PHASES; phase++) {
            deal.next();
            int tiles = tiles_of(phase), bytes = chunks_of(phase) * CHUNK;
            const char* tile_at = begins + (u64)deal.first * bytes;
            for (int tile = deal.first; tile < tiles; tile += gridDim.x, tile_at += (u64)gridDim.x * bytes)
                for (const char* from = tile_at; from < tile_at + bytes; from += CHUNK) {
                    await(&s.empty[slot], turn ^ 1);
                    if (number >= WINDOW) {  // so many copies at a time
                        int landed = slot - WINDOW;
                        await(&s.full[landed < 0 ? landed + STAGES : landed], landed < 0 ? turn ^ 1 : turn);
                    }
                    number++;
                    copy_chunk(ring + slot * CHUNK, from, &s.full[slot], policy);
                    if (++slot == STAGES) slot = 0, turn ^= 1;
                }
            begins += (u64)tiles * bytes;
        }
    }

    // This warp's operands of the next chunk.
    __device__ void take(uint4 (&weights)[PER]) {
        await(&s.full[slot], turn);
        const uint4* mine = (const uint4*)(ring + slot * CHUNK) + warp * PER * 32 + lane;
        UNROLLED for (int i = 0; i < PER; i++) weights[i] = mine[32 * i];
        __syncwarp();
        if (lane == 0) arrive(&s.empty[slot]);
        if (++slot == STAGES) slot = 0, turn ^= 1;
    }
    // The warp's strip as operands: a column is a sequence, of which there are BATCH of 8.
    template <int N>
    __device__ void operands(u32 (&x)[N][2]) {
        __syncwarp();
        int sequence = lane / 4;
        UNROLLED for (int n = 0; n < N; n++) {
            uint2 four = {0, 0};
            if (sequence < BATCH) four = *(const uint2*)&s.strip[warp][sequence][16 * n + 4 * (lane % 4)];
            x[n][0] = four.x, x[n][1] = four.y;
        }
    }
    __device__ void keep(int tile, const float (&sum)[4]) {
        if (lane % 4 * 2 < BATCH) {
            float* to = s.red[buffer][warp] + (tile * BATCH + lane % 4 * 2) * 16 + lane / 4;
            to[0] = sum[0], to[8] = sum[2];
            if (lane % 4 * 2 + 1 < BATCH) to[16] = sum[1], to[24] = sum[3];
        }
    }
    // Tiles of 16 rows; this warp multiplies its columns of each chunk.
    template <int CHUNKS>
    __device__ void products(const u32 (&x)[PER * CHUNKS][2], int tiles) {
        ROLLED for (int tile = 0; tile < tiles; tile++) {
            float sums[2][4] = {};  // two, so that a product need not wait for the one before it
            UNROLLED for (int c = 0; c < CHUNKS; c++) {
                uint4 weights[PER];
                take(weights);
                UNROLLED for (int i = 0; i < PER; i++) multiply(sums[i % 2], weights[i], x[c * PER + i]);
            }
            UNROLLED for (int n = 0; n < 4; n++) sums[0][n] += sums[1][n];
            keep(tile, sums[0]);
        }
    }
    // Adds up what the warps kept. use(tile, sequence, row, whether it is this lane's to write, sum, sum of squares).
    template <class Use>
    __device__ void finish(int tiles, Use use) {
        block_barrier();
        for (int i = thread; i < tiles * BATCH * 64; i += THREADS) {
            int share = i % 4, row = i / 4 % 16, sequence = i / 64 % BATCH, tile = i / 64 / BATCH;
            float y = 0, squares = 0;
            UNROLLED for (int from = share; from < WARPS; from += 4) {
                y += s.red[buffer][from][(tile * BATCH + sequence) * 16 + row];
                squares += s.squares[buffer][from][sequence];
            }
            use(tile, sequence, row, share == 0, total<1, 2>(y), total<1, 2>(squares));
        }
        buffer ^= 1;
    }

    __device__ u64* stream(int n) {  // [BATCH, HIDDEN]; n = 0 is the embedding, and not stored
        return a.stream + ((u64)set * 2 * LAYERS + n - 1) * BATCH * HIDDEN;
    }
    // The stream's n-th value as operands: a lane reads two columns of each chunk. It is divided by its length after
    // the product, and the norm's weights are part of the matrix. squares: of the warp's columns.
    __device__ void read_stream(int n, u32 (&x)[PER * ACROSS][2]) {
        static_assert(COLUMNS == 64, "two of a lane");
        constexpr int PAIRS = BATCH * ACROSS;
        u64 word[2 * PAIRS];
        int mine = warp * COLUMNS + 2 * lane;
        auto offset = [](int i) { return i / ACROSS * HIDDEN + i % ACROSS * CHUNK_COLUMNS; };
        if (n == 0) {
            UNROLLED for (int i = 0; i < PAIRS; i++) {
                u64 token = a.text[(u64)(i / ACROSS) * a.room + at];
                u32 both = *(const u32*)(a.embedding + token * HIDDEN + i % ACROSS * CHUNK_COLUMNS + mine);
                word[2 * i] = fixed(low(both)), word[2 * i + 1] = fixed(high(both));
            }
        } else {
            const u64* from = stream(n) + mine;
            u32 addends = n % 2 ? KV_HEADS + 1 : 3;
            auto fetch = [&] {
                UNROLLED for (int i = 0; i < PAIRS; i++) load_two(from + offset(i), word[2 * i], word[2 * i + 1]);
            };
            poll(word, fetch, [=](u64 w) { return ((u32)w & 255) == addends; });
        }
        has_input();
        UNROLLED for (int i = 0; i < PAIRS; i++)
            ((u32*)s.strip[warp][i / ACROSS])[i % ACROSS * 32 + lane] = pair(value(word[2 * i]), value(word[2 * i + 1]));
        operands(x);
        if (passes_on && n < 2 * LAYERS) {  // the stream's value is also the first addend of the next one
            u64* to = stream(n + 1) + mine;
            UNROLLED for (int i = 0; i < 2 * PAIRS; i++)
                if (passes_on >> (i % (2 * ACROSS)) & 1) add(to + offset(i / 2) + i % 2, (word[i] & ~255ull) + 1);
        }
        // The columns as a matrix of rows times themselves: its diagonal has the squares.
        float squares[2][4] = {};
        UNROLLED for (int k = 0; k < PER * ACROSS; k++) multiply(squares[k % 2], {x[k][0], 0, x[k][1], 0}, x[k]);
        if (lane / 4 < BATCH && lane % 4 == lane / 8)
            s.squares[buffer][warp][lane / 4] = lane / 4 % 2 ? squares[0][1] + squares[1][1] : squares[0][0] + squares[1][0];
    }

    // qkv, gate_up and head, which are alike but for what becomes of a row: one piece of code, for the instruction cache.
    __device__ void normed_rows(int n, int first) {
        int layer = n / 2, all = tiles_of(2 * n);
        u32 x[PER * ACROSS][2];
        read_stream(n, x);
        for (int tile = first; tile < all;) {
            int now = min(TILES, (all - tile + (int)gridDim.x - 1) / (int)gridDim.x);
            products<ACROSS>(x, now);
            finish(now, [&](int t, int sequence, int row, bool mine, float y, float squares) {
                row += (tile + t * gridDim.x) * 16;
                y *= rsqrtf(squares / HIDDEN + a.eps);
                float next = __shfl_xor_sync(~0u, y, 4);  // the next row's; of rows of gate it is up
                if (n == 2 * LAYERS) {
                    choose(row, sequence, y, mine);
                } else if (n % 2 == 0) {
                    u64* to = a.qkv + ((u64)layer % 2 * BATCH + sequence) * (QKV / 2);
                    if (mine && row % 2 == 0) store(to + row / 2, tag, pair(y, next));
                } else {
                    float gated = y / (1 + __expf(-y)) * next, another = __shfl_xor_sync(~0u, gated, 8);
                    u64* to = a.act + ((u64)layer % 2 * BATCH + sequence) * (INTER / 2);
                    if (mine && row % 4 == 0) store(to + row / 4, tag, pair(gated, another));
                }
            });
            tile += now * gridDim.x;
            if (lane < BATCH) s.squares[buffer][warp][lane] = s.squares[buffer ^ 1][warp][lane];  // for more of them
        }
    }
    __device__ void choose(u32 token, int sequence, float logit, bool mine) {
        u32 rounded = pair(0, logit) & 0xffff0000u, ordered = rounded & 0x80000000u ? ~rounded : rounded | 0x80000000u;
        if (mine) a.logits[(u64)sequence * VOCAB + token] = rounded >> 16;
        UNROLLED for (int b = 0; b < BATCH; b++)
            if (b == sequence) best[b] = max(best[b], (u64)ordered << 32 | (0xffffffffu - token));
    }

    // RMSNorm and rotary embedding of one head of the new token, or just its value; lane: columns 2 * lane and 64 on.
    __device__ void new_head(int layer, int sequence, int head, int which, bf16* keep_at) {
        u64 word[2];
        int from = which < 2 ? 2 * head + which : HEADS + (which - 2) * KV_HEADS + head;
        float weight[4], cosine[4], sine[4];
        UNROLLED for (int n = 0; n < 4; n++) {  // before it waits
            int d = 2 * lane + n % 2 + n / 2 * 64;
            weight[n] = wide(a.head_norms[(layer * 2 + which / 2 % 2) * DIM + d]);
            cosine[n] = wide(a.rope[(u64)at * 2 * DIM + d]), sine[n] = wide(a.rope[(u64)at * 2 * DIM + DIM + d]);
        }
        poll_tagged(word, [&](int n) {
            return a.qkv + (((u64)layer % 2 * BATCH + sequence) * (HEADS + 2 * KV_HEADS) + from) * (DIM / 2) + lane + 32 * n;
        });
        float v[4] = {low(word[0]), high(word[0]), low(word[1]), high(word[1])};
        if (which < 3) {
            float scale = rsqrtf(total<1, 16>(v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3]) / DIM + a.eps);
            UNROLLED for (int n = 0; n < 4; n++) v[n] *= scale * weight[n];
            float across[4] = {-v[2], -v[3], v[0], v[1]};
            UNROLLED for (int n = 0; n < 4; n++) v[n] = v[n] * cosine[n] + across[n] * sine[n];
        }
        u32 both[2] = {pair(v[0], v[1]), pair(v[2], v[3])};
        UNROLLED for (int n = 0; n < 2; n++) {
            if (keep_at) ((u32*)keep_at)[lane + 32 * n] = both[n];
            ((u32*)s.heads[which])[lane + 32 * n] = both[n];
        }
    }
    // Into the L2 cache, long before they are needed: a read from memory waits behind all weights on their way.
    __device__ void prefetch_cache(int layer) {
        if (layer == LAYERS || !item.there) return;
        for (int i = thread; i < (item.end - item.begin) * 4; i += THREADS)
            prefetch(a.caches[layer][i % 2] + item.cache + (u64)item.begin * DIM + i / 2 * 64);
    }
    __device__ void attend(int layer) {
        bf16 *keys = a.caches[layer][0] + item.cache, *values = a.caches[layer][1] + item.cache;
        int group = lane / 4, four = lane % 4, full = (item.end - item.begin + 15) / 16, tiles = full + item.newest;
        uint4 k[2][4], v[4][2];  // of the lane's tokens; of keys it takes 8 columns of each 32, of values 8 of each 64
        auto fetch = [&](int tile) {
            bool is_new = tile == full;
            const bf16* key = is_new ? s.heads[2] : keys + (u64)(item.begin + 16 * tile) * DIM;
            const bf16* val = is_new ? s.heads[3] : values + (u64)(item.begin + 16 * tile) * DIM;
            int there = is_new ? 1 : item.end - item.begin - 16 * tile;
            UNROLLED for (int n = 0; n < 8; n++) {
                int token = group + n / 4 * 8, another = 2 * four + n / 2 % 2 + n / 4 * 8;
                k[n / 4][n % 4] = v[n / 2][n % 2] = {0, 0, 0, 0};
                if (token < there) k[n / 4][n % 4] = *(const uint4*)(key + token * DIM + n % 4 * 32 + 8 * four);
                if (another < there) v[n / 2][n % 2] = *(const uint4*)(val + another * DIM + n % 2 * 64 + 8 * group);
            }
        };
        if (warp < full) fetch(warp);  // older tokens, which need not wait
        if (warp < 4) {
            bf16* keep_at = !item.newest || warp < 2 ? nullptr : (warp == 2 ? keys : values) + (u64)at * DIM;
            new_head(layer, item.sequence, item.head, warp, keep_at);
        }
        block_barrier();
        has_input();
        uint4 q[4];
        UNROLLED for (int n = 0; n < 4; n++) q[n] = group < 2 ? *(const uint4*)&s.heads[group][n * 32 + 8 * four] : uint4{0, 0, 0, 0};
        float peak[2] = {-1e30f, -1e30f}, sum[2] = {}, acc[8][4] = {};  // acc: (column, head), of lanes with four == 0
        ROLLED for (int tile = warp; tile < tiles; tile += WARPS) {
            if (tile >= WARPS || tile == full) fetch(tile);
            int there = tile == full ? 1 : item.end - item.begin - 16 * tile;
            float score[2][4] = {};  // of (token, head): where four == 0
            UNROLLED for (int n = 0; n < 4; n++) {
                multiply(score[0], {k[0][n].x, k[1][n].x, k[0][n].y, k[1][n].y}, {q[n].x, q[n].y});
                multiply(score[1], {k[0][n].z, k[1][n].z, k[0][n].w, k[1][n].w}, {q[n].z, q[n].w});
            }
            float shrink[2], p[4];
            UNROLLED for (int h = 0; h < 2; h++) {
                float a0 = group < there ? (score[0][h] + score[1][h]) * a.scaling * 1.4426950408889634f : -1e30f;
                float a1 = group + 8 < there ? (score[0][h + 2] + score[1][h + 2]) * a.scaling * 1.4426950408889634f : -1e30f;
                float higher = fmaxf(peak[h], fmaxf(a0, a1));
                UNROLLED for (int bit = 4; bit <= 16; bit *= 2) higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, bit));
                shrink[h] = exp2f(peak[h] - higher), peak[h] = higher;
                p[h] = group < there ? exp2f(a0 - higher) : 0, p[h + 2] = group + 8 < there ? exp2f(a1 - higher) : 0;
                sum[h] = sum[h] * shrink[h] + total<4, 16>(p[h] + p[h + 2]);
            }
            u32 weights[2];  // of head `group`, tokens 2 * four and the next, and those 8 further on
            UNROLLED for (int n = 0; n < 2; n++) {
                float both[2];
                UNROLLED for (int m = 0; m < 2; m++) {
                    float one = __shfl_sync(~0u, p[2 * n], 8 * four + 4 * m), other = __shfl_sync(~0u, p[2 * n + 1], 8 * four + 4 * m);
                    both[m] = group == 0 ? one : group == 1 ? other : 0;
                }
                weights[n] = pair(both[0], both[1]);
            }
            UNROLLED for (int j = 0; j < 8; j++) {
                u32 w[4];
                UNROLLED for (int n = 0; n < 4; n++) w[n] = (&v[n][j / 4].x)[j % 4];
                UNROLLED for (int n = 0; n < 4; n++) acc[j][n] *= shrink[n % 2];
                multiply(acc[j], {__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[0], w[1], 0x7632),
                                  __byte_perm(w[2], w[3], 0x5410), __byte_perm(w[2], w[3], 0x7632)}, weights);
            }
        }
        if (four == 0 && warp < tiles) {
            UNROLLED for (int n = 0; n < 16; n++) {
                int j = n / 2, h = n % 2;
                *(float2*)&s.attended[warp][h][j / 4 * 64 + 8 * group + j % 4 * 2] = {acc[j][h], acc[j][h + 2]};
            }
            if (lane == 0) s.peak[warp][0] = peak[0], s.peak[warp][1] = peak[1], s.sum[warp][0] = sum[0], s.sum[warp][1] = sum[1];
        }
        block_barrier();
        if (thread >= DIM) return;
        int h = thread / 64, active = min(WARPS, tiles);
        float higher = -1e30f, all = 0;
        float2 y = {0, 0};
        ROLLED for (int w = 0; w < active; w++) higher = fmaxf(higher, s.peak[w][h]);
        ROLLED for (int w = 0; w < active; w++) {
            float weight = exp2f(s.peak[w][h] - higher);
            float2 more = *(const float2*)&s.attended[w][h][thread % 64 * 2];
            all += weight * s.sum[w][h], y.x += weight * more.x, y.y += weight * more.y;
        }
        float over = all > 0 ? 1 / all : 0;
        u64* to = part(layer, item.sequence, item.head, item.split);
        store(to + thread, tag, pair(y.x * over, y.y * over));
        if (thread % 64 == 0) store(to + DIM + h, tag, __float_as_uint(all > 0 ? higher + log2f(all) : -1e30f));
    }
    __device__ u64* part(int layer, int sequence, int head, int split) {
        return a.parts + ((((u64)(layer % 2) * BATCH + sequence) * KV_HEADS + head) * a.splits + split) * PART;
    }

    // The warp combines the splits of its columns, the lane two columns of every second split; then it multiplies them.
    __device__ void o(int layer, int tile) {
        constexpr int MINE = 2 * DIM / WARPS, APART = 64 / MINE, SPLITS = 16;  // columns; splits that lanes share
        static_assert(MINE == 32 && PER == 4, "the warp has two operands of two tiles in each chunk");
        int head = tile / (HIDDEN / 64), h = warp * MINE / DIM;
        UNROLLED for (int b = 0; b < BATCH; b++) {
            u64 word[SPLITS / APART + 1];
            const u64* parts = part(layer, b, head, 0);
            int pair_at = warp * MINE / 2 + lane % (MINE / 2), first = lane / (MINE / 2);
            poll_tagged(word, [&](int n) {
                int split = n < SPLITS / APART ? first + n * APART : lane % SPLITS;
                return parts + min(split, a.splits - 1) * PART + (n < SPLITS / APART ? pair_at : DIM + h);
            });
            float weight = lane % SPLITS < a.splits ? __uint_as_float((u32)word[SPLITS / APART]) : -1e30f, higher = weight;
            UNROLLED for (int bit = 1; bit < SPLITS; bit *= 2) higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, bit));
            weight = exp2f(weight - higher);
            weight /= total<1, SPLITS / 2>(weight);
            float y[2] = {};
            UNROLLED for (int n = 0; n < SPLITS / APART; n++) {
                float of_split = __shfl_sync(~0u, weight, first + n * APART);
                y[0] += of_split * low((u32)word[n]), y[1] += of_split * high((u32)word[n]);
            }
            y[0] = total<MINE / 2, 16>(y[0]), y[1] = total<MINE / 2, 16>(y[1]);
            if (first == 0) ((u32*)s.strip[warp][b])[lane] = pair(y[0], y[1]);
        }
        has_input();
        u32 x[2][2];
        operands(x);
        float sums[4][4] = {};
        UNROLLED for (int c = 0; c < 2; c++) {
            uint4 weights[PER];
            take(weights);
            UNROLLED for (int i = 0; i < PER; i++) multiply(sums[2 * c + i % 2], weights[i], x[i / 2]);
        }
        UNROLLED for (int n = 0; n < 4; n++) keep(n, sums[n]);
        finish(4, [&](int n, int sequence, int row, bool mine, float y, float) {
            if (mine) add(stream(2 * layer + 1) + sequence * HIDDEN + tile % (HIDDEN / 64) * 64 + n * 16 + row, fixed(y));
        });
    }

    __device__ void down(int layer, int tile) {
        int half = tile / (HIDDEN / 16);
        constexpr int PAIRS = COLUMNS / 2, WORDS = PAIRS * HALF, EACH = (WORDS * BATCH + 31) / 32;
        u64 word[EACH];
        poll_tagged(word, [&](int n) {
            int i = min(lane + 32 * n, WORDS * BATCH - 1), b = i / WORDS, c = half * HALF + i % WORDS / PAIRS;
            return a.act + ((u64)layer % 2 * BATCH + b) * (INTER / 2) + c * (CHUNK_COLUMNS / 2) + warp * PAIRS + i % PAIRS;
        });
        has_input();
        UNROLLED for (int n = 0; n < EACH; n++)
            if (int i = lane + 32 * n; i < WORDS * BATCH) ((u32*)s.strip[warp][i / WORDS])[i % WORDS] = (u32)word[n];
        u32 x[PER * HALF][2];
        operands(x);
        products<HALF>(x, 1);
        finish(1, [&](int, int sequence, int row, bool mine, float y, float) {
            if (mine) add(stream(2 * layer + 2) + sequence * HIDDEN + tile % (HIDDEN / 16) * 16 + row, fixed(y));
        });
    }

    __device__ void consume() {
        u64 step = a.state[0];
        at = (int)*a.position;
        set = step % 2;
        constexpr u64 words = 2ull * LAYERS * BATCH * HIDDEN;
        for (u64 i = blockIdx.x * THREADS + thread; i < words; i += gridDim.x * THREADS) a.stream[(set ^ 1) * words + i] = 0;
        if (blockIdx.x < LAYERS && thread < 4) prefetch(a.head_norms + blockIdx.x * 2 * DIM + thread * 64);
        item.choose(a, blockIdx.x, at);
        prefetch_cache(0);
        int each = (HIDDEN + gridDim.x - 1) / gridDim.x;
        for (int i = 0; i < 2 * ACROSS; i++)
            passes_on |= ((i / 2 * CHUNK_COLUMNS + warp * COLUMNS + 2 * lane + i % 2) / each == blockIdx.x) << i;
        Deal deal;
        for (int n = 0;; n++) {
            int layer = n / 2;
            tag = (u32)(step * LAYERS) + layer + 1;
            deal.next(), begins(), normed_rows(n, deal.first), phase++;
            if (n == 2 * LAYERS) break;
            if (n % 2 == 0) {
                begins();
                if (item.there) attend(layer);
                phase++;
                deal.next(), begins();
                for (int tile = deal.first; tile < tiles_of(1); tile += gridDim.x) o(layer, tile);
                prefetch_cache(layer + 1);
            } else {
                deal.next(), begins();
                for (int tile = deal.first; tile < tiles_of(3); tile += gridDim.x) down(layer, tile);
            }
            phase++;
        }
        begins();
        UNROLLED for (int b = 0; b < BATCH; b++) {
            for (int bit = 1; bit < 32; bit *= 2) best[b] = max(best[b], __shfl_xor_sync(~0u, best[b], bit));
            if (lane == 0) atomicMax(a.state + 2 + b, best[b]);
        }
        // The last block to end knows the likeliest tokens, and no block reads the state any more.
        block_barrier();
        if (thread == 0) {
            __threadfence();
            if (atomicAdd(a.state + 1, 1ull) == gridDim.x - 1) {
                __threadfence();
                for (int b = 0; b < BATCH; b++)
                    a.text[(u64)b * a.room + at + 1] = min(0xffffffffu - (u32)atomicExch(a.state + 2 + b, 0ull), VOCAB - 1u);
                *a.position = at + 1;
                a.state[1] = 0;
                a.state[0]++;
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) decode_step(const __grid_constant__ Arguments arguments) {
    char* ring = shared_memory();
    Shared& s = *(Shared*)(ring + STAGES * CHUNK);
    if (threadIdx.x < STAGES) barrier_init(&s.full[threadIdx.x], 1), barrier_init(&s.empty[threadIdx.x], WARPS);
    __syncthreads();
    Block block(arguments, ring, s);
    if (threadIdx.x < THREADS) block.consume();
    else if (threadIdx.x == THREADS) block.produce();
}
