// ---------------------------------------------------------------- multiply where A is read as it lies and cut into pieces in registers
//
// Nothing of A is measured or written in pieces: its rows come into the ring as fp32, and each warpgroup cuts 64 rows x 64 of k into
// the fragments that wgmma takes from registers. The power of two that scales a row is of its 64 of k alone, and is put back when the
// partial sum leaves the tensor core. B is packed as usual, but with its k in the order in which a thread reads A: 16 bytes at a time.
//
// Needs k along A's memory, rows that begin at 16 bytes, K a multiple of 4; HALF pieces, PROMOTE 1, CLUSTER 1.

#define PITCH 320  // bytes from row to row of A in the ring: eight lanes that read 16 bytes each meet all banks
#define STAGE_RAW (BM * PITCH)
#define HUGE_BITS 0x6753C21Cu  // 1e24: above it a sum of scaled products could overflow on the way

struct Fragments {  // of 64 rows x 64 of k: pieces by plane, step of 16 and register
  u32 piece[PLANES][BK / 16][4];
  float scale[2];  // what the partial sums of rows i and i + 8 are multiplied by
};
struct Seen {  // of rows i and i + 8, over all of k
  int exponent[2];
  bool cut[2], special;
};

__device__ __forceinline__ void produce(const float* a, const u16* b_planes, const Tile& tile, u32 ring, u32 full, u32 empty, int lane) {
  const int rows = min(BM, M - tile.row);
  const float* left = a + A_OFFSET + tile.batch * (i64)A_BATCH + tile.row * (i64)A_ROW;
  const u16* right = b_planes + (B_BATCHES == 1 ? 0 : tile.batch) * (i64)PLANES * CHUNKS * N_PAD * BK + tile.column / 8 * ATOM;
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    const int stage = chunk % STAGES, turn = chunk / STAGES, width = 4 * min(BK, K - chunk * BK);
    if (turn > 0) wait(empty + 8 * stage, (turn - 1) & 1);
    const u32 at = ring + stage * STAGE_STREAM, barrier = full + 8 * stage;
    if (lane == 0) expect(barrier, STAGE_B + rows * width);
    if (lane < PLANES) copy(at + lane * BN * BK * 2, right + ((i64)lane * CHUNKS + chunk) * N_PAD * BK, BN * BK * 2, barrier);
    for (int row = lane; row < rows; row += 32) copy(at + STAGE_B + row * PITCH, left + row * (i64)A_ROW + chunk * BK, width, barrier);
  }
}

// Cuts one of the thread's two rows: 16 of its 64 k, the other three lanes of the quad have the rest
template <int WHICH>
__device__ __forceinline__ void cut_row(Fragments& out, Seen& seen, const float4* from, bool inside, int left) {
  float v[BK / 16][4];
  u32 big = 0, least = ~0u;
#pragma unroll
  for (int step = 0; step < BK / 16; ++step) {
    const bool there = inside && 16 * step < left;
    const float4 x = there ? from[4 * step] : make_float4(0, 0, 0, 0);
    v[step][0] = x.x, v[step][1] = x.y, v[step][2] = x.z, v[step][3] = x.w;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 size = __float_as_uint(v[step][i]) & 0x7FFFFFFF;
      big = size > big ? size : big;
      least = size - 1 < least ? size - 1 : least;  // of those that are not zero
    }
  }
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const u32 other = __float_as_uint(__shfl_xor_sync(~0u, __uint_as_float(big), step));
    big = other > big ? other : big;
  }
  seen.special |= big >= HUGE_BITS;  // NaN and infinity too
  seen.cut[WHICH] |= __uint_as_float(least + 1) < __uint_as_float(big) * 3.1e-5f;
  const int exponent = big == 0 ? -126 : (int)(big >> 23) - 141 < -126 ? -126 : (int)(big >> 23) - 141;  // to [2^14, 2^15)
  seen.exponent[WHICH] = exponent > seen.exponent[WHICH] ? exponent : seen.exponent[WHICH];
  const float scale = power(-exponent);
  out.scale[WHICH] = power(exponent);
#pragma unroll
  for (int step = 0; step < BK / 16; ++step) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      float x = v[step][2 * side] * scale, y = v[step][2 * side + 1] * scale;
#pragma unroll
      for (int p = 0; p < PLANES; ++p) {
        const u32 both = to_pieces(x, y);
        out.piece[p][step][2 * side + WHICH] = both;
        x -= low_piece(both), y -= high_piece(both);
      }
    }
  }
}

