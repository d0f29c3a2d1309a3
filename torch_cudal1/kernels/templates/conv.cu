// Convolution of fp32 tensors as sums of small products on Hopper's tensor cores: two kernels, "pack" and "convolve", specialised by -D
// constants and by the functions that the generator writes in place of CLASS_FUNCTIONS.
//
// pack rounds the weights to TF32 and lays them out as wgmma reads them: for each block's columns, slots of KS steps of 8 x BN.
// With PRODUCTS 3 the sum has fp32's accuracy: both operands are two TF32 pieces, high and low, and of the four products the three large ones
// are taken; every PROMOTE steps the tensor core's accumulator, which truncates, is emptied into fp32 registers. An infinity has no
// low piece, and meets only the high piece of the other operand: elsewhere its high piece counts as 0, or Inf * 0 would make a NaN.
// convolve: a block has BM = TZ * TY * TX places of one image and BN columns. The input around those places (a box of BZ * BY * BX, of CB
// channels at a time) goes into shared memory once, edges become zeros, and every tap reads it there at another offset: the input
// passes the L2 once, whatever the kernel's size, and in the layout it has. The tensor core takes it from registers, rounded to TF32.
//
// "Places" q are output positions, or for a transposed convolution of stride P the positions q of the outputs P q + r of each class r: every
// class is a convolution of stride 1 with some of the taps. Classes along x are computed together (NX > 1) where that needs no made-up
// products, so that neighbours in memory are written at once; the others are blocks of their own. Beside the input a transposed convolution
// has no products, not products with zero: a sum that is NaN is taken again over what exists, so that a weight that is NaN stays where it belongs.
//
// Constants: N, GROUPS, C and OC (of a group), CB channels of a chunk (CR of them real), CHUNKS, BO (columns of a class in a block, multiple of 8), NX, BN = NX * BO, OCB blocks
// of columns; IZ, IY, IX and XS_N, XS_C, XS_Z, XS_Y of the input (1 along x); QZ, QY, QX places of a class, S_Z, S_Y, S_X input elements from one to the next;
// OZ, OY, OX outputs, P_Z, P_Y, P_X outputs from one place to the next; TZ, TY, TX; MW rows of 64 a warpgroup, GROUPS_OF_4 warpgroups, BLOCKS of an SM;
// LOW_Z, LOW_Y, LOW_X where the box begins beside the first place, BZ, BY, BX, PLANE >= BZ * BY * BX, VEC elements a copy moves; STEP_Z, STEP_Y, STEP_X
// between taps; KX taps along x, ZG taps along z and y of a slot, KS; STAGES of weights, BOXES of input; ZERO (1: a plane of zeros); weights: WS_G, WS_OC, WS_C,
// SKIPS (1: transposed), PRODUCTS (1 or 3), PROMOTE; WS_Z, WS_Y, WS_X strides, WK_Z, WK_Y, WK_X from one tap to the next; CLASSES, CLASS_Y and CLASS_X of them along y and x, SLOTS of all classes; ACC; STAGED (divides BO); PAIRS.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define THREADS (128 * GROUPS_OF_4)
#define BM (TZ * TY * TX)
#define PITCH (BM + 4)  // of staged results: fragments of 4 channels x 8 places lie in different banks
#define PLANE_OF_WEIGHTS (KS * BN * 8)  // floats; with three products: high, the same without infinities, low
#define SLOT (PRODUCTS * PLANE_OF_WEIGHTS)
#define BOX ((CR + ZERO) * PLANE)
#define TABLE (TAPS_ZY / ZG * KS * 4)  // pairs of offsets

