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

#if !STREAM
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

#endif
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
__device__ __forceinline__ bool finished(float (&sum)[ACC], int2 low, int2 high, const int2* b_info, int quad) {
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

// tail(x, row, column, ...) and place(row, column); rows are counted through the batch
TAIL_DEFINITION

__device__ __forceinline__ void store(const float (&sum)[ACC], float* c, const Tile& tile, int first, int quad TAIL_PARAMETERS) {
#pragma unroll
  for (int j = 0; j < BN / 8; ++j) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int inside = tile.row + first + 8 * side, column = tile.column + 8 * j + 2 * quad;
      if (inside >= M || column >= N) continue;
#if SWAPPED  // the rows of A are the columns of C
      const INDEX row = tile.batch * (INDEX)N + column;
      c[place(row, inside)] = tail(sum[4 * j + 2 * side], row, inside TAIL_ARGUMENTS);
      if (column + 1 < N) c[place(row + 1, inside)] = tail(sum[4 * j + 2 * side + 1], row + 1, inside TAIL_ARGUMENTS);
#else
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
#endif
    }
  }
}

#if !STREAM
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
    if (any_consumer(finished(sum, __ldg(about_rows), __ldg(about_rows + 8), about_columns, quad))) {
      float* room = reinterpret_cast<float*>(memory + (ring - shared_address(memory)));
      exactly(sum, a, b, tile, room, at);
    }
    store(sum, c, tile, first, quad TAIL_ARGUMENTS);
    if (CLUSTER > 1) meet_cluster();  // nobody leaves while another block may still reach its barriers
  }
}
#endif
