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

// Far below zero 1 + tanh(x) and 1 + erf(x) are 0 in float64 too, which results are compared with. So they are here: exp2_or_zero(x - 72) is 0 where
// 2^x is less than 2^-54.

// (1 + tanh(x)) / 2, the sigmoid of 2 x
__device__ __forceinline__ float tanh_gate(float x) {
  const float falling = exp2_or_zero(fmaf(-2.8853900817779268f, fabsf(x), -72.0f)) * 4.722366482869645e21f;
  const float inverse = quick_reciprocal(1.0f + falling);
  return x < 0.0f ? falling * inverse : inverse;
}

// x times the normal distribution's integral up to x. Beyond |x| that is t P(t) exp(-x^2 / 2) with t = 1 / (1 + 0.311 |x|), P fitted to 5e-6; its
// coefficients are times 2^77, and the exponential by 2^77 less.
__device__ __forceinline__ float gelu(float x) {
  const float t = quick_reciprocal(fmaf(0.3111269837220809f, fabsf(x), 1.0f));
  float p = fmaf(-1.10393454e+22f, t, 2.64943286e+22f);
  p = fmaf(fmaf(fmaf(fmaf(p, t, 3.07776647e+21f), t, 1.99159346e+22f), t, 1.83280498e+22f), t, 1.87807397e+22f);
  const float beyond = p * t * exp2_or_zero(fmaf(-0.7213475204444817f * x, x, -77.0f));
  return x * (x > 0.0f ? 1.0f - beyond : beyond);
}