#ifndef EMULATED
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ u32 to_tf32(float x) {
  u32 rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
  return rounded;
}
__device__ __forceinline__ void copy_some(float* to, const float* from, bool there) {  // VEC elements, or zeros
#if VEC == 4
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 4 * VEC : 0), "n"(4 * VEC) : "memory");
#endif
}
__device__ __forceinline__ void copy_16(float* to, const float* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ int computed_again(int x) {  // not kept in a register across a loop
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ void show_to_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void fence_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
extern __shared__ __align__(128) char memory[];

// MULTIPLY<WIDTH, FIRST>(d, a, b): d[FIRST ...] += 64 x 8 of a times 8 x WIDTH of b
MULTIPLY_DEFINITION
#endif

// what the taps of a class are: counts, first offset beside LOW, first index into the weights, slots before those of a class
CLASS_FUNCTIONS

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

struct Pieces {
  u32 high, finite, low;
};

__device__ __forceinline__ Pieces cut(float x) {
  if (PRODUCTS == 1) return {to_tf32(x), 0, 0};
  const u32 high = fabsf(x) < 3.4e38f ? to_tf32(x) : __float_as_uint(x) & 0xFFFFE000;  // rounding the largest numbers would make infinities
  const bool infinite = (high & 0x7FFFFFFF) == 0x7F800000;
  return {high, infinite ? 0 : high, infinite ? 0 : to_tf32(x - __uint_as_float(high))};
}

extern "C" __global__ void __launch_bounds__(256) PACK(const float* weights, float* packed) {
  const i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
  if (at >= (i64)GROUPS * OCB * SLOTS * SLOT) return;
  const int plane = (int)(at % SLOT / PLANE_OF_WEIGHTS), inside = (int)(at % PLANE_OF_WEIGHTS);
  int slot = (int)(at / SLOT % SLOTS);
  const int block = (int)(at / SLOT / SLOTS), group = block / OCB;
  int kind = 0;
#pragma unroll 1
  while (kind + 1 < CLASSES && slot >= slots_before(kind + 1)) ++kind;
  slot -= slots_before(kind);
  const int rz = kind / (CLASS_Y * CLASS_X), ry = kind / CLASS_X % CLASS_Y, many = z_count(rz) * y_count(ry) / ZG;
  const int k = inside / (BN * 8) * 8 + inside % 64 / 32 * 4 + inside % 4, n = inside % (BN * 8) / 64 * 8 + inside % 32 / 4;
  const int zy = slot % many * ZG + k / (KX * CB), c = slot / many * CB + k % CB;
  const int rx = NX > 1 ? n / BO : kind % CLASS_X, x = k / CB % KX - (NX > 1 ? x_first(rx) : 0), oc = block % OCB * BO + n % BO;
  float value = 0.0f;
  if (k < ZG * KX * CB && x >= 0 && x < x_count(rx) && oc < OC && c < C) {
    const int z = zy / y_count(ry), y = zy % y_count(ry);
    value = __ldg(weights + group * WS_G + oc * WS_OC + c * WS_C + (z_index(rz) + z * WK_Z) * WS_Z + (y_index(ry) + y * WK_Y) * WS_Y +
                  (x_index(rx) + x * WK_X) * WS_X);
  }
  const Pieces pieces = cut(value);
  packed[at] = __uint_as_float(plane == 0 ? pieces.high : plane == 1 ? pieces.finite : pieces.low);
}

struct Tile {
  int image, group, columns, kind, z, y, x;  // the first place; `columns`: which block of them
};

__device__ __forceinline__ Tile tile_of(int block) {  // blocks that read the same input are neighbours
  Tile t;
  t.columns = block % OCB, block /= OCB;
  t.kind = block % CLASSES, block /= CLASSES;
  t.x = block % ((QX + TX - 1) / TX) * TX, block /= (QX + TX - 1) / TX;
  t.y = block % ((QY + TY - 1) / TY) * TY, block /= (QY + TY - 1) / TY;
  t.z = block % ((QZ + TZ - 1) / TZ) * TZ, block /= (QZ + TZ - 1) / TZ;
  t.group = block % GROUPS, t.image = block / GROUPS;
  return t;
}

struct Fetch {  // of one slot: where from, and where to; `box` null if the input is there already
  const float *input, *weights;
  float *box, *slot;
};

__device__ __forceinline__ void fetch_input(const Fetch& f, const Tile& t, int i) {
  const int ix = i % (BX / VEC) * VEC, row = i / (BX / VEC), iy = row % BY, iz = row / BY % BZ, c = row / (BY * BZ);
  const int gz = t.z * S_Z + LOW_Z + iz, gy = t.y * S_Y + LOW_Y + iy, gx = t.x * S_X + LOW_X + ix;
  const bool there = (unsigned)gz < IZ && (unsigned)gy < IY && (unsigned)gx < IX;
  copy_some(f.box + c * PLANE + (iz * BY + iy) * BX + ix, there ? f.input + c * XS_C + gz * XS_Z + gy * XS_Y + gx : f.input, there);
}

#define INPUTS (CR * BZ * BY * (BX / VEC))  // copies of a box
#define TURNS(copies) (((copies) + THREADS - 1) / THREADS)

// The share of part S of PARTS, so that copies are started between products
template <int S, int PARTS>
__device__ __forceinline__ void fetch_part(const Fetch& f, const Tile& t) {
  if (f.slot == nullptr) return;
#pragma unroll
  for (int i = TURNS(SLOT / 4) * S / PARTS; i < TURNS(SLOT / 4) * (S + 1) / PARTS; ++i) {
    const int at = i * THREADS + threadIdx.x;
    if (SLOT / 4 % THREADS == 0 || at < SLOT / 4) copy_16(f.slot + at * 4, f.weights + at * 4);
  }
  if (f.box == nullptr) return;
#pragma unroll
  for (int i = TURNS(INPUTS) * S / PARTS; i < TURNS(INPUTS) * (S + 1) / PARTS; ++i) {
    const int at = computed_again(i * THREADS + threadIdx.x);
    if (INPUTS % THREADS == 0 || at < INPUTS) fetch_input(f, t, at);
  }
}

__device__ __forceinline__ u64 descriptor(u32 address) {  // K-major without swizzle: 128 bytes along k, 256 from one group of 8 columns to the next
  return (u64)((address & 0x3FFFF) >> 4) | (u64)(128 >> 4) << 16 | (u64)(256 >> 4) << 32;
}

// Where in the box the 8 of k of each step are, in bytes, two for each of 4 lanes; what does not exist is in the plane of zeros
__device__ __forceinline__ void write_table(int2* table, int kind) {
  const int rz = kind / (CLASS_Y * CLASS_X), ry = kind / CLASS_X % CLASS_Y, rx = kind % CLASS_X, many = y_count(ry);
  for (int i = threadIdx.x; i < TABLE; i += THREADS) {
    int found[2];
    for (int half = 0; half < 2; ++half) {
      const int k = i / 4 % KS * 8 + half * 4 + i % 4, zy = i / 4 / KS * ZG + k / (KX * CB), x = k / CB % KX, c = k % CB;
      const bool real = k < ZG * KX * CB && c < CR && zy < z_count(rz) * many && (NX > 1 || x < x_count(rx));
      const int z = many ? zy / many : 0, y = many ? zy % many : 0;
      const int at = c * PLANE + ((z_low(rz) + z * STEP_Z) * BY + y_low(ry) + y * STEP_Y) * BX + X_SHIFT + (NX > 1 ? 0 : x_low(rx)) + x * STEP_X;
      found[half] = real ? at : CR * PLANE;
    }
    table[i] = make_int2(4 * found[0], 4 * found[1]);
  }
}

typedef u32 Fragments[PRODUCTS][MW][4];  // high, low, high without infinities: what meets the planes of weights in their order
typedef float Raw[MW][4];

__device__ __forceinline__ void read_input(Raw& raw, const int (&places)[MW][2], int2 k) {  // all in bytes
#pragma unroll
  for (int i = 0; i < MW; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) raw[i][j] = *reinterpret_cast<const float*>(memory + (places[i][j % 2] + (j < 2 ? k.x : k.y)));
  }
}

__device__ __forceinline__ void cut_input(Fragments& a, const Raw& raw) {
#pragma unroll
  for (int i = 0; i < MW; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Pieces pieces = cut(raw[i][j]);
      a[0][i][j] = pieces.high;
      if (PRODUCTS == 3) a[PRODUCTS / 2][i][j] = pieces.low, a[PRODUCTS - 1][i][j] = pieces.finite;
    }
  }
}

