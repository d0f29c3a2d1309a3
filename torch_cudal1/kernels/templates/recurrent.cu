// Layers of LSTM, GRU or plain RNN whose recurrent weights stay in registers, for small batches in fp32: kernels "clear" and "recur",
// specialised by -D constants.
//
// A cluster of eight blocks is one of two things. One that recurs has a layer (and direction): each of its blocks holds UNITS hidden units, the
// rows of their gates in registers, and in shared memory the whole hidden state, which the blocks hand each other after every step. One
// that projects multiplies what the layer reads by its input weights, a step at a time, ahead of who recurs. So layers run behind each other as
// a wave: while layer 1 is at step t, layer 0 is at t + 1 or further. Blocks tell each other by flags in memory that a step is there; whoever
// waits, waits for a cluster with a lower number only, which was started before: however few run at once, none waits for ever.
//
// A thread multiplies two rows (one, where a row is long) by the eighth part of the vector that its lane has (lane % 8), for every sequence of
// the batch; the eight parts are summed by exchanging halves. The last warp multiplies nothing: it starts to copy what later steps read, and
// tells others what is done, so that nobody who multiplies waits for memory.
//
// Constants: MODE (0 LSTM, 1 GRU, 2 tanh, 3 relu), GATES (4, 3, 1), STEPS, SEQUENCES of the batch, HIDDEN (a multiple of 64, at most 256), BIAS
// (1: there are biases), LAYERS, DIRECTIONS (with 2, a launch is a layer), INPUT: the width of what the first layer reads, IN_STEP and
// IN_SEQUENCE its strides in elements, OUT_STEP and OUT_SEQUENCE those of the last layer's result; FLAGS: how many there are.
// The kernels themselves, which name every weight, are appended by the generator.

typedef unsigned int u32;
typedef long long i64;

#define BLOCKS 8                       // of a cluster
#define UNITS (HIDDEN / BLOCKS)             // of a block that recurs
#define ROWS (GATES * UNITS)           // of its gates
#define WARPS (ROWS / 8)               // that multiply; one more fetches
#define MULTIPLIERS (WARPS * 32)
#define THREADS (MULTIPLIERS + 32)
#define RING 4                         // steps that are fetched ahead, and a power of two
#define AHEAD 2
#define PADDED(k) (((k) + 31) / 32 * 32)
#define EACH ((SEQUENCES * UNITS + MULTIPLIERS - 1) / MULTIPLIERS)  // states that a thread keeps
#define LONG 256                       // a row longer than that has a thread to itself

// ---------------------------------------------------------------- the machine: what tests without a GPU put something else for

