// C = A B for fp32 matrices on Hopper's tensor cores: three kernels, "measure", "pack" and "multiply", specialised by -D constants.
//
// "Rows" of an operand are rows of A and columns of B. measure notes of each row its largest and least magnitudes, its squares, and whether it
// has NaN or infinity, for each segment of k. pack writes each operand as PLANES planes of 16-bit pieces (fp16 of the row scaled by a power of
// two, or bf16), cut into atoms of 8 rows x 64 of k, 1024 bytes, already in the 128-byte swizzle that wgmma reads: any layout of the operands
// costs nothing later, ragged edges become zeros, and a tile is one contiguous bulk copy, so that no tensor map is needed.
//
// multiply: one producer warp copies tiles into a ring of stages, two warpgroups of consumers run wgmma. PRODUCTS products of planes,
// the small ones first, are summed over PROMOTE * 64 of k in the tensor core's accumulator, which truncates; that partial sum is then added to
// fp32 registers, which round. A tile that has a NaN, an infinity or numbers the pieces do not hold is computed again, with plain fp32 FMA
// from A and B themselves, in the order of k.
//
// Constants: HALF (1: fp16 pieces with row scales, 0: bf16), PLANES, PRODUCTS (1, 3 or 6), BM = 128, BN (multiple of 32 up to 192; to 256 without promotion), STAGES,
// PROMOTE (0: never), GROUP, CLUSTER (blocks that share columns of B: 1 or 2); M, N, K; A_ROW, A_K, A_BATCH, A_OFFSET, A_BATCHES and the same of B: strides in elements, how many matrices there are;
// M_PAD (multiple of BM * CLUSTER), N_PAD (of BN), CHUNKS (64 of k each, a multiple of PROMOTE), SEGMENTS of SEGMENT chunks to measure, PACK_CHUNKS a
// block packs; ACC = BN / 2; PAIRS (columns 2i and 2i + 1 of C are one
// aligned float2). Words that the generator replaces: MEASURE, PACK, MULTIPLY, INDEX, WGMMA_DEFINITION, TAIL_DEFINITION, TAIL_PARAMETERS, TAIL_ARGUMENTS.

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

#if CLUSTER > 1
#define CLUSTER_DIMENSIONS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMENSIONS
#endif

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
__device__ __forceinline__ void copy_to_all(u32 to, const void* from, int bytes, u32 barrier) {  // the same place of every block of the cluster
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier), "h"((u16)((1 << CLUSTER) - 1))
               : "memory");
}
__device__ __forceinline__ void arrive_at(u32 barrier, int block) {  // the barrier of another block of the cluster
  asm volatile("{\n.reg .b32 far;\nmapa.shared::cluster.u32 far, %0, %1;\nmbarrier.arrive.release.cluster.shared::cluster.b64 _, [far];\n}" ::"r"(barrier),
               "r"(block)
               : "memory");
}
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
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

// ---------------------------------------------------------------- measure and pack: 256 threads a block of 128 rows

struct Row {  // what is known of a row: largest and least non-zero magnitude, sum of squares, and whether it has what no piece can hold
  float big, least, squares;
  bool special;
  __device__ __forceinline__ void see(float x) {
    const float size = fabsf(x);
    special |= !(size <= 3.3e38f);  // NaN, infinity, and what would round to it
    big = fmaxf(big, size);
    if (size > 0.0f) least = fminf(least, size);
    squares = fmaf(x, x, squares);
  }
  __device__ __forceinline__ void join(const float4& other) {
    big = fmaxf(big, other.x);
    least = fminf(least, other.y);
    squares += other.z;
    special |= other.w != 0.0f;
  }
  __device__ __forceinline__ float4 packed() const { return make_float4(big, least, squares, special ? 1.0f : 0.0f); }
};

#define NOTHING {0.0f, 3.4e38f, 0.0f, false}

