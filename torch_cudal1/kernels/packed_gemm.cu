// C = A B for fp32 matrices on Hopper's tensor cores: two kernels, "pack" and "multiply", specialised by -D constants.
//
// pack writes each operand as PLANES planes of 16-bit pieces (fp16 of the row scaled by a power of two, or bf16), cut into atoms of
// 8 rows x 64 of k, 1024 bytes, already in the 128-byte swizzle that wgmma reads: any layout of the operands costs nothing later,
// ragged edges become zeros, and a tile is one contiguous bulk copy, so that no tensor map is needed. "Rows" of an operand are rows of A and
// columns of B. For each row it notes the scale, its norm, and whether it is exact.
//
// multiply: one producer warp copies tiles into a ring of stages, two warpgroups of consumers run wgmma. PRODUCTS products of planes,
// the small ones first, are summed over PROMOTE * 64 of k in the tensor core's accumulator, which truncates; that partial sum is then added to
// fp32 registers, which round. A tile that has a NaN, an infinity or numbers the pieces do not hold is computed again, with plain fp32 FMA
// from A and B themselves, in the order of k.
//
// Constants: HALF (1: fp16 pieces with row scales, 0: bf16), PLANES, PRODUCTS (1, 3 or 6), BM = 128, BN (multiple of 32 up to 192), STAGES,
// PROMOTE, GROUP; M, N, K; A_ROW, A_K, A_BATCH, A_OFFSET, A_BATCHES and the same of B: strides in elements, how many matrices there are;
// M_PAD (multiple of BM), N_PAD (of BN), CHUNKS (64 of k each, a multiple of PROMOTE); ACC = BN / 2; PAIRS (columns 2i and 2i + 1 of C are one
// aligned float2). Words that the generator replaces: PACK, MULTIPLY, INDEX, WGMMA_DEFINITION, TAIL_DEFINITION, TAIL_PARAMETERS, TAIL_ARGUMENTS.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef long long i64;

#define BK 64
#define CONSUMERS 256
#define ATOM 512                   // 16-bit elements of 8 rows x 64 of k
#define STAGE_A (PLANES * BM * BK * 2)  // bytes
#define STAGE_B (PLANES * BN * BK * 2)
#define STAGE (STAGE_A + STAGE_B)
#define INEXACT 0x10000            // flags beside the exponent: a piece was cut off; nothing of the row may be trusted
#define SPECIAL 0x20000
#define EXPONENT_BIAS 1024

// ---------------------------------------------------------------- the machine: what tests without a GPU put something else for

#ifndef EMULATED
__device__ __forceinline__ u16 to_piece(float x) {
  u16 piece;
#if HALF
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(piece) : "f"(x));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(piece) : "f"(x));
#endif
  return piece;
}
__device__ __forceinline__ float from_piece(u16 piece) {
#if HALF
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(piece));
  return x;
#else
  return __uint_as_float((u32)piece << 16);
#endif
}
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}
__device__ __forceinline__ void copy(u32 to, const void* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }  // all consumers
__device__ __forceinline__ bool any_consumer(bool mine) {
  int found;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.s32 p, %1, 0;\nbarrier.cta.red.or.pred q, 1, 256, p;\nselp.s32 %0, 1, 0, q;\n}"
      : "=r"(found)
      : "r"((int)mine)
      : "memory");
  return found != 0;
}

__device__ __forceinline__ void fence_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }
__device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
extern __shared__ char memory[];

// WGMMA(d, a, b, add): d[ACC] (+)= 64 x 16 of a times 16 x BN of b; written by the generator for BN
WGMMA_DEFINITION
#endif

// ---------------------------------------------------------------- pack

__device__ __forceinline__ float take(float x, u16& piece) {  // rounds x to a piece; what is left of x
  piece = to_piece(x);
  return x - from_piece(piece);
}

