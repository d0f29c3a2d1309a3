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
#if STREAM  // of 16 neighbours in k, 0 1 4 5 8 9 12 13 come first: a thread of packed_stream.cu has four neighbours of A
      const int row = row_of<ALONG_K>(i), half = eighth<ALONG_K>() % 2 * 8, unit = eighth<ALONG_K>() / 2 * 2;
      char* line = memory + row * 128 + half;
#pragma unroll
      for (int p = 0; p < PLANES; ++p) {
        *reinterpret_cast<uint2*>(line + p * 128 * BK * 2 + (unit ^ row % 8) * 16) = make_uint2(pair(w[p][0], w[p][1]), pair(w[p][4], w[p][5]));
        *reinterpret_cast<uint2*>(line + p * 128 * BK * 2 + ((unit + 1) ^ row % 8) * 16) =
            make_uint2(pair(w[p][2], w[p][3]), pair(w[p][6], w[p][7]));
      }
#else
      const int row = row_of<ALONG_K>(i), at = row * 128 + (eighth<ALONG_K>() ^ (row % 8)) * 16;
#pragma unroll
      for (int p = 0; p < PLANES; ++p)
        *reinterpret_cast<uint4*>(memory + p * 128 * BK * 2 + at) =
            make_uint4(pair(w[p][0], w[p][1]), pair(w[p][2], w[p][3]), pair(w[p][4], w[p][5]), pair(w[p][6], w[p][7]));
#endif
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

#if STREAM  // A is not packed
extern "C" __global__ void __launch_bounds__(256)
    MEASURE(const float* b, float4* b_facts) {
  const int block = blockIdx.x / SEGMENTS, segment = blockIdx.x % SEGMENTS;
  const i64 batch = block / BLOCKS_B;
  measure_rows<FOR_B>(b + B_OFFSET + batch * B_BATCH, b_facts + batch * SEGMENTS * N_PAD, block % BLOCKS_B, segment);
}

extern "C" __global__ void __launch_bounds__(256)
    PACK(const float* b, const float4* b_facts, u16* b_planes, int2* b_info) {
  const int parts = (CHUNKS + PACK_CHUNKS - 1) / PACK_CHUNKS, block = blockIdx.x / parts;
  const i64 batch = block / BLOCKS_B;
  pack_rows<FOR_B>(b + B_OFFSET + batch * B_BATCH, b_facts + batch * SEGMENTS * N_PAD, b_planes + batch * PLANES * CHUNKS * N_PAD * BK,
                   b_info + batch * N_PAD, block % BLOCKS_B, blockIdx.x % parts);
}
#else
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
#endif
