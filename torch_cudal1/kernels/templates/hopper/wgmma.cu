// ---------------------------------------------------------------- C = A B for fp16 or bf16 matrices that are read as they lie
//
// Behind packed_machine.cu and tail_functions.cu. Producers, a warp or a warpgroup of them, copy tiles of both operands into a ring of stages, 16 bytes a
// copy, into the 128-byte swizzle that wgmma reads; one or two warpgroups of consumers multiply, 64 rows of a tile each. A block computes
// tiles until none is left: while consumers write a tile, the ring fills for the next. Copies beyond the matrices write zeros.
//
// A may meet several right operands, each with a result and steps of its own: the query, key and value of attention in one launch. The tiles of
// their columns lie side by side; a tile is of one "part".
//
// Or two right operands make one result, as a gate and what it opens (SIDES = 2): half of a tile's columns of B are of each, so that one thread has both
// sums of an element of C, and the steps after the products get both.
//
// A copy is of eight elements along k (A_ALONG_K, B_ALONG_K: 1) or across it (0: a transposed operand of wgmma). The operand that is A may
// be the right one of the Program (SWAPPED: rows of A are columns of C): then few rows of the other one are no half-empty tile.
//
// Constants beside those of packed_machine.cu (PLANES = 1, HALF: 1 for fp16, CLUSTER = 1, STREAM = 0): BM (64 or 128), BN (multiple of 16, of 64 where B
// lies across k), PER_SM blocks of an SM, SIDES (right operands of one result: 1 or 2), COPIERS (threads that copy: 32 or 128), BLOCKS of the grid,
// TILES, HIGH and WIDE (tiles of rows and of columns), GROUP; EARLY_LINES (of 128 bytes of the weight, a thread's share, fetched before the
// kernel ahead has ended); M, K; A_ROW, A_DEPTH, A_BATCH, A_OFFSET: strides in elements. Of a part, defined before its
// text: PART (its namespace), N, RUN (so many columns of C are one aligned store: 8, 2, 1), ROUNDED (1: C is of the operands' type, 0: fp32).
// Other words in capitals are what the generator replaces; `half_precision.py` says by what.

#define THREADS (COPIERS + 2 * BM)
#define TN (BN / SIDES)  // columns of C of a tile
// Blocks of 32 columns whose operands of the steps after the product are read at once, as registers allow
#define READ_AHEAD (PER_SM == 2 && BM == 128 ? 1 : BN > 192 || SIDES == 2 ? 2 : 4)
#define ACROSS 8192  // bytes of 64 rows x 64 of k of an operand that lies across k

#ifndef EMULATED
__device__ __forceinline__ void copy_or_clear(u32 to, const u16* from, bool inside) {  // 16 bytes, or zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
__device__ __forceinline__ void arrive_when_copied(u32 barrier) {  // once all copies that this thread has started are done
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ void fetch_ahead(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
__device__ __forceinline__ void fetch_early(const void* from, bool inside) {  // a predicate, no branch: see wait_for_previous
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n@p prefetch.global.L2 [%0];\n}" ::"l"(from), "r"((u32)inside));
}
__device__ __forceinline__ void store_words(void* to, const uint4& word, bool inside) {  // no branch either, which would part the steps of one tile
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to), "r"(word.x), "r"(word.y),
               "r"(word.z), "r"(word.w), "r"((u32)inside));
}
// The next kernel's blocks may be placed from now on, and what the kernel ahead of this one writes is there afterwards. The launcher starts
// only such kernels early that touch no memory and take no branch before they wait (device/cuda/early_start.py).
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void show_to_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Of three warpgroups each has 168 a thread at the start; sums and the steps after them need more than copies.
__device__ __forceinline__ void take_producer_registers() {
#if THREADS == 384
  asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
#endif
}
__device__ __forceinline__ void take_consumer_registers() {
#if THREADS == 384
  asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
#endif
}
#endif
__device__ __forceinline__ float from_half(u16 x) { return from_piece(x); }