// Each thread has 8 neighbours in k of 4 rows. Along k: 8 lanes have a row of the chunk. Across: a lane has 4 neighbouring rows, a warp 8 of k.
template <bool ALONG_K>
__device__ __forceinline__ int row_of(int i) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  return ALONG_K ? 32 * i + 4 * warp + lane / 8 : 4 * lane + i;
}
template <bool ALONG_K>
__device__ __forceinline__ int eighth() {
  return ALONG_K ? threadIdx.x % 8 : threadIdx.x / 32;
}

template <bool ALONG_K, bool VECTOR, int ROWS, i64 S_ROW, i64 S_K>
__device__ __forceinline__ void load(float (&v)[4][8], const float* base, int first, int start) {
  const int k = start + 8 * eighth<ALONG_K>();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first + row_of<ALONG_K>(i);
    if (VECTOR && ALONG_K) {
      const bool inside = row < ROWS && k < K;  // K is a multiple of 8
      const float4* from = reinterpret_cast<const float4*>(base + row * S_ROW + k);
      const float4 x = inside ? __ldg(from) : make_float4(0, 0, 0, 0), y = inside ? __ldg(from + 1) : make_float4(0, 0, 0, 0);
      v[i][0] = x.x, v[i][1] = x.y, v[i][2] = x.z, v[i][3] = x.w, v[i][4] = y.x, v[i][5] = y.y, v[i][6] = y.z, v[i][7] = y.w;
    } else if (!VECTOR) {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[i][j] = row < ROWS && k + j < K ? __ldg(base + row * S_ROW + (k + j) * S_K) : 0.0f;
    }
  }
  if (VECTOR && !ALONG_K) {
    const int row = first + row_of<ALONG_K>(0);  // ROWS is a multiple of 4
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const bool inside = row < ROWS && k + j < K;
      const float4 x = inside ? __ldg(reinterpret_cast<const float4*>(base + row + (k + j) * S_K)) : make_float4(0, 0, 0, 0);
      v[0][j] = x.x, v[1][j] = x.y, v[2][j] = x.z, v[3][j] = x.w;
    }
  }
}

template <bool ALONG_K, bool VECTOR, int ROWS, i64 S_ROW, i64 S_K, int PADDED>
__device__ __forceinline__ void measure_rows(const float* base, float4* facts, int block, int segment) {
  float4* room = reinterpret_cast<float4*>(memory);  // of each eighth of a chunk, 128 rows
  Row seen[4] = {NOTHING, NOTHING, NOTHING, NOTHING};
  float v[4][8];
  const int end = min(CHUNKS, (segment + 1) * SEGMENT);
  for (int chunk = segment * SEGMENT; chunk < end; ++chunk) {
    load<ALONG_K, VECTOR, ROWS, S_ROW, S_K>(v, base, block * 128, chunk * BK);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) seen[i].see(v[i][j]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) room[eighth<ALONG_K>() * 128 + row_of<ALONG_K>(i)] = seen[i].packed();
  __syncthreads();
  const int row = threadIdx.x;
  if (row >= 128 || block * 128 + row >= PADDED) return;
  Row all = NOTHING;
  for (int i = 0; i < 8; ++i) all.join(room[i * 128 + row]);
  facts[segment * PADDED + block * 128 + row] = all.packed();
}

__device__ __forceinline__ float power(int exponent) { return __uint_as_float((u32)(exponent + 127) << 23); }

__device__ __forceinline__ int exponent_of(const Row& row) {  // big * 2^-exponent is in [2^14, 2^15)
#if HALF
  if (row.special || row.big < 7.8e-34f) return 0;
  return (int)(__float_as_uint(row.big) >> 23) - 127 - 14;
#else
  return 0;
#endif
}

