// ---------------------------------------------------------------- activations of results that are rounded to fp16 or bf16

// Each is within 2e-5 of itself, where half a step of fp16 is 2.4e-4, and has NaN and infinity where eager has them. The fp32 functions of the CUDA
// library are within 1e-7 and take two to three times the instructions, which a tile of products waits for.

#ifndef EMULATED
__device__ __forceinline__ float quick_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float quick_exp2(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float exp2_or_zero(float x) {  // zero below 2^-126
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

// Of exp(-|x|), which cannot overflow
__device__ __forceinline__ float sigmoid(float x) {
  const float falling = quick_exp2(-1.4426950408889634f * fabsf(x)), inverse = quick_reciprocal(1.0f + falling);
  return x < 0.0f ? falling * inverse : inverse;
}

// x times the normal distribution's integral up to x. Beyond |x| that is t P(t) exp(-x^2 / 2) with t = 1 / (1 + 0.311 |x|), P fitted to 5e-6.
__device__ __forceinline__ float gelu(float x) {
  const float t = quick_reciprocal(fmaf(0.3111269837220809f, fabsf(x), 1.0f));
  float p = fmaf(-0.07305226f, t, 0.17532476f);
  p = fmaf(fmaf(fmaf(fmaf(p, t, 0.02036695f), t, 0.1317926f), t, 0.12128486f), t, 0.12428051f);
  const float beyond = p * t * exp2_or_zero(-0.7213475204444817f * x * x);
  return x * (x > 0.0f ? 1.0f - beyond : beyond);
}