__device__ __forceinline__ void start(float (&d)[ACC], const Fragments& left, u32 ring, int stage) {
  const u64 right = descriptor(ring + stage * STAGE_STREAM);
  fence_wgmma();
#pragma unroll
  for (int p = 0; p < PRODUCTS; ++p) {
#pragma unroll
    for (int step = 0; step < BK / 16; ++step)
      WGMMA_HELD(d, left.piece[left_plane(p)][step], right + right_plane(p) * (BN * BK * 2 / 16) + 2 * step, !(p == 0 && step == 0));
  }
  commit_wgmma();
}

// One warpgroup: 64 rows of the tile, of which `row` is the thread's first
__device__ __forceinline__ void consume(float (&sum)[ACC], Seen& seen, u32 ring, u32 full, u32 empty, const Tile& tile, int row, int lane) {
  float part[ACC];
  Fragments left;
#pragma unroll
  for (int i = 0; i < ACC; ++i) sum[i] = 0.0f;
  const char* rows = memory + (ring - shared_address(memory)) + STAGE_B + row * PITCH + lane % 4 * 16;
  const bool low_inside = tile.row + row < M, high_inside = tile.row + row + 8 < M;
  int stage = 0, turn = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    wait(full + 8 * stage, turn & 1);
    const float4* from = reinterpret_cast<const float4*>(rows + stage * STAGE_STREAM);
    const int rest = K - chunk * BK - 4 * (lane % 4);
    cut_row<0>(left, seen, from, low_inside, rest);
    cut_row<1>(left, seen, from + 8 * PITCH / 16, high_inside, rest);
    start(part, left, ring, stage);
    wait_wgmma<0>();
    if (lane == 0) arrive(empty + 8 * stage);
#pragma unroll
    for (int i = 0; i < ACC; ++i) sum[i] = fmaf(part[i], left.scale[i / 2 % 2], sum[i]);
    if (++stage == STAGES) stage = 0, ++turn;
  }
}

// A row's facts as `finished` reads them, and its sums in units of its largest scale
template <int WHICH>
__device__ __forceinline__ int2 settled(float (&sum)[ACC], const Seen& seen) {
  const bool cut = __ballot_sync(~0u, seen.cut[WHICH]) & (15u << threadIdx.x % 32 / 4 * 4);  // of the quad's four lanes
  const float back = power(-seen.exponent[WHICH]);
#pragma unroll
  for (int i = 0; i < ACC; ++i) {
    if (i / 2 % 2 == WHICH) sum[i] *= back;
  }
  const int flags = (cut ? INEXACT : 0) | (seen.special ? SPECIAL : 0);
  const float norm = seen.exponent[WHICH] == -126 ? 0.0f : sqrtf((float)K) * 32768.0f;  // zeros, or no more than an fp32 rounding off
  return make_int2(flags | (seen.exponent[WHICH] + EXPONENT_BIAS), __float_as_int(norm));
}

extern "C" __global__ void __launch_bounds__(384, 1)
    MULTIPLY(const float* a, const float* b, const u16* b_planes, const int2* b_info, float* c TAIL_PARAMETERS) {
  const u32 ring = (shared_address(memory) + 1023) & ~1023u;  // the swizzle is of address bits
  const u32 full = ring + STAGES * STAGE_STREAM, empty = full + 8 * STAGES;
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
    if (threadIdx.x < 32) produce(a, b_planes, tile, ring, full, empty, threadIdx.x);
  } else {
    more_registers();
    const int at = threadIdx.x - 128, quad = at % 4;
    const int first = at / 128 * 64 + at % 128 / 32 * 16 + at % 32 / 4;
    float sum[ACC];
    Seen seen = {{-126, -126}, {false, false}, false};
    consume(sum, seen, ring, full, empty, tile, first, at % 32);
    const int2 low = settled<0>(sum, seen), high = settled<1>(sum, seen);
    const int2* about_columns = b_info + (B_BATCHES == 1 ? 0 : tile.batch) * N_PAD + tile.column + 2 * quad;
    if (any_consumer(finished(sum, low, high, about_columns, quad))) {
      float* room = reinterpret_cast<float*>(memory + (ring - shared_address(memory)));
      exactly(sum, a, b, tile, room, at);
    }
    store(sum, c, tile, first, quad TAIL_ARGUMENTS);
  }
}