__device__ __forceinline__ int2 described(const Row& row, int exponent) {
  bool special = row.special, cut = false;
  float norm = 0.0f;
#if HALF
  special |= row.big > 0.0f && row.big < 7.8e-34f;  // 2^-110: its scale would overflow
  // with two planes a piece is cut at 2^-25: below 2^-15 of the largest that is more than fp32 itself would lose; with one 2^-14 later
  cut = row.least < row.big * (PLANES > 1 ? 3.1e-5f : 1.9e-9f);
  const bool summed = row.big > 8.9e-16f && row.big < 1.1e18f;  // elsewhere squares are too small or too large: an upper bound
  norm = row.big == 0.0f ? 0.0f : summed ? sqrtf(row.squares) * power(-exponent) : sqrtf((float)K) * 32768.0f;
#else
  special |= row.big > 0.0f && row.big < 1.0e-26f;  // third pieces would be subnormal numbers cut off
#endif
  const int flags = (cut ? INEXACT : 0) | (special ? SPECIAL : 0);
  return make_int2(flags | (exponent + EXPONENT_BIAS), __float_as_int(norm));
}

__device__ __forceinline__ float take(float x, u16& piece) {  // rounds x to a piece; what is left of x
  piece = to_piece(x);
  return x - from_piece(piece);
}

__device__ __forceinline__ u32 pair(u16 low, u16 high) { return (u32)low | (u32)high << 16; }

template <bool ALONG_K, bool VECTOR, int ROWS, i64 S_ROW, i64 S_K, int PADDED>
__device__ __forceinline__ void pack_rows(const float* base, const float4* facts, u16* planes, int2* info, int block, int part) {
  const i64 plane = (i64)CHUNKS * PADDED * BK;
  const int known = min(128, PADDED - block * 128);
  int* exponents = reinterpret_cast<int*>(memory + PLANES * 128 * BK * 2);
  if (threadIdx.x < known) {
    Row all = NOTHING;
    for (int segment = 0; segment < SEGMENTS; ++segment) all.join(facts[segment * PADDED + block * 128 + threadIdx.x]);
    exponents[threadIdx.x] = exponent_of(all);
    if (part == 0) info[block * 128 + threadIdx.x] = described(all, exponents[threadIdx.x]);
  }
  __syncthreads();
  float v[4][8], scale[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) scale[i] = row_of<ALONG_K>(i) < known ? power(-exponents[row_of<ALONG_K>(i)]) : 0.0f;
  const int end = min(CHUNKS, (part + 1) * PACK_CHUNKS);
  for (int chunk = part * PACK_CHUNKS; chunk < end; ++chunk) {
    load<ALONG_K, VECTOR, ROWS, S_ROW, S_K>(v, base, block * 128, chunk * BK);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u16 w[PLANES][8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float rest = v[i][j] * scale[i];
#pragma unroll
        for (int p = 0; p < PLANES; ++p) rest = take(rest, w[p][j]);
      }
      const int row = row_of<ALONG_K>(i), at = row * 128 + (eighth<ALONG_K>() ^ (row % 8)) * 16;
#pragma unroll
      for (int p = 0; p < PLANES; ++p)
        *reinterpret_cast<uint4*>(memory + p * 128 * BK * 2 + at) =
            make_uint4(pair(w[p][0], w[p][1]), pair(w[p][2], w[p][3]), pair(w[p][4], w[p][5]), pair(w[p][6], w[p][7]));
    }
    __syncthreads();
    u16* to = planes + ((i64)chunk * (PADDED / 8) + block * 16) * ATOM;
    for (int p = 0; p < PLANES; ++p) {
      for (int i = threadIdx.x; i < known * 8; i += 256)
        reinterpret_cast<uint4*>(to + p * plane)[i] = *reinterpret_cast<const uint4*>(memory + p * 128 * BK * 2 + i * 16);
    }
    __syncthreads();
  }
}

