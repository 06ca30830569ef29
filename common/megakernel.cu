// One decoding step of a Qwen3 model as one persistent kernel. common/megakernel.py compiles and launches it.
//
// Plan. Each block has an SM for the whole step. CLUSTER blocks form a thread block cluster, and can write into each
// other's shared memory, which takes a fraction of the time that a way through the L2 cache takes. So each cluster
// works by itself for as long as possible. A layer has five phases, and the language model's head follows:
//
//   phase     a block's part                                 waits for                  hands on
//   qkv       its share of a kv head's 512 rows, norm        residual stream            queries, key, value
//   attend    one sequence and split of the cluster's head   qkv of its cluster         weighted values of its split
//   o         its share of rows x the cluster's head         attend of its cluster      addends of the stream
//   gate_up   its share of the cluster's units, norm         residual stream            SiLU(gate) * up
//   down      its share of rows x the cluster's units        gate_up of its cluster     addends of the stream
//   head      every so many tiles of 16 rows, norm           residual stream            logits, likeliest token
//
// Only the first KV_HEADS clusters have a head. The others have more units, which are 64 columns between gate_up and
// down each.
//
// Weights. They depend on nothing, so one warp, the producer, copies them: chunks of 16 KB, in the order in which
// this block uses them, into a ring of STAGES slots in shared memory. It waits for free slots, never for data of
// other blocks. At most WINDOW copies are on their way at a time, since every other read would wait behind them. While
// the block waits for its input, the ring fills up for the phases that follow. The host has laid the weights out so
// that all of a block's are contiguous and each thread finds its operands of mma.m16n8k16 in 16 bytes.
//
// Data between blocks of a cluster are sent by asynchronous stores. Each of them counts at a barrier of the receiver,
// which knows how many bytes come. A block sends the next layer's only after the stream's next value, which needs
// addends of every block, so nothing is overwritten that is still being read.
//
// Data between clusters. There is no grid-wide barrier. Only the residual stream is shared by all: a 64-bit word for
// each column is a sum in fixed point. Its lowest 8 bits count the addends. Integer addition has no rounding, so the
// order of the addends does not change the result. The words of the next step are set to 0 in this one: there are two
// sets. Each block of a cluster polls its share of the words until all addends are there, and sends it to the others.
// The words are read and written by relaxed operations of GPU scope on 64 bits. Such operations on the same location are
// morally strong and single-copy atomic, so sum and count never tear (PTX ISA, "Memory Consistency Model"). No other
// data are handed over through global memory before the choice of the token, so no fence is needed until then. The
// cache's new keys and values and the chosen token are read by the next launch, and a kernel sees everything that the
// kernel before it in the stream wrote.
//
// No deadlock. A block waits only for phases before its own, each block works through the phases in the same order,
// and all blocks are resident at the same time: the host asks how many clusters can be, and a cooperative launch fails
// otherwise. A block that polls the stream a few million times ends the kernel with an error.

#include "megakernel_plan.cuh"

struct Block {
    const Arguments& a;
    char* ring;
    Shared& s;
    u32 thread, warp, lane, rank;
    int cluster, units, slot = 0, turn = 0, buffer = 0, phase = 0;  // phase: 5 a layer
    int reads = 0;  // of the residual stream
    bool has_head;
    int set = 0, at = 0;
    Item item;
    u64 best[BATCH] = {};  // logit and token of the likeliest so far, as a number that is larger for a likelier one

    __device__ Block(const Arguments& a, char* ring, Shared& s)
        : a(a), ring(ring), s(s), thread(threadIdx.x), warp(threadIdx.x / 32), lane(threadIdx.x % 32),
          rank(blockIdx.x % CLUSTER), cluster(blockIdx.x / CLUSTER), units(a.units[cluster + 1] - a.units[cluster]),
          has_head(cluster < KV_HEADS) {}

    __device__ void stamp(int mark) {
#ifdef STAMPS
        if (thread == 0) a.stamps[blockIdx.x * (10 * LAYERS + 3) + mark] = nanoseconds();
#endif
    }
    __device__ void begins() { stamp(2 * phase); }      // and waits for its input
    __device__ void has_input() { stamp(2 * phase + 1); }
    __device__ u32 bytes_of(Message message) {
        return message == STREAM  ? BATCH * HIDDEN * 2
               : message == NEWEST ? BATCH * 4 * DIM * 2
               : message == PARTS  ? BATCH * SPLITS * (DIM + 2) * 4
                                   : BATCH * units * UNIT * 2;
    }
    // Waits until all bytes of a message are there, and lets the barrier expect the next layer's.
    __device__ void receive(Message message, int parity) {
        await(&s.sent[message], parity);
        if (thread == 0) expect(&s.sent[message], bytes_of(message));
    }