#ifndef EMULATED
__device__ __forceinline__ float* room() {
  extern __shared__ float4 memory[];
  return (float*)memory;
}
__device__ __forceinline__ float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ float swapped(float x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }
__device__ __forceinline__ void join_block() { __syncthreads(); }
__device__ __forceinline__ void join_warp() { __syncwarp(); }
__device__ __forceinline__ u32 rank_in_cluster() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Everything written before is seen by whoever of the cluster has come through.
__device__ __forceinline__ void join_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void store_in(u32 block, float4* there, float4 value) {
  u32 near = (u32)__cvta_generic_to_shared(there), far;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(near), "r"(block));
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
               ::"r"(far), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w) : "memory");
}
__device__ __forceinline__ u32 seen(const u32* flag) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ void tell(u32* flag) {
  asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(1u) : "memory");
}
__device__ __forceinline__ void rest() { __nanosleep(20); }
// Copies that go on while the thread does: four floats past the first-level cache, which does not hear of what other blocks write; or one, of
// what nobody writes.
__device__ __forceinline__ void fetch_four(float* to, const float* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void fetch_one(float* to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
// What was started since the last time is a group; all groups but the last `left` are there.
__device__ __forceinline__ void close_fetches() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int left>
__device__ __forceinline__ void await_fetches() {
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}
#endif

__device__ __forceinline__ void wait_for(const u32* flag) {
  while (!seen(flag)) rest();
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Starts to copy SEQUENCES rows of K floats to rows that are `pitch` apart. By one warp.
template <int K>
__device__ __forceinline__ void fetch_rows(float* to, int pitch, const float* from, i64 per_row, int lane) {
  if (K % 4 == 0 && per_row % 4 == 0 && (i64)from % 16 == 0) {
    for (int i = lane; i < SEQUENCES * (K / 4); i += 32)
      fetch_four(to + i / (K / 4) * pitch + i % (K / 4) * 4, from + i / (K / 4) * per_row + i % (K / 4) * 4);
  } else {
    for (int i = lane; i < SEQUENCES * K; i += 32) fetch_one(to + i / K * pitch + i % K, from + i / K * per_row + i % K);
  }
}

// ---------------------------------------------------------------- rows times vectors

// Rows `first`, first + 1, ... of a matrix with `width` columns: of each the parts of 4 that a lane has. Columns beyond the last are zero.
template <int COUNT, int K>
__device__ __forceinline__ void hold(float4 (&held)[COUNT][PADDED(K) / 32], const float* const (&rows)[COUNT], int part) {
#pragma unroll
  for (int row = 0; row < COUNT; row++)
#pragma unroll
    for (int j = 0; j < PADDED(K) / 32; j++) {
      int k = part * 4 + 32 * j;
      held[row][j].x = k + 0 < K ? rows[row][k + 0] : 0.0f;
      held[row][j].y = k + 1 < K ? rows[row][k + 1] : 0.0f;
      held[row][j].z = k + 2 < K ? rows[row][k + 2] : 0.0f;
      held[row][j].w = k + 3 < K ? rows[row][k + 3] : 0.0f;
    }
}

// The products of the held rows with BATCH vectors of PADDED(K), one behind the other: of their 8 sums, row by row, a thread has number `part` in
// the end. No more than 8, since a thread that holds rows has no registers for them.
template <int COUNT, int K>
__device__ __forceinline__ float multiply(const float4 (&held)[COUNT][PADDED(K) / 32], const float* vectors, int batch, int part) {
  constexpr int VECTORS = 8 / COUNT;
  float sums[8];
#pragma unroll
  for (int i = 0; i < 8; i++) sums[i] = 0.0f;
#pragma unroll
  for (int j = 0; j < PADDED(K) / 32; j++)
#pragma unroll
    for (int b = 0; b < VECTORS; b++) {
      if (b >= batch) break;
      float4 v = *(const float4*)(vectors + b * PADDED(K) + part * 4 + 32 * j);
#pragma unroll
      for (int row = 0; row < COUNT; row++) {
        float sum = sums[row * VECTORS + b];
        sum = fused(held[row][j].x, v.x, sum);
        sum = fused(held[row][j].y, v.y, sum);
        sum = fused(held[row][j].z, v.z, sum);
        sums[row * VECTORS + b] = fused(held[row][j].w, v.w, sum);
      }
    }
#pragma unroll
  for (int half = 4; half; half >>= 1) {
    bool upper = part & half;
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (i < half) {
        float given = upper ? sums[i] : sums[i + half];
        float kept = upper ? sums[i + half] : sums[i];
        sums[i] = kept + swapped(given, half);
      }
  }
  return sums[0];
}

// ---------------------------------------------------------------- a layer

struct Layer {
  const float *input_weights, *weights, *input_bias, *bias;

  // Of gate row `row` of the layer, what is added to its products with the input: all, but a GRU's new state scales a part of it first.
  __device__ float bias_of(int row) const {
    if (!BIAS) return 0.0f;
    return MODE == 1 && row >= 2 * HIDDEN ? input_bias[row] : input_bias[row] + bias[row];
  }
};

// What a block that projects reads at step t, and whose flags say that it is there (none for what the caller gave).
struct Source {
  const float* from;
  i64 per_step, per_sequence;
  const u32* flags;  // BLOCKS a step
};

__device__ __forceinline__ int at(int step, bool reversed) { return reversed ? STEPS - 1 - step : step; }

// Multiplies: of part `slice` of the gates' rows, in the order of who recurs, products[t][block][b][row of the block] with the input's bias.
template <int COUNT, int K>
__device__ void project(float* shared, Source source, Layer layer, int slice, bool reversed, float* products, u32* flags) {
  constexpr int VECTORS = 8 / COUNT, PITCH = PADDED(K), MINE = ROWS * COUNT / 2;
  int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, part = lane % 8;
  float* ring = shared;  // RING x SEQUENCES x PITCH
  for (int i = thread; i < RING * SEQUENCES * PITCH; i += THREADS) ring[i] = 0.0f;  // the padding stays so
  float4 held[COUNT][PITCH / 32];
  int block = slice * COUNT / 2, first = (slice * MINE) % ROWS + (warp * 4 + lane / 8) * COUNT;
  if (warp < WARPS) {
    const float* rows[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      rows[i] = layer.input_weights + (i64)((first + i) / UNITS * HIDDEN + block * UNITS + (first + i) % UNITS) * K;
    hold<COUNT, K>(held, rows, part);
  }
  join_block();
  u32* mine = flags + block * (2 / COUNT) + slice % (2 / COUNT);
  for (int step = -AHEAD; step < STEPS; step++) {
    if (warp == WARPS) {
      if (step > 0 && lane == 0) tell(mine + (i64)(step - 1) * BLOCKS * (2 / COUNT));
      if (step + AHEAD < STEPS) {
        int time = at(step + AHEAD, reversed);
        if (source.flags) {
          if (lane < BLOCKS) wait_for(source.flags + (i64)time * BLOCKS + lane);
          join_warp();
        }
        float* slot = ring + ((step + AHEAD) & (RING - 1)) * SEQUENCES * PITCH;
        fetch_rows<K>(slot, PITCH, source.from + time * source.per_step, source.per_sequence, lane);
      }
      close_fetches();
      await_fetches<AHEAD - 1>();  // the next step's are there
    }
    if (step >= 0 && warp < WARPS) {
      const float* vectors = ring + (step & (RING - 1)) * SEQUENCES * PITCH;
      float* to = products + ((i64)step * BLOCKS + block) * SEQUENCES * ROWS;
      int row = first + part / VECTORS, b = part % VECTORS;
      float bias = layer.bias_of(row / UNITS * HIDDEN + block * UNITS + row % UNITS);
#pragma unroll
      for (int done = 0; done < SEQUENCES; done += VECTORS) {
        float sum = multiply<COUNT, K>(held, vectors + done * PITCH, SEQUENCES - done, part);
        if (done + b < SEQUENCES) to[(done + b) * ROWS + row] = sum + bias;
      }
    }
    join_block();
  }
  if (warp == WARPS && lane == 0) tell(mine + (i64)(STEPS - 1) * BLOCKS * (2 / COUNT));
}

// Steps through time. `from`: the hidden (and cell) state before; `result`: where step t's hidden state goes, with its strides.
__device__ void recur(float* shared, Layer layer, const float* hidden, const float* cell, const float* products, const u32* there,
                      int sources, bool reversed, float* result, i64 per_step, i64 per_sequence, u32* flags, float* last, float* last_cell) {
  int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, part = lane % 8;
  u32 block = rank_in_cluster();
  float* states = shared;                       // 2 x SEQUENCES x HIDDEN
  float* ring = states + 2 * SEQUENCES * HIDDEN;             // RING x SEQUENCES x ROWS
  float* gates = ring + RING * SEQUENCES * ROWS;        // ROWS x SEQUENCES
  float4 held[2][HIDDEN / 32];
  int first = (warp * 4 + lane / 8) * 2;
  if (warp < WARPS) {
    const float* rows[2];
    for (int i = 0; i < 2; i++) rows[i] = layer.weights + (i64)((first + i) / UNITS * HIDDEN + block * UNITS + (first + i) % UNITS) * HIDDEN;
    hold<2, HIDDEN>(held, rows, part);
  }
  for (int i = thread; i < SEQUENCES * HIDDEN; i += THREADS) states[i] = hidden[i];
  float own[EACH], cells[EACH], scaled_bias[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int state = thread + i * MULTIPLIERS, b = state / UNITS, unit = block * UNITS + state % UNITS;
    own[i] = cells[i] = scaled_bias[i] = 0.0f;
    if (thread < MULTIPLIERS && state < SEQUENCES * UNITS) {
      own[i] = hidden[b * HIDDEN + unit];
      if (MODE == 0) cells[i] = cell[b * HIDDEN + unit];
      if (MODE == 1 && BIAS) scaled_bias[i] = layer.bias[2 * HIDDEN + unit];
    }
  }
  join_cluster();
  for (int step = -AHEAD; step < STEPS; step++) {
    const float* now = states + (step & 1) * SEQUENCES * HIDDEN;
    float* next = states + (~step & 1) * SEQUENCES * HIDDEN;
    if (warp == WARPS) {
      if (step > 0 && lane == 0) tell(flags + (i64)at(step - 1, reversed) * BLOCKS + block);
      if (step + AHEAD < STEPS) {
        int time = step + AHEAD;
        if (lane < sources) wait_for(there + ((i64)time * BLOCKS + block) * sources + lane);
        join_warp();
        float* slot = ring + (time & (RING - 1)) * SEQUENCES * ROWS;
        fetch_rows<ROWS>(slot, ROWS, products + ((i64)time * BLOCKS + block) * SEQUENCES * ROWS, ROWS, lane);
      }
      close_fetches();
      await_fetches<AHEAD - 1>();
    }
    if (step < 0) {
      join_block();
      continue;
    }
    if (warp < WARPS) {
#pragma unroll
      for (int done = 0; done < SEQUENCES; done += 4) {
        float sum = multiply<2, HIDDEN>(held, now + done * HIDDEN, SEQUENCES - done, part);
        int b = done + part % 4;
        if (b < SEQUENCES) gates[(first + part / 4) * SEQUENCES + b] = sum;
      }
    }
    join_block();
    const float* read = ring + (step & (RING - 1)) * SEQUENCES * ROWS;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      int state = thread + i * MULTIPLIERS, b = state / UNITS, unit = state % UNITS;
      if (thread < MULTIPLIERS && state < SEQUENCES * UNITS) {
        float x[GATES], h[GATES];
#pragma unroll
        for (int gate = 0; gate < GATES; gate++) {
          x[gate] = read[b * ROWS + gate * UNITS + unit];
          h[gate] = gates[(gate * UNITS + unit) * SEQUENCES + b];
        }
#if MODE == 0
        float cell_now = sigmoid(x[1] + h[1]) * cells[i] + sigmoid(x[0] + h[0]) * tanhf(x[2] + h[2]);
        cells[i] = cell_now;
        own[i] = sigmoid(x[3] + h[3]) * tanhf(cell_now);
#elif MODE == 1
        float reset = sigmoid(x[0] + h[0]), keep = sigmoid(x[1] + h[1]);
        float fresh = tanhf(x[2] + reset * (h[2] + scaled_bias[i]));
        own[i] = (own[i] - fresh) * keep + fresh;
#elif MODE == 2
        own[i] = tanhf(x[0] + h[0]);
#else
        float sum = x[0] + h[0];
        own[i] = sum < 0.0f ? 0.0f : sum;  // NaN stays
#endif
        next[b * HIDDEN + block * UNITS + unit] = own[i];
        result[at(step, reversed) * per_step + b * per_sequence + block * UNITS + unit] = own[i];
      }
    }
    join_block();
    for (int i = thread; i < (BLOCKS - 1) * SEQUENCES * UNITS / 4; i += THREADS) {
      u32 other = (block + 1 + i / (SEQUENCES * UNITS / 4)) % BLOCKS;
      int four = i % (SEQUENCES * UNITS / 4);
      float4* place_of = (float4*)(next + four / (UNITS / 4) * HIDDEN + block * UNITS) + four % (UNITS / 4);
      store_in(other, place_of, *place_of);
    }
    join_cluster();
  }
  if (warp == WARPS && lane == 0) tell(flags + (i64)at(STEPS - 1, reversed) * BLOCKS + block);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int state = thread + i * MULTIPLIERS, b = state / UNITS, unit = block * UNITS + state % UNITS;
    if (thread < MULTIPLIERS && state < SEQUENCES * UNITS) {
      last[b * HIDDEN + unit] = own[i];
      if (MODE == 0) last_cell[b * HIDDEN + unit] = cells[i];
    }
  }
}

// ---------------------------------------------------------------- launches

#define PROJECTORS(k) ((k) > LONG ? 2 : 1)  // clusters that project for a layer
#define PRODUCTS ((i64)STEPS * BLOCKS * SEQUENCES * ROWS)  // of a layer and direction
#define TOLD ((i64)STEPS * BLOCKS * 2)  // flags of its products

template <int K>
__device__ __forceinline__ void project_for(Source source, Layer layer, int projector, bool reversed, float* products, u32* flags) {
  constexpr int COUNT = K > LONG ? 1 : 2;
  project<COUNT, K>(room(), source, layer, projector * BLOCKS + rank_in_cluster(), reversed, products, flags);
}

// All layers, one direction. `between`: hidden states of all but the last layer.
__device__ __forceinline__ void stack(const float* input, const float* hidden, const float* cell, const Layer* layers, float* result, float* last,
                                      float* last_cell, float* between, float* products, u32* flags) {
  constexpr int FIRST = PROJECTORS(INPUT), STATES = SEQUENCES * HIDDEN;
  int cluster = blockIdx.x / BLOCKS, layer = cluster <= FIRST ? 0 : 1 + (cluster - FIRST - 1) / (PROJECTORS(HIDDEN) + 1);
  int inside = cluster <= FIRST ? cluster : (cluster - FIRST - 1) % (PROJECTORS(HIDDEN) + 1);
  float* own = products + layer * PRODUCTS;
  u32 *there = flags + layer * TOLD, *done = flags + LAYERS * TOLD + (i64)layer * STEPS * BLOCKS;
  if (layer == 0 && inside < FIRST) {
    project_for<INPUT>({input, IN_STEP, IN_SEQUENCE, nullptr}, layers[0], inside, false, own, there);
  } else if (layer > 0 && inside < PROJECTORS(HIDDEN)) {
    const float* from = between + (i64)(layer - 1) * STEPS * STATES;
    project_for<HIDDEN>({from, STATES, HIDDEN, done - (i64)STEPS * BLOCKS}, layers[layer], inside, false, own, there);
  } else {
    bool top = layer == LAYERS - 1;
    float* to = top ? result : between + (i64)layer * STEPS * STATES;
    i64 mine = (i64)layer * STATES;
    recur(room(), layers[layer], hidden + mine, MODE == 0 ? cell + mine : nullptr, own, there, layer ? PROJECTORS(HIDDEN) : FIRST, false, to,
          top ? OUT_STEP : STATES, top ? OUT_SEQUENCE : HIDDEN, done, last + mine, MODE == 0 ? last_cell + mine : nullptr);
  }
}

// Both directions of layer `layer`, which reads rows of K.
template <int K>
__device__ __forceinline__ void both_ways(int layer, const float* input, i64 per_step, i64 per_sequence, const float* hidden, const float* cell,
                                          const Layer* directions, float* result, i64 result_step, i64 result_sequence, float* last,
                                          float* last_cell, float* products, u32* flags) {
  constexpr int STATES = SEQUENCES * HIDDEN;
  int cluster = blockIdx.x / BLOCKS, direction = cluster / (PROJECTORS(K) + 1), inside = cluster % (PROJECTORS(K) + 1);
  int number = layer * 2 + direction;
  float* own = products + direction * PRODUCTS;
  u32 *there = flags + number * TOLD, *done = flags + LAYERS * 2 * TOLD + (i64)number * STEPS * BLOCKS;
  if (inside < PROJECTORS(K)) {
    project_for<K>({input, per_step, per_sequence, nullptr}, directions[direction], inside, direction == 1, own, there);
  } else {
    i64 mine = (i64)number * STATES;
    recur(room(), directions[direction], hidden + mine, MODE == 0 ? cell + mine : nullptr, own, there, PROJECTORS(K), direction == 1,
          result + direction * HIDDEN, result_step, result_sequence, done, last + mine, MODE == 0 ? last_cell + mine : nullptr);
  }
}