#define BLOCKS_A ((M_PAD + 127) / 128)
#define BLOCKS_B ((N_PAD + 127) / 128)
#define FOR_A A_K == 1, (A_K == 1 ? A_ROW % 4 == 0 && K % 8 == 0 : A_ROW == 1 && A_K % 4 == 0 && M % 4 == 0) && A_BATCH % 4 == 0 && A_OFFSET % 4 == 0, M, A_ROW, A_K, M_PAD
#define FOR_B B_K == 1, (B_K == 1 ? B_ROW % 4 == 0 && K % 8 == 0 : B_ROW == 1 && B_K % 4 == 0 && N % 4 == 0) && B_BATCH % 4 == 0 && B_OFFSET % 4 == 0, N, B_ROW, B_K, N_PAD

extern "C" __global__ void __launch_bounds__(256)
    MEASURE(const float* a, const float* b, float4* a_facts, float4* b_facts) {
  int block = blockIdx.x;
  const int segment = block % SEGMENTS;
  block /= SEGMENTS;
  if (block < A_BATCHES * BLOCKS_A) {
    const i64 batch = block / BLOCKS_A;
    measure_rows<FOR_A>(a + A_OFFSET + batch * A_BATCH, a_facts + batch * SEGMENTS * M_PAD, block % BLOCKS_A, segment);
  } else {
    block -= A_BATCHES * BLOCKS_A;
    const i64 batch = block / BLOCKS_B;
    measure_rows<FOR_B>(b + B_OFFSET + batch * B_BATCH, b_facts + batch * SEGMENTS * N_PAD, block % BLOCKS_B, segment);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    PACK(const float* a, const float* b, const float4* a_facts, const float4* b_facts, u16* a_planes, u16* b_planes, int2* a_info, int2* b_info) {
  const int parts = (CHUNKS + PACK_CHUNKS - 1) / PACK_CHUNKS;
  int block = blockIdx.x;
  const int part = block % parts;
  block /= parts;
  if (block < A_BATCHES * BLOCKS_A) {
    const i64 batch = block / BLOCKS_A;
    pack_rows<FOR_A>(a + A_OFFSET + batch * A_BATCH, a_facts + batch * SEGMENTS * M_PAD, a_planes + batch * PLANES * CHUNKS * M_PAD * BK,
                     a_info + batch * M_PAD, block % BLOCKS_A, part);
  } else {
    block -= A_BATCHES * BLOCKS_A;
    const i64 batch = block / BLOCKS_B;
    pack_rows<FOR_B>(b + B_OFFSET + batch * B_BATCH, b_facts + batch * SEGMENTS * N_PAD, b_planes + batch * PLANES * CHUNKS * N_PAD * BK,
                     b_info + batch * N_PAD, block % BLOCKS_B, part);
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
  const int high = M_PAD / BM / CLUSTER, wide = N_PAD / BN, rank = block % CLUSTER;  // a cluster has neighbouring rows of tiles
  block /= CLUSTER;
  const int batch = block / (high * wide), inside = block % (high * wide);
  const int band = inside / (GROUP * wide), rows = min(GROUP, high - band * GROUP), rest = inside % (GROUP * wide);
  return {batch, ((band * GROUP + rest % rows) * CLUSTER + rank) * BM, rest / rows * BN};
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
      const u16* columns = right + ((i64)p * CHUNKS + chunk) * N_PAD * BK;
      if (CLUSTER == 1) {
        copy(at + STAGE_A + p * BN * BK * 2, columns, BN * BK * 2, full + 8 * stage);
      } else {  // each block of the cluster brings its share of the common columns to all
        const int share = BN / CLUSTER * BK, mine = blockIdx.x % CLUSTER * share;
        copy_to_all(at + STAGE_A + p * BN * BK * 2 + mine * 2, columns + mine, share * 2, full + 8 * stage);
      }
    }
  }
}

// A warp has read a stage: told to all who write into it
__device__ __forceinline__ void release(u32 barrier, int lane) {
  if (CLUSTER == 1) {
    if (lane == 0) arrive(barrier);
  } else if (lane < CLUSTER) {
    arrive_at(barrier, lane);
  }
}

// All products of a stage, started: d is written when they are waited for
__device__ __forceinline__ void start(float (&d)[ACC], u32 ring, int stage, int group, bool first) {
  const u64 left = descriptor(ring + stage * STAGE + group * 64 * BK * 2), right = descriptor(ring + stage * STAGE + STAGE_A);
  fence_wgmma();
#pragma unroll
  for (int p = 0; p < PRODUCTS; ++p) {
#pragma unroll
    for (int k = 0; k < BK / 16; ++k)
      WGMMA(d, left + left_plane(p) * (BM * BK * 2 / 16) + 2 * k, right + right_plane(p) * (BN * BK * 2 / 16) + 2 * k, !(first && p == 0 && k == 0));
  }
  commit_wgmma();
}

// One warpgroup: 64 rows of the tile
__device__ __forceinline__ void consume(float (&sum)[ACC], u32 ring, u32 full, u32 empty, int group, int lane) {
  int stage = 0, turn = 0, before = 0;
#if PROMOTE == 0
#pragma unroll 1
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    wait(full + 8 * stage, turn & 1);
    start(sum, ring, stage, group, chunk == 0);
    if (chunk > 0) {
      wait_wgmma<1>();
      release(empty + 8 * before, lane);
    }
    before = stage;
    if (++stage == STAGES) stage = 0, ++turn;
  }
  wait_wgmma<0>();
  release(empty + 8 * before, lane);
#else
  float part[ACC];
#pragma unroll
  for (int i = 0; i < ACC; ++i) sum[i] = 0.0f;
#pragma unroll 1
  for (int chunk = 0; chunk < CHUNKS; chunk += PROMOTE) {
#pragma unroll
    for (int inner = 0; inner < PROMOTE; ++inner) {
      wait(full + 8 * stage, turn & 1);
      start(part, ring, stage, group, inner == 0);
      if (inner > 0) {
        wait_wgmma<1>();
        release(empty + 8 * before, lane);
      }
      before = stage;
      if (++stage == STAGES) stage = 0, ++turn;
    }
    wait_wgmma<0>();
    release(empty + 8 * before, lane);
#pragma unroll
    for (int i = 0; i < ACC; ++i) sum[i] += part[i];
  }
#endif
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

extern "C" __global__ void __launch_bounds__(384, 1) CLUSTER_DIMENSIONS
    MULTIPLY(const float* a, const float* b, const u16* a_planes, const u16* b_planes, const int2* a_info, const int2* b_info,
             float* c TAIL_PARAMETERS) {
  const u32 ring = (shared_address(memory) + 1023) & ~1023u;  // the swizzle is of address bits
  const u32 full = ring + STAGES * STAGE, empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      init(full + 8 * stage, 1);
      init(empty + 8 * stage, CLUSTER * CONSUMERS / 32);
    }
    publish_barriers();
  }
  __syncthreads();
  if (CLUSTER > 1) meet_cluster();
  const Tile tile = tile_of(blockIdx.x);
  if (threadIdx.x < 128) {
    fewer_registers();
    if (threadIdx.x == 0) produce(a_planes, b_planes, tile, ring, full, empty);
  } else {
    more_registers();
    const int at = threadIdx.x - 128, quad = at % 4;
    const int first = at / 128 * 64 + at % 128 / 32 * 16 + at % 32 / 4;
    float sum[ACC];
    consume(sum, ring, full, empty, at / 128, at % 32);
    const int2* about_rows = a_info + (A_BATCHES == 1 ? 0 : tile.batch) * M_PAD + tile.row + first;
    const int2* about_columns = b_info + (B_BATCHES == 1 ? 0 : tile.batch) * N_PAD + tile.column + 2 * quad;
    if (any_consumer(finished(sum, about_rows, about_columns, quad))) {
      float* room = reinterpret_cast<float*>(memory + (ring - shared_address(memory)));
      exactly(sum, a, b, tile, room, at);
    }
    store(sum, c, tile, first, quad TAIL_ARGUMENTS);
    if (CLUSTER > 1) meet_cluster();  // nobody leaves while another block may still reach its barriers
  }
}