// step<S>(sum, a, weights): which columns step S of a slot has; written by the generator
STEP_DEFINITION

__device__ __forceinline__ void clear(float (&d)[ACC]) {
#pragma unroll
  for (int i = 0; i < ACC; ++i) d[i] = 0.0f;
}

// Step S of a slot. Products of S run while those of S + 1 are cut, input of S + 2 is read, and copies of another slot are started.
template <int S>
__device__ __forceinline__ void steps(float (&sum)[ACC], float (&part)[ACC], Fragments (&a)[2], Raw (&raw)[2], int2 next, const int (&places)[MW][2],
                                      const int2* table, u64 weights, const Fetch& f, const Tile& t) {
  fence_wgmma();
#pragma unroll
  for (int p = PRODUCTS - 1; p >= 0; --p)  // small ones first
    step<S>(PRODUCTS == 1 ? sum : part, a[S % 2][p], weights + S * (BN * 32 / 16) + p * (PLANE_OF_WEIGHTS * 4 / 16));
  commit_wgmma();
  if constexpr (S + 2 < KS) read_input(raw[S % 2], places, next);
  if constexpr (S + 3 < KS) next = table[(S + 3) * 4];
  fetch_part<S, KS>(f, t);
  if (S > 0) wait_wgmma<1>();  // what step S - 1 read may be written over
  if constexpr (S + 1 < KS) cut_input(a[(S + 1) % 2], raw[(S + 1) % 2]);
  if constexpr (PRODUCTS > 1 && ((S + 1) % PROMOTE == 0 || S + 1 == KS)) {
    wait_wgmma<0>();
#pragma unroll
    for (int i = 0; i < ACC; ++i) sum[i] += part[i], part[i] = 0.0f;
  }
  if constexpr (S + 1 < KS) steps<S + 1>(sum, part, a, raw, next, places, table, weights, f, t);
}

