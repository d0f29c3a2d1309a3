// Convolution of fp32 tensors with one input channel in each group, bound by memory: one kernel, "depthwise", specialised by -D constants.
//
// LX neighbouring threads have neighbouring columns x, so that every access is of whole lines; each thread makes ROWS outputs below one
// another and reads each input row of its column once for all of them, its neighbours' columns from the L1. Taps outside the input are
// left out, not multiplied by zero: an infinite weight must not make a NaN there.
//
// Constants: UNITS = images * OC * OZ * strips * spans, OC outputs, EACH of them a group; IZ, IY, IX, XS_N, XS_C, XS_Z, XS_Y of the input (1 along x); OZ, OY, OX;
// S_Z, S_Y, S_X steps, LOW_Z, LOW_Y, LOW_X first input beside an output, STEP_Z, STEP_Y, STEP_X between taps, KZ, KY, KX; WS_OC, WS_Z, WS_Y, WS_X of the weights.

typedef unsigned int u32;
typedef long long i64;

template <class T> __device__ __forceinline__ T where(bool c, T x, T y) { return c ? x : y; }
__device__ __forceinline__ float absolute(float x) { return fabsf(x); }
__device__ __forceinline__ int absolute(int x) { return x < 0 ? -x : x; }
__device__ __forceinline__ i64 absolute(i64 x) { return x < 0 ? -x : x; }
__device__ __forceinline__ float nan_max(float x, float y) { return x != x || y != y ? x + y : fmaxf(x, y); }
__device__ __forceinline__ float nan_min(float x, float y) { return x != x || y != y ? x + y : fminf(x, y); }
template <class T> __device__ __forceinline__ T nan_max(T x, T y) { return x > y ? x : y; }
template <class T> __device__ __forceinline__ T nan_min(T x, T y) { return x < y ? x : y; }

// tail(x, row, column, ...) and place(row, column); rows are (n, z, y, x) of the output, columns its channels
TAIL_DEFINITION

#define STRIPS ((OY + ROWS - 1) / ROWS)
#define SPANS ((OX + LX - 1) / LX)
#define DEEP ((ROWS - 1) * S_Y + (KY - 1) * STEP_Y + 1)  // input rows below one another that a thread reads

extern "C" __global__ void __launch_bounds__(256) DEPTHWISE(const float* x, const float* weights, float* result TAIL_PARAMETERS) {
  i64 unit = (i64)blockIdx.x * (256 / LX) + threadIdx.x / LX;
  if (unit >= UNITS) return;
  const int ox = (int)(unit % SPANS) * LX + threadIdx.x % LX;
  unit /= SPANS;
  const int y0 = (int)(unit % STRIPS) * ROWS;
  unit /= STRIPS;
  const int oz = (int)(unit % OZ), column = (int)(unit / OZ % OC), image = (int)(unit / OZ / OC);
  if (ox >= OX) return;
  const float* plane = x + image * (i64)XS_N + column / EACH * (i64)XS_C;
  const int gx = ox * S_X + LOW_X, gy = y0 * S_Y + LOW_Y;
  float sum[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) sum[r] = 0.0f;
#pragma unroll 1
  for (int kz = 0; kz < KZ; ++kz) {
    const int gz = oz * S_Z + LOW_Z + kz * STEP_Z;
    if ((u32)gz >= IZ) continue;
    float w[KY][KX];
#pragma unroll
    for (int ky = 0; ky < KY; ++ky) {
#pragma unroll
      for (int kx = 0; kx < KX; ++kx) w[ky][kx] = __ldg(weights + column * WS_OC + kz * WS_Z + ky * WS_Y + kx * WS_X);
    }
    const float* from = plane + gz * (i64)XS_Z + gy * (i64)XS_Y + gx;
#pragma unroll
    for (int i = 0; i < DEEP; ++i) {
      const bool row_there = (u32)(gy + i) < IY;
#pragma unroll
      for (int kx = 0; kx < KX; ++kx) {
        const bool there = row_there && (u32)(gx + kx * STEP_X) < IX;
        const float value = there ? __ldg(from + i * XS_Y + kx * STEP_X) : 0.0f;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const int tap = i - r * S_Y;
          if (tap < 0 || tap % STEP_Y || tap / STEP_Y >= KY) continue;
          const float more = fmaf(value, w[tap / STEP_Y][kx], sum[r]);
          sum[r] = there ? more : sum[r];
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int oy = y0 + r;
    if (oy >= OY) break;
    const INDEX row = (((INDEX)image * OZ + oz) * OY + oy) * OX + ox;
    result[place(row, column)] = tail(sum[r], row, column TAIL_ARGUMENTS);
  }
}