struct Row {  // what is known of a row: largest magnitude, and whether it has what no piece can hold
  float big;
  bool special;
  __device__ __forceinline__ void see(float x) {
    float size = fabsf(x);
    special |= !(size <= 3.3e38f);  // NaN, infinity, and what would round to it
    big = fmaxf(big, size);
  }
};

template <bool VECTOR, int ROWS, i64 S_ROW, i64 S_K>
__device__ __forceinline__ void load8(float (&v)[8], const float* base, int row, int k) {
  if (VECTOR && row < ROWS && k < K) {
    const float4* from = reinterpret_cast<const float4*>(base + row * S_ROW + k);
    float4 x = __ldg(from), y = __ldg(from + 1);
    v[0] = x.x; v[1] = x.y; v[2] = x.z; v[3] = x.w; v[4] = y.x; v[5] = y.y; v[6] = y.z; v[7] = y.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = row < ROWS && k + i < K ? __ldg(base + row * S_ROW + (k + i) * S_K) : 0.0f;
}

__device__ __forceinline__ u32 pair(u16 low, u16 high) { return (u32)low | (u32)high << 16; }

// 8 neighbours in k, scaled, into 16 bytes of every plane
__device__ __forceinline__ void put8(u16* planes, i64 plane, int padded, int row, int k, float (&v)[8], float scale, float& squares, bool& cut) {
  u16 pieces[PLANES][8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float x = v[i] * scale, rest = x;
#pragma unroll
    for (int p = 0; p < PLANES; ++p) rest = take(rest, pieces[p][i]);
    squares = fmaf(x, x, squares);
#if HALF
    // with two planes: below 1/2 a piece is cut at 2^-25, more than fp32 itself would lose; with one: below 2^-14
    cut |= v[i] != 0.0f && fabsf(x) < (PLANES > 1 ? 0.5f : 6.2e-5f) && (rest != 0.0f || x == 0.0f);
#endif
  }
  i64 at = ((i64)(k / BK) * (padded / 8) + row / 8) * ATOM + (row % 8) * 64 + (((k / 8) % 8) ^ (row % 8)) * 8;
#pragma unroll
  for (int p = 0; p < PLANES; ++p) {
    const u16* w = pieces[p];
    uint4 word = make_uint4(pair(w[0], w[1]), pair(w[2], w[3]), pair(w[4], w[5]), pair(w[6], w[7]));
    *reinterpret_cast<uint4*>(planes + p * plane + at) = word;
  }
}

__device__ __forceinline__ int2 described(const Row& row, int exponent, float squares, bool cut) {
  bool special = row.special;
#if HALF
  special |= row.big > 0.0f && row.big < 7.8e-34f;  // 2^-110: its scale would overflow
#else
  special |= row.big > 0.0f && row.big < 1.0e-26f;  // third pieces would be subnormal numbers cut off
#endif
  int flags = (cut ? INEXACT : 0) | (special ? SPECIAL : 0);
  return make_int2(flags | (exponent + EXPONENT_BIAS), __float_as_int(sqrtf(squares)));
}

__device__ __forceinline__ int exponent_of(const Row& row) {  // big * 2^-exponent is in [2^14, 2^15)
#if HALF
  if (row.special || row.big < 7.8e-34f) return 0;
  return (int)(__float_as_uint(row.big) >> 23) - 127 - 14;
#else
  return 0;
#endif
}

__device__ __forceinline__ float power(int exponent) { return __uint_as_float((u32)(exponent + 127) << 23); }

// 32 rows by 1024 threads. Along k: a warp has a row. Across: a lane has a row and a warp 8 neighbours in k, so that loads coalesce.
template <bool ALONG_K, bool VECTOR, int ROWS, i64 S_ROW, i64 S_K, int PADDED>
__device__ __forceinline__ void pack_rows(const float* base, u16* planes, int2* info, int block) {
  __shared__ float big[32][33];
  __shared__ int flag[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = block * 32 + (ALONG_K ? warp : lane), start = (ALONG_K ? lane : warp) * 8;
  const i64 plane = (i64)CHUNKS * PADDED * BK;
  Row seen = {0.0f, false};
  float v[8];
  for (int k = start; k < K; k += 256) {
    load8<VECTOR, ROWS, S_ROW, S_K>(v, base, row, k);
#pragma unroll
    for (int i = 0; i < 8; ++i) seen.see(v[i]);
  }
  if (ALONG_K) {
    for (int step = 16; step; step /= 2) seen.big = fmaxf(seen.big, __shfl_xor_sync(~0u, seen.big, step));
    seen.special = __any_sync(~0u, seen.special);
  } else {
    if (warp == 0) flag[lane] = 0;
    big[warp][lane] = seen.big;
    __syncthreads();
    if (seen.special) flag[lane] = 1;
    __syncthreads();
    for (int other = 0; other < 32; ++other) seen.big = fmaxf(seen.big, big[other][lane]);
    seen.special = flag[lane] != 0;
    __syncthreads();
    if (warp == 0) flag[lane] = 0;
  }
  const int exponent = exponent_of(seen);
  const float scale = power(-exponent);
  float squares = 0.0f;
  bool cut = false;
  for (int k = start; k < CHUNKS * BK; k += 256) {
    load8<VECTOR, ROWS, S_ROW, S_K>(v, base, row, k);
    put8(planes, plane, PADDED, row, k, v, scale, squares, cut);
  }
  if (ALONG_K) {
    for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
    cut = __any_sync(~0u, cut);
    if (lane == 0) info[row] = described(seen, exponent, squares, cut);
  } else {
    __syncthreads();
    big[warp][lane] = squares;
    if (cut) flag[lane] = 1;
    __syncthreads();
    if (warp != 0) return;
    squares = 0.0f;
    for (int other = 0; other < 32; ++other) squares += big[other][lane];
    info[row] = described(seen, exponent, squares, flag[lane] != 0);
  }
}

extern "C" __global__ void __launch_bounds__(1024)
    PACK(const float* a, const float* b, u16* a_planes, u16* b_planes, int2* a_info, int2* b_info) {
  const int a_blocks = A_BATCHES * (M_PAD / 32);
  int block = blockIdx.x;
  if (block < a_blocks) {
    const int batch = block / (M_PAD / 32);
    pack_rows<A_K == 1, A_K == 1 && A_ROW % 4 == 0 && A_BATCH % 4 == 0 && A_OFFSET % 4 == 0 && K % 8 == 0, M, A_ROW, A_K, M_PAD>(
        a + A_OFFSET + batch * (i64)A_BATCH, a_planes + batch * (i64)PLANES * CHUNKS * M_PAD * BK, a_info + batch * M_PAD, block % (M_PAD / 32));
  } else {
    block -= a_blocks;
    const int batch = block / (N_PAD / 32);
    pack_rows<B_K == 1, B_K == 1 && B_ROW % 4 == 0 && B_BATCH % 4 == 0 && B_OFFSET % 4 == 0 && K % 8 == 0, N, B_ROW, B_K, N_PAD>(
        b + B_OFFSET + batch * (i64)B_BATCH, b_planes + batch * (i64)PLANES * CHUNKS * N_PAD * BK, b_info + batch * N_PAD, block % (N_PAD / 32));
  }
}

// ---------------------------------------------------------------- multiply

__device__ __forceinline__ u64 descriptor(u32 address) {  // K-major, 128-byte swizzle, 1024 bytes from one group of 8 rows to the next
  return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

// Which planes the products multiply, small ones first (functions, since a table would be module memory)
__device__ constexpr int left_plane(int p) { return PRODUCTS == 6 ? (0x001102 >> 4 * p) & 15 : PRODUCTS == 3 ? p == 0 : 0; }
__device__ constexpr int right_plane(int p) { return PRODUCTS == 6 ? (0x010120 >> 4 * p) & 15 : PRODUCTS == 3 ? p == 1 : 0; }

struct Tile {
  int batch, row, column;
};

__device__ __forceinline__ Tile tile_of(int block) {  // GROUP rows of tiles at a time, so that a wave of blocks shares operands in the L2
  const int high = M_PAD / BM, wide = N_PAD / BN;
  const int batch = block / (high * wide), inside = block % (high * wide);
  const int band = inside / (GROUP * wide), rows = min(GROUP, high - band * GROUP), rest = inside % (GROUP * wide);
  return {batch, (band * GROUP + rest % rows) * BM, rest / rows * BN};
}

__device__ __forceinline__ void produce(const u16* a_planes, const u16* b_planes, const Tile& tile, u32 ring, u32 full, u32 empty) {
  const u16* left = a_planes + (A_BATCHES == 1 ? 0 : tile.batch) * (i64)PLANES * CHUNKS * M_PAD * BK + tile.row / 8 * ATOM;
  const u16* right = b_planes + (B_BATCHES == 1 ? 0 : tile.batch) * (i64)PLANES * CHUNKS * N_PAD * BK + tile.column / 8 * ATOM;
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    const int stage = chunk % STAGES, turn = chunk / STAGES;
    if (turn > 0) wait(empty + 8 * stage, (turn - 1) & 1);
    expect(full + 8 * stage, STAGE);
    const u32 at = ring + stage * STAGE;
#pragma unroll
    for (int p = 0; p < PLANES; ++p) {
      copy(at + p * BM * BK * 2, left + ((i64)p * CHUNKS + chunk) * M_PAD * BK, BM * BK * 2, full + 8 * stage);
      copy(at + STAGE_A + p * BN * BK * 2, right + ((i64)p * CHUNKS + chunk) * N_PAD * BK, BN * BK * 2, full + 8 * stage);
    }
  }
}

// One warpgroup: 64 rows of the tile
__device__ __forceinline__ void consume(float (&sum)[ACC], u32 ring, u32 full, u32 empty, int group, bool leader) {
  float part[ACC];
#pragma unroll
  for (int i = 0; i < ACC; ++i) sum[i] = 0.0f;
  int stage = 0, turn = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < CHUNKS; chunk += PROMOTE) {
    int before = 0;
#pragma unroll
    for (int inner = 0; inner < PROMOTE; ++inner) {
      wait(full + 8 * stage, turn & 1);
      const u64 left = descriptor(ring + stage * STAGE + group * 64 * BK * 2), right = descriptor(ring + stage * STAGE + STAGE_A);
      fence_wgmma();
#pragma unroll
      for (int p = 0; p < PRODUCTS; ++p) {
#pragma unroll
        for (int k = 0; k < BK / 16; ++k)
          WGMMA(part, left + left_plane(p) * (BM * BK * 2 / 16) + 2 * k, right + right_plane(p) * (BN * BK * 2 / 16) + 2 * k,
                !(inner == 0 && p == 0 && k == 0));
      }
      commit_wgmma();
      if (inner > 0) {
        wait_wgmma<1>();
        if (leader) arrive(empty + 8 * before);
      }
      before = stage;
      if (++stage == STAGES) stage = 0, ++turn;
    }
    wait_wgmma<0>();
    if (leader) arrive(empty + 8 * before);
#pragma unroll
    for (int i = 0; i < ACC; ++i) sum[i] += part[i];
  }
}

// The same sums in plain fp32, for tiles the pieces do not hold: 16 of k at a time through shared memory
__device__ __forceinline__ void exactly(float (&sum)[ACC], const float* a, const float* b, const Tile& tile, float* room, int at) {
  const int quad = at % 4, first = at / 128 * 64 + at % 128 / 32 * 16 + at % 32 / 4;
  a += A_OFFSET + tile.batch * (i64)A_BATCH;
  b += B_OFFSET + tile.batch * (i64)B_BATCH;
  float* left = room;
  float* right = room + 16 * BM;
#pragma unroll
  for (int i = 0; i < ACC; ++i) sum[i] = 0.0f;
#pragma unroll 1
  for (int start = 0; start < K; start += 16) {
    meet();
    for (int i = at; i < 16 * BM; i += CONSUMERS) {
      const int k = A_K == 1 ? i % 16 : i / BM, row = A_K == 1 ? i / 16 : i % BM;
      left[k * BM + row] = tile.row + row < M && start + k < K ? a[(tile.row + row) * (i64)A_ROW + (start + k) * (i64)A_K] : 0.0f;
    }
    for (int i = at; i < 16 * BN; i += CONSUMERS) {
      const int k = B_K == 1 ? i % 16 : i / BN, row = B_K == 1 ? i / 16 : i % BN;
      right[k * BN + row] = tile.column + row < N && start + k < K ? b[(tile.column + row) * (i64)B_ROW + (start + k) * (i64)B_K] : 0.0f;
    }
    meet();
    const int steps = min(16, K - start);
#pragma unroll 1
    for (int k = 0; k < steps; ++k) {
      const float x = left[k * BM + first], y = left[k * BM + first + 8];
#pragma unroll
      for (int j = 0; j < BN / 8; ++j) {
        const float2 z = *reinterpret_cast<const float2*>(right + k * BN + 8 * j + 2 * quad);
        sum[4 * j] = fmaf(x, z.x, sum[4 * j]);
        sum[4 * j + 1] = fmaf(x, z.y, sum[4 * j + 1]);
        sum[4 * j + 2] = fmaf(y, z.x, sum[4 * j + 2]);
        sum[4 * j + 3] = fmaf(y, z.y, sum[4 * j + 3]);
      }
    }
  }
}

__device__ __forceinline__ float scaled(float x, int exponent) {  // x 2^exponent, without overflow on the way
  const int half = exponent / 2;
  return x * power(half) * power(exponent - half);
}

// Puts the scales back. True where the tile must be computed again: a special row, or rows whose sums are as small as what was cut off.
__device__ __forceinline__ bool finished(float (&sum)[ACC], const int2* a_info, const int2* b_info, int quad) {
  const int2 low = __ldg(a_info), high = __ldg(a_info + 8);
  bool special = (low.x | high.x) & SPECIAL;
  const bool cut_row = (low.x | high.x) & INEXACT;
  const int e_low = (low.x & 0xFFFF) - EXPONENT_BIAS, e_high = (high.x & 0xFFFF) - EXPONENT_BIAS;
  const float n_low = __int_as_float(low.y), n_high = __int_as_float(high.y);
  int in_low = 0, in_high = 0;
#pragma unroll
  for (int j = 0; j < BN / 8; ++j) {
    const int4 two = __ldg(reinterpret_cast<const int4*>(b_info + 8 * j));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int about = i ? two.z : two.x;
      special |= (about & SPECIAL) != 0;
      const int e = (about & 0xFFFF) - EXPONENT_BIAS;
      float& x = sum[4 * j + i];
      float& y = sum[4 * j + 2 + i];
#if HALF
      const float n = __int_as_float(i ? two.w : two.y);
      const bool cut = cut_row || (about & INEXACT);
      const float unit = PLANES > 1 ? 0.5f : 6.2e-5f;
      const bool live_x = cut && n > 0.0f && n_low > 0.0f, live_y = cut && n > 0.0f && n_high > 0.0f;  // a row of zeros is exact
      const bool bad_x = live_x && fabsf(x) < unit * (n_low + n), bad_y = live_y && fabsf(y) < unit * (n_high + n);
      in_low += bad_x;
      in_high += bad_y;
      const u32 same = 0x11111111u << quad;
      special |= __popc(__ballot_sync(~0u, bad_x) & same) + __popc(__ballot_sync(~0u, bad_y) & same) >= 8;
      x = scaled(x, e_low + e);
      y = scaled(y, e_high + e);
#endif
    }
  }
  return special || 3 * in_low > BN / 4 || 3 * in_high > BN / 4;
}