struct Tile {
  int batch, row, column, part;
};

// part_of(tile of columns), and first_tile_of(part)
PART_FUNCTIONS

__device__ __forceinline__ Tile tile_of(int number) {  // GROUP rows of tiles at a time, so that a wave of blocks shares operands in the L2
  const int batch = number / (HIGH * WIDE), inside = number % (HIGH * WIDE);
  const int band = inside / (GROUP * WIDE), rows = min(GROUP, HIGH - band * GROUP), rest = inside % (GROUP * WIDE);
  const int across = rest / rows, part = part_of(across);
  return {batch, (band * GROUP + rest % rows) * BM, (across - first_tile_of(part)) * TN, part};
}

// Starts the copies of 64 of k of an operand's tile: SIZE rows from `row` on, of LIMIT that there are
template <int SIZE, int LIMIT, int ROW, int DEPTH, bool ALONG_K>
__device__ __forceinline__ void fetch(u32 to, const u16* from, int row, int k, int thread) {
  constexpr bool whole = LIMIT % SIZE == 0, deep = K % BK == 0;  // no tile is at an edge
  if (ALONG_K) {  // eight neighbouring threads copy a row, 128 bytes
    constexpr int step = COPIERS / 8;
    const int piece = thread % 8, first = thread / 8;
    const bool inside = deep || k + 8 * piece < K;
    from += (row + first) * (i64)ROW + k + 8 * piece;
#pragma unroll
    for (int i = 0; i < SIZE / step; ++i) {
      const u32 place = to + (first + step * i) * 128 + (piece ^ (first + step * i) % 8) * 16;
      copy_or_clear(place, from + i * (i64)(step * ROW), inside && (whole || row + first + step * i < LIMIT));
    }
  } else {
#pragma unroll 8
    for (int i = 0; i < 8 * SIZE / COPIERS; ++i) {
      const int number = thread + COPIERS * i, piece = number % (SIZE / 8), depth = number / (SIZE / 8);
      const u32 place = to + piece / 8 * ACROSS + depth / 8 * 1024 + depth % 8 * 128 + (piece % 8 ^ depth % 8) * 16;
      copy_or_clear(place, from + (k + depth) * (i64)DEPTH + row + 8 * piece, (deep || k + depth < K) && (whole || row + 8 * piece < LIMIT));
    }
  }
}

__device__ __forceinline__ void fetch_right(u32 to, const Tile& tile, int k, int thread RIGHT_PARAMETERS) {
FETCH_RIGHT
}

// Brings lines of the weight's first tile, of SIZE rows from `row` on, into the L2, which holds whatever is written to them meanwhile. As many tiles
// as SHARERS read the same rows, and `sharer` is this one's number among them
template <int SIZE, int LIMIT, int ROW, int DEPTH, bool ALONG_K, int SHARERS>
__device__ __forceinline__ void fetch_weight(const u16* from, int row, int sharer, bool is_needed) {
  // Of 64 of k all rows, then of the next 64; or, where rows lie next to each other, of one k all rows
  constexpr int line = 64, wide = ALONG_K ? SIZE : (SIZE + line - 1) / line, lines = wide * (ALONG_K ? (K + line - 1) / line : K);
  constexpr int turns = (lines + SHARERS * THREADS - 1) / (SHARERS * THREADS);
#pragma unroll
  for (int i = 0; i < (turns < EARLY_LINES ? turns : EARLY_LINES); ++i) {
    const int number = (threadIdx.x + THREADS * i) * SHARERS + sharer, along = number % wide, depth = number / wide;
    const int inside = row + (ALONG_K ? along : along * line), k = ALONG_K ? depth * line : depth;
    fetch_early(from + inside * (i64)ROW + k * (i64)DEPTH, is_needed && number < lines && inside < LIMIT && k < K);
  }
}