#if SKIPS
#define OF_WEIGHTS , weights
#define WEIGHTS_PARAMETER , const float* weights
// The sum of output (z, y, x) of channel oc, over the taps that meet the input. `x` and `weights`: of the image and the group.
__device__ __noinline__ float summed_again(const float* x, const float* weights, int oc, int z, int y, int at_x) {
  const int rz = z % P_Z, ry = y % P_Y, rx = at_x % P_X;
  float sum = 0.0f;
#pragma unroll 1
  for (int c = 0; c < C; ++c)
#pragma unroll 1
    for (int i = 0; i < z_count(rz) * y_count(ry) * x_count(rx); ++i) {
      const int tx = i % x_count(rx), ty = i / x_count(rx) % y_count(ry), tz = i / x_count(rx) / y_count(ry);
      const int gz = z / P_Z + LOW_Z + z_low(rz) + tz * STEP_Z, gy = y / P_Y + LOW_Y + y_low(ry) + ty * STEP_Y;
      const int gx = at_x / P_X + LOW_X + X_SHIFT + x_low(rx) + tx * STEP_X;
      if ((unsigned)gz >= IZ || (unsigned)gy >= IY || (unsigned)gx >= IX) continue;
      sum = fmaf(__ldg(x + c * (i64)XS_C + gz * XS_Z + gy * XS_Y + gx),
                 __ldg(weights + oc * WS_OC + c * WS_C + (z_index(rz) + tz * WK_Z) * WS_Z + (y_index(ry) + ty * WK_Y) * WS_Y +
                       (x_index(rx) + tx * WK_X) * WS_X), sum);
    }
  return sum;
}
#else
#define OF_WEIGHTS
#define WEIGHTS_PARAMETER
#endif