    __device__ void produce() {
        u64 policy = streamed();
        int each = (has_head ? ATTENTION_CHUNKS : 0) + units * UNIT_CHUNKS, of_layers = LAYERS * each;
        int before = min(cluster, KV_HEADS) * ATTENTION_CHUNKS + a.units[cluster] * UNIT_CHUNKS;
        const char* from = a.weights + (u64)LAYERS * (CLUSTER * before + rank * each) * CHUNK;
        const char* head = a.weights + (u64)LAYERS * CLUSTER * (KV_HEADS * ATTENTION_CHUNKS + INTER / UNIT * UNIT_CHUNKS) * CHUNK;
        int tiles = (VOCAB / 16 - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
        for (int i = 0; i < of_layers + tiles * ACROSS; i++) {
            if (i == of_layers) from = head + (u64)blockIdx.x * ACROSS * CHUNK;
            else if (i > of_layers && (i - of_layers) % ACROSS == 0) from += (u64)(gridDim.x - 1) * ACROSS * CHUNK;
            await(&s.empty[slot], turn ^ 1);
            if (i >= WINDOW) {  // so many copies at a time
                int landed = slot - WINDOW;
                await(&s.full[landed < 0 ? landed + STAGES : landed], landed < 0 ? turn ^ 1 : turn);
            }
            copy_chunk(ring + slot * CHUNK, from, &s.full[slot], policy);
            from += CHUNK;
            if (++slot == STAGES) slot = 0, turn ^= 1;
        }
    }

    // This warp's operands of the next chunks, N or one less.
    template <int N>
    __device__ void take(uint4 (&weights)[N * PER], bool all = true) {
        int slots[N], turns[N];
        UNROLLED for (int n = 0; n < N; n++) {
            slots[n] = slot, turns[n] = turn;
            if ((all || n < N - 1) && ++slot == STAGES) slot = 0, turn ^= 1;
        }
        UNROLLED for (int n = 0; n < N; n++)
            if (all || n < N - 1) await(&s.full[slots[n]], turns[n]);
        UNROLLED for (int n = 0; n < N; n++) {
            const uint4* mine = (const uint4*)(ring + slots[n] * CHUNK) + warp * PER * 32 + lane;
            if (all || n < N - 1)
                UNROLLED for (int i = 0; i < PER; i++) weights[n * PER + i] = mine[32 * i];
        }
        __syncwarp();
        if (lane < (all ? N : N - 1)) arrive(&s.empty[lane && N > 1 ? slots[N - 1] : slots[0]]);
    }
    // An operand: 16 columns, of which the lane has four. Each of 8 rows is a column of the product.
    __device__ void operand(u32 (&x)[2], const bf16* row, int columns, bool there) {
        uint2 four = {0, 0};
        if (there) four = *(const uint2*)(row + columns + 4 * (lane % 4));
        x[0] = four.x, x[1] = four.y;
    }
    __device__ void keep(int tile, const float (&sum)[4]) {
        if (lane % 4 * 2 < BATCH) {
            float* to = s.red[buffer][warp] + (tile * BATCH + lane % 4 * 2) * 16 + lane / 4;
            to[0] = sum[0], to[8] = sum[2];
            if (lane % 4 * 2 + 1 < BATCH) to[16] = sum[1], to[24] = sum[3];
        }
    }
    // Tiles of 16 rows; this warp multiplies its columns of each chunk. It has taken the first ones before its input came.
    __device__ void products(const u32 (&x)[PER * ACROSS][2], uint4 (&weights)[PER * TOGETHER], int tiles) {
        ROLLED for (int tile = 0; tile < tiles; tile++) {
            float sums[4][4] = {};  // four, so that a product need not wait for the one before it
            UNROLLED for (int c = 0; c < ACROSS; c += TOGETHER) {
                if (c || tile) take<TOGETHER>(weights);
                UNROLLED for (int i = 0; i < PER * TOGETHER; i++) multiply(sums[i % 4], weights[i], x[c * PER + i]);
            }
            UNROLLED for (int n = 0; n < 4; n++) sums[0][n] += sums[1][n] + (sums[2][n] + sums[3][n]);
            keep(tile, sums[0]);
        }
    }
    // Adds up what the warps kept. use(tile, sequence, row, whether it is this lane's to write, sum, sum of squares).
    template <class Use>
    __device__ void finish(int tiles, Use use) {
        block_barrier();
        for (u32 i = thread; i < (u32)tiles * BATCH * 64; i += THREADS) {
            u32 share = i % 4, row = i / 4 % 16, sequence = i / 64 % BATCH, tile = i / 64 / BATCH;
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
    // Polls this block's share of the stream's n-th value, and sends it to the cluster. Lanes that differ by 8 have the
    // same columns, and other receivers.
    __device__ void share_stream(int n) {
        constexpr int MINE = HIDDEN / CLUSTER / WARPS, ROUNDS = MINE / 16, PAIRS = BATCH * ROUNDS;
        u64 word[2 * PAIRS];
        int column = (rank * WARPS + warp) * MINE + lane % 8 * 2;
        auto offset = [](int i) { return i / ROUNDS * HIDDEN + i % ROUNDS * 16; };
        if (n == 0) {
            UNROLLED for (int i = 0; i < PAIRS; i++) {
                u64 token = a.text[(u64)(i / ROUNDS) * a.room + at];
                u32 both = *(const u32*)(a.embedding + token * HIDDEN + i % ROUNDS * 16 + column);
                word[2 * i] = fixed(low(both)), word[2 * i + 1] = fixed(high(both));
            }
        } else {
            const u64* from = stream(n) + column;
            u32 addends = (n % 2 ? KV_HEADS : gridDim.x / CLUSTER) + 1;
            for (u32 spin = 0;; spin++) {
                bool all = true;
                UNROLLED for (int i = 0; i < PAIRS; i++) load_two(from + offset(i), word[2 * i], word[2 * i + 1]);
                UNROLLED for (int i = 0; i < 2 * PAIRS; i++) all &= ((u32)word[i] & 255) == addends;
                if (__all_sync(~0u, all)) break;
                if (spin > SPINS) __trap();
            }
        }
        UNROLLED for (int i = 0; i < PAIRS; i++) {
            u32* to = (u32*)&s.stream[i / ROUNDS][i % ROUNDS * 16 + column];
            u32 both = pair(value(word[2 * i]), value(word[2 * i + 1]));
            for (int other = lane / 8; other < CLUSTER; other += 4) send(to, both, other, &s.sent[STREAM]);
        }
        // One cluster makes the stream's value also the first addend of the next one.
        if (n < 2 * LAYERS && warp % KV_HEADS == cluster && lane < 8) {
            u64* to = stream(n + 1) + column;
            UNROLLED for (int i = 0; i < 2 * PAIRS; i++) add(to + offset(i / 2) + i % 2, (word[i] & ~255ull) + 1);
        }
    }

    // qkv, gate_up and head, which are alike but for what becomes of a row: one piece of code, for the instruction cache.
    // The stream is divided by its length after the product, and the norm's weights are part of the matrix.
    __device__ void normed_rows(int n, int tiles, int first, int apart) {
        share_stream(n);
        uint4 weights[PER * TOGETHER];
        take<TOGETHER>(weights);
        receive(STREAM, reads++ % 2);
        has_input();
        u32 x[PER * ACROSS][2];
        UNROLLED for (int i = 0; i < PER * ACROSS; i++)
            operand(x[i], s.stream[lane / 4 % BATCH], i / PER * 512 + warp * COLUMNS + i % PER * 16, lane / 4 < BATCH);
        // The columns as a matrix of rows times themselves: its diagonal has the squares.
        float squares[4][4] = {};
        UNROLLED for (int i = 0; i < PER * ACROSS; i++) multiply(squares[i % 4], {x[i][0], 0, x[i][1], 0}, x[i]);
        float square = 0;
        UNROLLED for (int n = 0; n < 4; n++) square += lane / 4 % 2 ? squares[n][1] : squares[n][0];
        for (int done = 0; done < tiles; done += TILES) {
            int now = min(TILES, tiles - done);
            if (done) take<TOGETHER>(weights);
            products(x, weights, now);
            if (lane / 4 < BATCH && lane % 4 == lane / 8) s.squares[buffer][warp][lane / 4] = square;
            finish(now, [&](int tile, int sequence, int row, bool mine, float y, float squares) {
                y *= rsqrtf(squares / HIDDEN + a.eps);
                float next = __shfl_xor_sync(~0u, y, 4);  // of the row above or below; of rows of gate it is up
                float even = row % 2 ? next : y, odd = row % 2 ? y : next;
                row += (first + (done + tile) * apart) * 16;
                if (n == 2 * LAYERS) {
                    choose(row, sequence, y, mine);
                } else if (n % 2 == 0) {
                    if (lane % 8 < CLUSTER)
                        send(&s.newest[sequence][0][row / 2], pair(even, odd), lane % 8, &s.sent[NEWEST]);
                } else {
                    float gated = even / (1 + __expf(-even)) * odd, another = __shfl_xor_sync(~0u, gated, 8);
                    if (lane % 16 < CLUSTER)
                        send(&s.act[sequence][row / 4 * 2], pair(gated, another), lane % 16, &s.sent[ACT]);
                }
            });
        }
    }
    __device__ void choose(u32 token, int sequence, float logit, bool mine) {
        u32 rounded = pair(0, logit) & 0xffff0000u, ordered = rounded & 0x80000000u ? ~rounded : rounded | 0x80000000u;
        if (mine) a.logits[(u64)sequence * VOCAB + token] = rounded >> 16;
        UNROLLED for (int b = 0; b < BATCH; b++)
            if (b == sequence) best[b] = max(best[b], (u64)ordered << 32 | (0xffffffffu - token));
    }

    // RMSNorm and rotary embedding of one head of the new token, or just its value; lane: columns 2 * lane and 64 on.
    __device__ void new_head(int layer, int which, bf16* keep_at) {
        receive(NEWEST, layer % 2);
        u32 first = s.newest[item.sequence][which][lane], second = s.newest[item.sequence][which][lane + 32];
        float v[4] = {low(first), high(first), low(second), high(second)};
        if (which < 3) {
            float scale = rsqrtf(total<1, 16>(v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3]) / DIM + a.eps);
            auto column = [this](int n) { return 2 * lane + n % 2 + n / 2 * 64; };
            UNROLLED for (int n = 0; n < 4; n++) v[n] *= scale * wide(s.head_norms[which / 2][column(n)]);
            float across[4] = {-v[2], -v[3], v[0], v[1]};
            UNROLLED for (int n = 0; n < 4; n++) v[n] = v[n] * s.rope[0][column(n)] + across[n] * s.rope[1][column(n)];
        }
        u32 both[2] = {pair(v[0], v[1]), pair(v[2], v[3])};
        UNROLLED for (int n = 0; n < 2; n++) {
            if (keep_at) ((u32*)keep_at)[lane + 32 * n] = both[n];
            ((u32*)s.heads[which])[lane + 32 * n] = both[n];
        }
    }
    // What attention reads besides the new token, long before it is needed: a read from memory waits behind all weights
    // on their way. The split's first tokens go into shared memory, the others into the L2 cache.
    __device__ void fetch_cache(int layer) {
        if (layer == LAYERS || !item.there) return;
        int tokens = item.end - item.begin, mine = thread / 16, piece = thread % 16;
        const bf16 *keys = a.caches[layer][0] + item.cache, *values = a.caches[layer][1] + item.cache;
        if (thread < 2 * DIM / 8) copy_16((bf16*)s.head_norms + 8 * thread, a.head_norms + layer * 2 * DIM + 8 * thread);
        UNROLLED for (int token = mine; token < mine + AHEAD; token += 16)
            if (token < tokens) {
                copy_16(&s.keys[token][8 * key_piece(mine, piece)], keys + (item.begin + token) * DIM + 8 * piece);
                copy_16(&s.values[token][8 * value_piece(mine, piece)], values + (item.begin + token) * DIM + 8 * piece);
            }
        for (int i = AHEAD * 4 + thread; i < tokens * 4; i += THREADS)
            prefetch((i % 2 ? values : keys) + item.begin * DIM + i / 2 * 64);
    }
    // 16 bytes of a token's key or value are not where they would be in order, so that lanes read different banks.
    __device__ int key_piece(int token, int piece) { return piece ^ token % 2 * 4; }
    __device__ int value_piece(int token, int piece) { return piece ^ token / 2 % 4 * 2; }

    __device__ void attend(int layer) {
        bf16 *keys = a.caches[layer][0] + item.cache, *values = a.caches[layer][1] + item.cache;
        int group = lane / 4, four = lane % 4, tokens = item.end - item.begin, tiles = (tokens + 15) / 16;
        float scale = a.scaling * 1.4426950408889634f;  // exponents of 2
        uint4 q[4];
        float peak[2] = {-1e30f, -1e30f}, sum[2] = {}, acc[8][4] = {};  // acc: (column, head), of lanes with four == 0
        ROLLED for (int tile = warp; tile == warp || tile < tiles; tile += WARPS) {
            uint4 k[2][4], v[4][2];  // of the lane's tokens; of keys it takes 8 columns of each 32, of values 8 of each 64
            UNROLLED for (int n = 0; n < 8; n++) {
                int token = 16 * tile + n / 4 * 8 + group;
                if (tile < AHEAD / 16) k[n / 4][n % 4] = *(const uint4*)&s.keys[token][8 * key_piece(group, n % 4 * 4 + four)];
                else if (token < tokens) k[n / 4][n % 4] = *(const uint4*)(keys + (item.begin + token) * DIM + n % 4 * 32 + 8 * four);
            }
            if (tile == warp) {  // the older tokens' need not wait
                if (warp < (item.newest ? 4 : 2)) new_head(layer, warp, warp < 2 ? nullptr : (warp == 2 ? keys : values) + (u64)at * DIM);
                block_barrier();
                has_input();
                UNROLLED for (int n = 0; n < 4; n++) q[n] = group < 2 ? *(const uint4*)&s.heads[group][n * 32 + 8 * four] : uint4{0, 0, 0, 0};
            }
            if (tile >= tiles) break;
            int there = tokens - 16 * tile;
            float score[4][4] = {};  // of (token, head): where four == 0
            UNROLLED for (int n = 0; n < 4; n++) {
                multiply(score[n % 2], {k[0][n].x, k[1][n].x, k[0][n].y, k[1][n].y}, {q[n].x, q[n].y});
                multiply(score[n % 2 + 2], {k[0][n].z, k[1][n].z, k[0][n].w, k[1][n].w}, {q[n].z, q[n].w});
            }
            UNROLLED for (int n = 0; n < 4; n++) score[0][n] += score[1][n] + (score[2][n] + score[3][n]);
            UNROLLED for (int n = 0; n < 8; n++) {  // where there are no more tokens they are 0
                int token = 16 * tile + n / 4 * 8 + 2 * four + n / 2 % 2, piece = n % 2 * 8 + group;
                if (tile < AHEAD / 16) v[n / 2][n % 2] = *(const uint4*)&s.values[token][8 * value_piece(2 * four, piece)];
                else if (token < tokens) v[n / 2][n % 2] = *(const uint4*)(values + (item.begin + token) * DIM + 8 * piece);
                else v[n / 2][n % 2] = {0, 0, 0, 0};
            }
            float shrink[2], p[4];
            UNROLLED for (int h = 0; h < 2; h++) {
                float a0 = group < there ? score[0][h] * scale : -1e30f;
                float a1 = group + 8 < there ? score[0][h + 2] * scale : -1e30f;
                float higher = fmaxf(peak[h], fmaxf(a0, a1));
                UNROLLED for (int bit = 4; bit <= 16; bit *= 2) higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, bit));
                shrink[h] = exp2f(peak[h] - higher), peak[h] = higher;
                p[h] = group < there ? exp2f(a0 - higher) : 0, p[h + 2] = group + 8 < there ? exp2f(a1 - higher) : 0;
                sum[h] = sum[h] * shrink[h] + p[h] + p[h + 2];
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
                UNROLLED for (int n = 0; n < 4; n++) w[n] = word(v[n][j / 4], j % 4);
                UNROLLED for (int n = 0; n < 4; n++) acc[j][n] *= shrink[n % 2];
                multiply(acc[j], {__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[0], w[1], 0x7632),
                                  __byte_perm(w[2], w[3], 0x5410), __byte_perm(w[2], w[3], 0x7632)}, weights);
            }
        }
        UNROLLED for (int h = 0; h < 2; h++) sum[h] = total<4, 16>(sum[h]);
        if (four == 0 && warp < tiles) {
            UNROLLED for (int n = 0; n < 16; n++) {
                int j = n / 2, h = n % 2;
                *(float2*)&s.attended[warp][h][j / 4 * 64 + 8 * group + j % 4 * 2] = {acc[j][h], acc[j][h + 2]};
            }
            if (lane == 0) s.peak[warp][0] = peak[0], s.peak[warp][1] = peak[1], s.sum[warp][0] = sum[0], s.sum[warp][1] = sum[1];
        }
        if (item.newest && warp == WARPS - 1) {  // the new token
            float products[2] = {};
            UNROLLED for (int n = 0; n < 4; n++)
                UNROLLED for (int h = 0; h < 2; h++) products[h] += wide(s.heads[h][4 * lane + n]) * wide(s.heads[2][4 * lane + n]);
            UNROLLED for (int h = 0; h < 2; h++) products[h] = total<1, 16>(products[h]) * scale;
            if (lane == 0) s.newest_peak[0] = products[0], s.newest_peak[1] = products[1];
        }
        block_barrier();
        u32 at = thread % DIM, h = at / 64;
        float higher = item.newest ? s.newest_peak[h] : -1e30f, all = 0;
        float2 y = {0, 0};
        UNROLLED for (int w = 0; w < WARPS; w++)
            if (w < tiles) higher = fmaxf(higher, s.peak[w][h]);
        UNROLLED for (int w = 0; w < WARPS; w++) {
            if (w >= tiles) break;
            float weight = exp2f(s.peak[w][h] - higher);
            float2 more = *(const float2*)&s.attended[w][h][at % 64 * 2];
            all += weight * s.sum[w][h], y.x += weight * more.x, y.y += weight * more.y;
        }
        if (item.newest) {
            float weight = exp2f(s.newest_peak[h] - higher);
            u32 more = *(const u32*)&s.heads[3][at % 64 * 2];
            all += weight, y.x += weight * low(more), y.y += weight * high(more);
        }
        float over = all > 0 ? 1 / all : 0, counts = all > 0 ? higher + log2f(all) : -1e30f;
        for (int other = thread / DIM; other < CLUSTER; other += THREADS / DIM) {
            send(&s.parts[rank][at], pair(y.x * over, y.y * over), other, &s.sent[PARTS]);
            if (at % 64 == 0) send(&s.parts[rank][DIM + h], __float_as_uint(counts), other, &s.sent[PARTS]);
        }
    }

    // Rows of o and down are a warp's own: 16 of each 128.
    __device__ u64* row_at(u64* stream, int down, int sequence) {
        return stream + sequence * HIDDEN + ((rank * DOWN + down) * WARPS + warp) * 16 + lane / 4;
    }
    // Each split is a column of the product. The columns of a sequence are weighted and added up afterwards.
    __device__ void o(int layer) {
        uint4 weights[2 * PER];
        take<2>(weights);
        receive(PARTS, layer % 2);
        has_input();
        constexpr int ITEMS = BATCH * SPLITS, ACROSS_HEADS = 2 * DIM / UNIT;
        // A lane computes the share of one split in one head, and gets those of its two columns from others.
        float counts = __uint_as_float(s.parts[min((int)(lane % 8), ITEMS - 1)][DIM + lane / 8 % 2]), higher = counts;
        float share[2][2];
        UNROLLED for (int bit = 1; bit < SPLITS; bit *= 2) higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, bit));
        counts = exp2f(counts - higher);
        counts /= total<1, SPLITS / 2>(counts);
        UNROLLED for (int n = 0; n < 4; n++) share[n / 2][n % 2] = __shfl_sync(~0u, counts, n / 2 * 8 + lane % 4 * 2 + n % 2);
        ROLLED for (int down = 0; down < DOWN; down++) {
            float sums[2][2][4] = {};  // of a head, and two so that a product need not wait for the one before it
            UNROLLED for (int c = 0; c < ACROSS_HEADS; c += 2) {
                if (c || down) take<2>(weights);
                UNROLLED for (int i = 0; i < 2 * PER; i++) {
                    u32 x[2];
                    operand(x, (const bf16*)s.parts[lane / 4 % CLUSTER], c * UNIT + 16 * i, lane / 4 < ITEMS);
                    multiply(sums[c / (ACROSS_HEADS / 2)][i % 2], weights[i], x);
                }
            }
            UNROLLED for (int n = 0; n < 8; n++) sums[n / 4][0][n % 4] += sums[n / 4][1][n % 4];
            UNROLLED for (int row = 0; row < 2; row++) {
                float y[2];
                UNROLLED for (int n = 0; n < 2; n++) y[n] = share[0][n] * sums[0][0][2 * row + n] + share[1][n] * sums[1][0][2 * row + n];
                if (SPLITS > 1) y[0] = total<1, SPLITS / 4>(y[0] + y[1]);
                UNROLLED for (int n = 0; n < (SPLITS > 1 ? 1 : 2); n++) {
                    int column = 2 * (lane % 4) + n;
                    if (column % SPLITS == 0 && column / SPLITS < BATCH)
                        add(row_at(stream(2 * layer + 1), down, column / SPLITS) + 8 * row, fixed(y[n]));
                }
            }
        }
    }

    __device__ void down(int layer) {
        uint4 weights[2 * PER];
        take<2>(weights, units > 1);
        receive(ACT, layer % 2);
        has_input();
        ROLLED for (int down = 0; down < DOWN; down++) {
            float sums[4][4] = {};
            ROLLED for (int unit = 0; unit < units; unit += 2) {
                if (unit || down) take<2>(weights, unit + 1 < units);
                UNROLLED for (int i = 0; i < 2 * PER; i++) {
                    if (i == PER && unit + 1 == units) break;
                    u32 x[2];
                    operand(x, s.act[lane / 4 % BATCH], unit * UNIT + 16 * i, lane / 4 < BATCH);
                    multiply(sums[i % 4], weights[i], x);
                }
            }
            UNROLLED for (int n = 0; n < 4; n++) sums[0][n] += sums[1][n] + (sums[2][n] + sums[3][n]);
            UNROLLED for (int n = 0; n < 4; n++) {
                int sequence = 2 * (lane % 4) + n % 2;
                if (sequence < BATCH)
                    add(row_at(stream(2 * layer + 2), down, sequence) + n / 2 * 8, fixed(sums[0][n]));
            }
        }
    }

    __device__ void consume() {
        u64 step = a.state[0];
        at = (int)*a.position;
        set = step % 2;
        constexpr u64 words = 2ull * LAYERS * BATCH * HIDDEN;
        for (u64 i = blockIdx.x * THREADS + thread; i < words; i += gridDim.x * THREADS) a.stream[(set ^ 1) * words + i] = 0;
        item.choose(a, cluster, rank, at);
        s.rope[0][thread] = wide(a.rope[(u64)at * 2 * DIM + thread]);
        for (int i = (item.end - item.begin) * 64 + thread; i < AHEAD * 64; i += THREADS) ((u32*)s.values)[i] = 0;
        fetch_cache(0);
        for (int n = has_head ? 0 : 1; n <= 2 * LAYERS; n += has_head || n == 2 * LAYERS - 1 ? 1 : 2) {
            forget(thread), forget(warp), forget(lane), forget(rank);
            int layer = n / 2, tiles = units * UNIT_TILES, first = rank * tiles, apart = 1;
            phase = 5 * layer + n % 2 * 3;
            if (n == 2 * LAYERS) {
                tiles = (VOCAB / 16 - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
                first = blockIdx.x, apart = gridDim.x;
            } else if (n % 2 == 0) {
                tiles = QKV_TILES, first = rank * tiles;
                copies_landed();
            }
            begins(), normed_rows(n, tiles, first, apart);
            phase++;
            if (n == 2 * LAYERS) break;
            begins();
            if (n % 2) {
                down(layer);
            } else {
                if (item.there) attend(layer);
                else receive(NEWEST, layer % 2);
                phase++, begins(), o(layer);
                fetch_cache(layer + 1);
            }
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
    Block block(arguments, ring, s);
    if (threadIdx.x < STAGES) barrier_init(&s.full[threadIdx.x], 1), barrier_init(&s.empty[threadIdx.x], WARPS);
    if (threadIdx.x < MESSAGES) {
        barrier_init(&s.sent[threadIdx.x], 1);
        expect(&s.sent[threadIdx.x], block.bytes_of((Message)threadIdx.x));
    }
    cluster_barrier();
    if (threadIdx.x < THREADS) block.consume();
    else if (threadIdx.x == THREADS) block.produce();
}