// ---- what tails are written in

template <class T> __device__ __forceinline__ T where(bool c, T x, T y) { return c ? x : y; }
__device__ __forceinline__ float absolute(float x) { return fabsf(x); }
__device__ __forceinline__ int absolute(int x) { return x < 0 ? -x : x; }
__device__ __forceinline__ i64 absolute(i64 x) { return x < 0 ? -x : x; }
__device__ __forceinline__ float nan_max(float x, float y) { return x != x || y != y ? x + y : fmaxf(x, y); }
__device__ __forceinline__ float nan_min(float x, float y) { return x != x || y != y ? x + y : fminf(x, y); }
template <class T> __device__ __forceinline__ T nan_max(T x, T y) { return x > y ? x : y; }
template <class T> __device__ __forceinline__ T nan_min(T x, T y) { return x < y ? x : y; }

// tail(x, row, column, ...) and place(row, column); rows are counted through the batch
TAIL_DEFINITION

__device__ __forceinline__ void store(const float (&sum)[ACC], float* c, const Tile& tile, int first, int quad TAIL_PARAMETERS) {
#pragma unroll
  for (int j = 0; j < BN / 8; ++j) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int inside = tile.row + first + 8 * side, column = tile.column + 8 * j + 2 * quad;
      if (inside >= M || column >= N) continue;
      const INDEX row = tile.batch * (INDEX)M + inside;
      const float x = tail(sum[4 * j + 2 * side], row, column TAIL_ARGUMENTS);
      if (column + 1 == N) {
        c[place(row, column)] = x;
        continue;
      }
      const float y = tail(sum[4 * j + 2 * side + 1], row, column + 1 TAIL_ARGUMENTS);
#if PAIRS
      *reinterpret_cast<float2*>(c + place(row, column)) = make_float2(x, y);
#else
      c[place(row, column)] = x;
      c[place(row, column + 1)] = y;
#endif
    }
  }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    MULTIPLY(const float* a, const float* b, const u16* a_planes, const u16* b_planes, const int2* a_info, const int2* b_info,
             float* c TAIL_PARAMETERS) {
  const u32 ring = (shared_address(memory) + 1023) & ~1023u;  // the swizzle is of address bits
  const u32 full = ring + STAGES * STAGE, empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      init(full + 8 * stage, 1);
      init(empty + 8 * stage, CONSUMERS / 32);
    }
    publish_barriers();
  }
  __syncthreads();
  const Tile tile = tile_of(blockIdx.x);
  if (threadIdx.x < 128) {
    fewer_registers();
    if (threadIdx.x == 0) produce(a_planes, b_planes, tile, ring, full, empty);
  } else {
    more_registers();
    const int at = threadIdx.x - 128, quad = at % 4;
    const int first = at / 128 * 64 + at % 128 / 32 * 16 + at % 32 / 4;
    float sum[ACC];
    consume(sum, ring, full, empty, at / 128, at % 32 == 0);
    const int2* about_rows = a_info + (A_BATCHES == 1 ? 0 : tile.batch) * M_PAD + tile.row + first;
    const int2* about_columns = b_info + (B_BATCHES == 1 ? 0 : tile.batch) * N_PAD + tile.column + 2 * quad;
    if (any_consumer(finished(sum, about_rows, about_columns, quad))) {
      float* room = reinterpret_cast<float*>(memory + (ring - shared_address(memory)));
      exactly(sum, a, b, tile, room, at);
    }
    store(sum, c, tile, first, quad TAIL_ARGUMENTS);
  }
}
