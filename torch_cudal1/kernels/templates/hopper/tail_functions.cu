// ---------------------------------------------------------------- what tails are written in

template <class T> __device__ __forceinline__ T where(bool c, T x, T y) { return c ? x : y; }
__device__ __forceinline__ float absolute(float x) { return fabsf(x); }
__device__ __forceinline__ int absolute(int x) { return x < 0 ? -x : x; }
__device__ __forceinline__ i64 absolute(i64 x) { return x < 0 ? -x : x; }
__device__ __forceinline__ float nan_max(float x, float y) { return x != x || y != y ? x + y : fmaxf(x, y); }
__device__ __forceinline__ float nan_min(float x, float y) { return x != x || y != y ? x + y : fminf(x, y); }
template <class T> __device__ __forceinline__ T nan_max(T x, T y) { return x > y ? x : y; }
template <class T> __device__ __forceinline__ T nan_min(T x, T y) { return x < y ? x : y; }