__device__ __forceinline__ void fetch_first_weights(const u16* a RIGHT_PARAMETERS) {
#if EARLY_LINES > 0
  const Tile tile = tile_of(blockIdx.x);
#if SWAPPED
  fetch_weight<BM, M, A_ROW, A_DEPTH, A_ALONG_K, WIDE>(a + A_OFFSET, tile.row, tile.column / TN, true);
#else
FETCH_WEIGHTS
#endif
#endif
}

__device__ __forceinline__ void produce(const u16* a, u32 ring, u32 full, u32 empty, int thread RIGHT_PARAMETERS) {
  int stage = 0, turn = 0;
#pragma unroll 1
  for (int number = blockIdx.x; number < TILES; number += BLOCKS) {
    const Tile tile = tile_of(number);
    const u16* left = a + A_OFFSET + tile.batch * (i64)A_BATCH;
#pragma unroll 1
    for (int k = 0; k < K; k += BK) {
      if (turn > 0) wait(empty + 8 * stage, (turn - 1) & 1);
      const u32 at = ring + stage * STAGE;
      fetch<BM, M, A_ROW, A_DEPTH, A_ALONG_K>(at, left, tile.row, k, thread);
      fetch_right(at + STAGE_A, tile, k, thread RIGHT_ARGUMENTS);
      arrive_when_copied(full + 8 * stage);
      if (++stage == STAGES) stage = 0, ++turn;
    }
  }
  wait_for_copies();
}

__device__ __forceinline__ u64 descriptor(u32 address, bool along_k) {  // 128-byte swizzle; groups of 8 rows, or of 8 of k, lie 1024 bytes apart
  const u64 next = along_k ? 1 : ACROSS >> 4;  // from 64 rows to the next 64
  return (u64)((address & 0x3FFFF) >> 4) | next << 16 | (u64)64 << 32 | (u64)1 << 62;
}

// One warpgroup: 64 rows of a tile, all of k
__device__ __forceinline__ void consume(float (&sum)[ACC], u32 ring, u32 full, u32 empty, int& stage, int& turn, int group, int lane) {
  int before = 0;
#pragma unroll 1
  for (int k = 0; k < K; k += BK) {
    wait(full + 8 * stage, turn & 1);
    show_to_wgmma();  // copies of 16 bytes are writes of the generic proxy, wgmma reads by the async one
    const u64 left = descriptor(ring + stage * STAGE + group * 8192, A_ALONG_K), right = descriptor(ring + stage * STAGE + STAGE_A, B_ALONG_K);
    fence_wgmma();
#pragma unroll
    for (int step = 0; step < BK / 16; ++step)
      WGMMA(sum, left + (A_ALONG_K ? 2 : 128) * step, right + (B_ALONG_K ? 2 : 128) * step, k > 0 || step > 0);
    commit_wgmma();
    if (k > 0) {
      wait_wgmma<1>();
      if (lane == 0) arrive(empty + 8 * before);
    }
    before = stage;
    if (++stage == STAGES) stage = 0, ++turn;
  }
  wait_wgmma<0>();
  if (lane == 0) arrive(empty + 8 * before);
}

// Eight neighbours in memory, 16 or 32 bytes, as a tail reads them
struct HalfRun {
  uint4 word;
};
struct FloatRun {
  float4 low, high;
};
__device__ __forceinline__ HalfRun read_run(const u16* from) { return {__ldg(reinterpret_cast<const uint4*>(from))}; }
__device__ __forceinline__ FloatRun read_run(const float* from) {
  return {__ldg(reinterpret_cast<const float4*>(from)), __ldg(reinterpret_cast<const float4*>(from) + 1)};
}
__device__ __forceinline__ float element(const HalfRun& run, int i) {
  const u32 pair = i < 2 ? run.word.x : i < 4 ? run.word.y : i < 6 ? run.word.z : run.word.w;
  return from_half((u16)(i % 2 ? pair >> 16 : pair));
}
__device__ __forceinline__ float element(const FloatRun& run, int i) {
  const float4& half = i < 4 ? run.low : run.high;
  return i % 4 == 0 ? half.x : i % 4 == 1 ? half.y : i % 4 == 2 ? half.z : half.w;
}