// The sums go through shared memory, STAGED channels of all classes at a time, so that neighbouring threads write neighbouring places: rows of an
// output seldom begin at a sector of 32 bytes, and a warp that writes whole lines touches half as many of them as one that writes fragments.
__device__ __forceinline__ void store(const float (&sum)[ACC], float* room, const float* input WEIGHTS_PARAMETER, float* result,
                                      const Tile& t TAIL_PARAMETERS) {
  const int at = threadIdx.x, quad = at % 4, first = at / 128 * (64 * MW) + at % 128 / 32 * 16 + at % 32 / 4;
  const int rz = t.kind / (CLASS_Y * CLASS_X), ry = t.kind / CLASS_X % CLASS_Y, rx = t.kind % CLASS_X;
#pragma unroll
  for (int pass = 0; pass < BO / STAGED; ++pass) {
    __syncthreads();  // nobody reads the input, the weights or the pass before any more
#pragma unroll
    for (int i = 0; i < 2 * MW; ++i) {
#pragma unroll
      for (int j = 0; j < NX * STAGED / 4; ++j) {
        const int r = j / (STAGED / 4), n = j % (STAGED / 4) / 2 * 8, side = j % 2;  // class, first channel of the 8, which of two
        room[(r * STAGED + n + 2 * quad + side) * PITCH + first + i / 2 * 64 + i % 2 * 8] =
            sum[i / 2 * (BN / 2) + (r * BO + pass * STAGED + n) / 2 + i % 2 * 2 + side];
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int m = at % BM; m < BM; m += THREADS) {
      const int z = (t.z + m / (TX * TY)) * P_Z + rz, y = (t.y + m / TX % TY) * P_Y + ry, x = (t.x + m % TX) * P_X + rx;
      if (z >= OZ || y >= OY || x >= OX) continue;
      const INDEX row = (((INDEX)t.image * OZ + z) * OY + y) * OX + x;
      const int most = min(STAGED, OC - t.columns * BO - pass * STAGED);
#pragma unroll 8
      for (int inside = at / BM; inside < most; inside += (THREADS + BM - 1) / BM) {
        const int column = t.group * OC + t.columns * BO + pass * STAGED + inside;
        float made[NX];
#pragma unroll
        for (int r = 0; r < NX; ++r) {
          float whole = room[(r * STAGED + inside) * PITCH + m];
#if SKIPS
          if (whole != whole && x + r < OX) whole = summed_again(input, weights, t.columns * BO + pass * STAGED + inside, z, y, x + r);
#endif
          made[r] = x + r < OX ? tail(whole, row + r, column TAIL_ARGUMENTS) : 0.0f;
        }
#if PAIRS
        *reinterpret_cast<float2*>(result + place(row, column)) = make_float2(made[0], made[NX - 1]);
#else
#pragma unroll
        for (int r = 0; r < NX; ++r)
          if (x + r < OX) result[place(row + r, column)] = made[r];
#endif
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) CONVOLVE(const float* x, const float* packed WEIGHTS_PARAMETER, float* result TAIL_PARAMETERS) {
  int2* table = reinterpret_cast<int2*>(memory);
  float* boxes = reinterpret_cast<float*>(memory + (TABLE * 8 + 127) / 128 * 128);
  float* slots = boxes + BOXES * BOX;
  const Tile t = tile_of(blockIdx.x);
  const int rz = t.kind / (CLASS_Y * CLASS_X), ry = t.kind / CLASS_X % CLASS_Y, many = z_count(rz) * y_count(ry) / ZG;
  const int all = CHUNKS * many;
  x += t.image * (i64)XS_N + t.group * C * (i64)XS_C;
#if SKIPS
  weights += t.group * WS_G;
#endif
  packed += ((i64)(t.group * OCB + t.columns) * SLOTS + slots_before(t.kind)) * SLOT;
  write_table(table, t.kind);
  if (ZERO)
    for (int i = threadIdx.x; i < BOXES * PLANE; i += THREADS) boxes[i / PLANE * BOX + CR * PLANE + i % PLANE] = 0.0f;
  int upcoming = 0, chunk = 0, tap = 0;  // of what is fetched
  auto next_fetch = [&] {
    Fetch f = {x + chunk * CB * (i64)XS_C, packed + (i64)upcoming * SLOT, nullptr, nullptr};
    if (upcoming < all) {
      f.slot = slots + upcoming % STAGES * SLOT;
      if (tap == 0) f.box = boxes + chunk % BOXES * BOX;
      if (++tap == many) tap = 0, ++chunk;
      ++upcoming;
    }
    return f;
  };
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; ++i) {
    fetch_part<0, 1>(next_fetch(), t);
    commit_copies();
  }
  int rows[MW][2], places[MW][2];
#pragma unroll
  for (int i = 0; i < 2 * MW; ++i) {
    const int m = threadIdx.x / 128 * (64 * MW) + i / 2 * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + i % 2 * 8;
    rows[i / 2][i % 2] = 4 * ((m / (TX * TY) * S_Z * BY + m / TX % TY * S_Y) * BX + m % TX * S_X) + (TABLE * 8 + 127) / 128 * 128;
  }
  float sum[ACC], part[ACC];
  clear(sum);
  clear(part);
  int at_chunk = 0, at_tap = 0;
#pragma unroll 1
  for (int slot = 0; slot < all; ++slot) {
    wait_copies<STAGES - 2>();
    show_to_wgmma();
    __syncthreads();  // all copies of the slot are there, and everybody has left the slot before it
    const int2* entries = table + at_tap * (KS * 4) + threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2 * MW; ++i) places[i / 2][i % 2] = rows[i / 2][i % 2] + at_chunk % BOXES * (BOX * 4);
    Raw raw[2];
    Fragments a[2];
    read_input(raw[0], places, entries[0]);
    if (KS > 1) read_input(raw[1], places, entries[KS > 1 ? 4 : 0]);
    const int2 third = entries[KS > 2 ? 8 : 0];
    cut_input(a[0], raw[0]);
    steps<0>(sum, part, a, raw, third, places, entries, descriptor(shared_address(slots + slot % STAGES * SLOT)), next_fetch(), t);
    commit_copies();
    wait_wgmma<0>();
    if (++at_tap == many) at_tap = 0, ++at_chunk;
  }
  store(sum, reinterpret_cast<float*>(memory), x OF_WEIGHTS, result, t TAIL_ARGUMENTS);
}