__device__ __forceinline__ void store_run(u16* to, const float (&value)[8], bool inside) {
  u32 word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = (u32)to_piece(value[2 * i]) | (u32)to_piece(value[2 * i + 1]) << 16;
  store_words(to, make_uint4(word[0], word[1], word[2], word[3]), inside);
}
__device__ __forceinline__ void store_run(float* to, const float (&value)[8], bool inside) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const uint4 words = {__float_as_uint(value[i]), __float_as_uint(value[i + 1]), __float_as_uint(value[i + 2]), __float_as_uint(value[i + 3])};
    store_words(to + i, words, inside);
  }
}

// Four neighbouring lanes have one number each of four runs: afterwards each has all numbers of one run
__device__ __forceinline__ void transpose(float (&value)[4], int quad) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const float theirs = __shfl_xor_sync(~0u, quad & 1 ? value[i] : value[i + 1], 1);
    if (quad & 1) value[i] = theirs; else value[i + 1] = theirs;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float theirs = __shfl_xor_sync(~0u, quad & 2 ? value[i] : value[i + 2], 2);
    if (quad & 2) value[i] = theirs; else value[i + 2] = theirs;
  }
}

// Eight neighbouring columns of a row, of which a thread has two numbers and its three neighbours the rest
__device__ __forceinline__ void collect_run(float (&run)[8], const float (&sum)[ACC], int at, int quad) {
  float low[4], high[4];  // columns 2 i and 2 i + 1
#pragma unroll
  for (int j = 0; j < 4; ++j) low[j] = sum[at + 4 * j], high[j] = sum[at + 4 * j + 1];
  transpose(low, quad);
  transpose(high, quad);
#pragma unroll
  for (int i = 0; i < 4; ++i) run[2 * i] = low[i], run[2 * i + 1] = high[i];
}

#if SIDES == 2
#define SECOND(sums) , sums
#else
#define SECOND(sums)
#endif

// PART BEGINS
namespace PART {
#if ROUNDED
typedef u16 Result;
#else
typedef float Result;
#endif

// tail(x, row, column, ...), place(row, column), and of eight columns what they read: tail_ahead(row, column, ...) fetches it, tail_read(row, column, ...)
// reads it into a TailRead, and tail_run(x, read, row, column, ...) works on it; rows are counted through the batch. With two sides tails take the
// second sums behind the first
TAIL_DEFINITION

__device__ __forceinline__ Result rounded(float x) {
#if ROUNDED
  return to_piece(x);
#else
  return x;
#endif
}

__device__ __forceinline__ bool is_outside(int row, int column) {  // N is a multiple of a run
  return (M % BM && row >= M) || (N % TN && column >= N);
}

// Brings what the tail of a tile reads into the L2 while the tile is multiplied: a residual would be waited for once a run
__device__ __forceinline__ void look_ahead(const Tile& tile, int first, int quad TAIL_PARAMETERS) {
#if RUN == 8 && !SWAPPED && TN % 32 == 0
#pragma unroll
  for (int block = 0; block < TN / 32; ++block) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int inside = tile.row + first + 8 * side, column = tile.column + 32 * block + 8 * quad;
      if (!is_outside(inside, column)) tail_ahead(tile.batch * (INDEX)M + inside, column TAIL_ARGUMENTS);
    }
  }
#endif
}

__device__ __forceinline__ void store(const float (&sum)[ACC], Result* c, const Tile& tile, int first, int quad TAIL_PARAMETERS) {
#if RUN == 8 && !SWAPPED && TN % 32 == 0
#pragma unroll
  for (int start = 0; start < TN / 32; start += READ_AHEAD) {
    // All reads of so many blocks of columns are on their way before the first is waited for
    TailRead read[READ_AHEAD][2];
#pragma unroll
    for (int i = 0; i < READ_AHEAD && start + i < TN / 32; ++i) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {  // outside C, what lies at its edge
        const int inside = tile.row + first + 8 * side, column = tile.column + 32 * (start + i) + 8 * quad;
        read[i][side] = tail_read(tile.batch * (INDEX)M + (M % BM ? min(inside, M - 1) : inside), N % TN ? min(column, N - 8) : column TAIL_ARGUMENTS);
      }
    }
#pragma unroll
    for (int i = 0; i < READ_AHEAD && start + i < TN / 32; ++i) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int block = start + i, column = tile.column + 32 * block + 8 * quad, inside = tile.row + first + 8 * side;
        const INDEX row = tile.batch * (INDEX)M + inside;
        float value[8];
        collect_run(value, sum, 4 * 4 * block + 2 * side, quad);
#if SIDES == 2
        float second[8];
        collect_run(second, sum, ACC / 2 + 4 * 4 * block + 2 * side, quad);
#endif
        tail_run(value SECOND(second), read[i][side], row, column TAIL_ARGUMENTS);
        store_run(c + place(row, column), value, !is_outside(inside, column));
      }
    }
  }
#else
#pragma unroll
  for (int j = 0; j < TN / 8; ++j) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int inside = tile.row + first + 8 * side, column = tile.column + 8 * j + 2 * quad;
      if (inside >= M || column >= N) continue;
      const int at = 4 * j + 2 * side;
      const float x = sum[at], y = sum[at + 1];
#if SWAPPED
      const INDEX row = tile.batch * (INDEX)N + column;
      c[place(row, inside)] = rounded(tail(x, row, inside TAIL_ARGUMENTS));
      if (column + 1 < N) c[place(row + 1, inside)] = rounded(tail(y, row + 1, inside TAIL_ARGUMENTS));
#else
      const INDEX row = tile.batch * (INDEX)M + inside;
      const Result low = rounded(tail(x SECOND(sum[ACC / 2 + at]), row, column TAIL_ARGUMENTS));
      if (column + 1 == N) {
        c[place(row, column)] = low;
        continue;
      }
      const Result high = rounded(tail(y SECOND(sum[ACC / 2 + at + 1]), row, column + 1 TAIL_ARGUMENTS));
#if RUN > 1 && ROUNDED
      *reinterpret_cast<u32*>(c + place(row, column)) = (u32)low | (u32)high << 16;
#elif RUN > 1
      *reinterpret_cast<float2*>(c + place(row, column)) = make_float2(low, high);
#else
      c[place(row, column)] = low;
      c[place(row, column + 1)] = high;
#endif
#endif
    }
  }
#endif
}

}  // namespace PART
// PART ENDS

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) MULTIPLY(const u16* a RIGHT_PARAMETERS RESULT_PARAMETERS ALL_PARAMETERS) {
  fetch_first_weights(a RIGHT_ARGUMENTS);
  let_next_start();
  wait_for_previous();
  const u32 ring = (shared_address(memory) + 1023) & ~1023u;  // the swizzle is of address bits
  const u32 full = ring + STAGES * STAGE, empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      init(full + 8 * stage, COPIERS);  // threads that copy
      init(empty + 8 * stage, BM / 16);  // warps of consumers
    }
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x >= 2 * BM) {
    take_producer_registers();
    produce(a, ring, full, empty, threadIdx.x - 2 * BM RIGHT_ARGUMENTS);
  } else {  // the first warps: a warpgroup begins at a multiple of four
    take_consumer_registers();
    const int at = threadIdx.x, quad = at % 4;
    const int first = at / 128 * 64 + at % 128 / 32 * 16 + at % 32 / 4;
    int stage = 0, turn = 0;
    float sum[ACC];
#pragma unroll 1
    for (int number = blockIdx.x; number < TILES; number += BLOCKS) {
      const Tile tile = tile_of(number);
LOOK_AHEAD
      consume(sum, ring, full, empty, stage, turn, at / 128, at % 32);
STORE_PARTS
    }
  }
}
