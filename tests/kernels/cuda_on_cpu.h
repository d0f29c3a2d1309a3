// What packed_*.cu ask of the machine, on a CPU with one thread for each GPU thread: to see its addresses, layouts, synchronisation and
// guards without a GPU. The layouts of wgmma operands and accumulators are written down here a second time, from the PTX ISA. It does not
// tell speed, the tensor cores' rounding, or anything of memory ordering.
#include <barrier>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#define EMULATED
#ifndef ACC
#define ACC 4  // for kernels that use no tensor core
#endif
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)
#define __shared__ static
#define min(a, b) ((a) < (b) ? (a) : (b))

struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(8) uint2 { unsigned x, y; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
template <class T> T __ldg(const T* p) { return *p; }
template <class T, class F> T bits(F x) { T y; std::memcpy(&y, &x, sizeof y); return y; }
inline float __uint_as_float(unsigned x) { return bits<float>(x); }
inline float __int_as_float(int x) { return bits<float>(x); }
inline unsigned __float_as_uint(float x) { return bits<unsigned>(x); }
inline int __float_as_int(float x) { return bits<int>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

// ---- threads, blocks, clusters of blocks

struct Index { int x; };
struct Warp { std::barrier<> gate{32}; uint32_t seen[32]; };
struct Gate { int count, left, bytes; unsigned phase; };
struct Block {
  std::vector<char> room, said;
  std::vector<uint32_t> held;  // what threads have of a wgmma operand in registers
  std::vector<Warp> warps;
  std::barrier<> gate, consumers{256}, one{128}, other{128};
  std::map<unsigned, Gate> gates;
  explicit Block(int threads) : room(232448), said(threads), held(4 * threads), warps(threads / 32), gate(threads) {}
};
static std::vector<std::unique_ptr<Block>> cluster;
static std::barrier<>* cluster_gate;
static thread_local Index threadIdx, blockIdx;
static thread_local Block* block;
static thread_local char* memory;

static uint32_t exchanged(uint32_t mine, int from) {
  Warp& warp = block->warps[threadIdx.x / 32];
  warp.seen[threadIdx.x % 32] = mine;
  warp.gate.arrive_and_wait();
  uint32_t theirs = warp.seen[from];
  warp.gate.arrive_and_wait();
  return theirs;
}
static unsigned __ballot_sync(unsigned, bool mine) {
  Warp& warp = block->warps[threadIdx.x / 32];
  warp.seen[threadIdx.x % 32] = mine;
  warp.gate.arrive_and_wait();
  unsigned all = 0;
  for (int i = 0; i < 32; ++i) all |= warp.seen[i] << i;
  warp.gate.arrive_and_wait();
  return all;
}
static bool __any_sync(unsigned mask, bool mine) { return __ballot_sync(mask, mine) != 0; }
static float __shfl_xor_sync(unsigned, float mine, int step) { return bits<float>(exchanged(bits<uint32_t>(mine), threadIdx.x % 32 ^ step)); }
static void __syncthreads() { block->gate.arrive_and_wait(); }

// ---- shared memory and its barriers

static const unsigned BASE = 4096 + 512;  // not a multiple of 1024, as dynamic shared memory may be
static std::mutex lock;
static std::condition_variable moved;

static unsigned shared_address(const void* p) { return BASE + (unsigned)((const char*)p - memory); }
static char* at(unsigned address) { return memory + (address - BASE); }
static void turn(Gate& gate) {
  if (gate.left == 0 && gate.bytes == 0) gate.left = gate.count, gate.phase ^= 1, moved.notify_all();
}
static Gate& gate_of(Block& owner, unsigned barrier) { return owner.gates.at(barrier); }
static void init(unsigned barrier, int count) { std::lock_guard held(lock); block->gates[barrier] = {count, count, 0, 0}; }
static void expect(unsigned barrier, int bytes) { std::lock_guard held(lock); Gate& g = gate_of(*block, barrier); g.bytes += bytes; --g.left; turn(g); }
static void arrive(unsigned barrier) { std::lock_guard held(lock); Gate& g = gate_of(*block, barrier); --g.left; turn(g); }
static void arrive_at(unsigned barrier, int rank) { std::lock_guard held(lock); Gate& g = gate_of(*cluster[rank], barrier); --g.left; turn(g); }
static void wait(unsigned barrier, unsigned parity) {
  std::unique_lock held(lock);
  Gate& g = gate_of(*block, barrier);
  moved.wait(held, [&] { return g.phase != parity; });
}
static void delivered(Block& to, unsigned address, const void* from, int bytes, unsigned barrier) {
  std::memcpy(to.room.data() + (address - BASE), from, bytes);
  Gate& g = gate_of(to, barrier);
  g.bytes -= bytes;
  turn(g);
}
static void copy(unsigned to, const void* from, int bytes, unsigned barrier) { std::lock_guard held(lock); delivered(*block, to, from, bytes, barrier); }
static void copy_to_all(unsigned to, const void* from, int bytes, unsigned barrier) {
  std::lock_guard held(lock);
  for (auto& each : cluster) delivered(*each, to, from, bytes, barrier);
}
static void meet() { block->consumers.arrive_and_wait(); }
static void meet_cluster() { cluster_gate->arrive_and_wait(); }
static bool any_consumer(bool mine) {
  block->said[threadIdx.x] = mine;
  meet();
  bool any = false;
  for (int i = 128; i < 384; ++i) any |= block->said[i] != 0;
  meet();
  return any;
}
static void fewer_registers() {}
static void more_registers() {}
static void publish_barriers() {}
// the 128 threads of a warpgroup issue wgmma together, and wait for it together
static void fence_wgmma() { (threadIdx.x / 128 % 2 ? block->one : block->other).arrive_and_wait(); }
static void commit_wgmma() {}
template <int LEFT> static void wait_wgmma() { fence_wgmma(); }

// ---- 16-bit floating point

#if HALF
static uint16_t to_piece(float x) { return bits<uint16_t>((_Float16)x); }
static float from_piece(uint16_t piece) { return (float)bits<_Float16>(piece); }
#else
static uint16_t to_piece(float x) {
  uint32_t all = bits<uint32_t>(x);
  return x != x ? 0x7FFF : (all + 0x7FFF + (all >> 16 & 1)) >> 16;
}
static float from_piece(uint16_t piece) { return bits<float>((uint32_t)piece << 16); }
#endif

// ---- wgmma: element (row, k) of an operand with 128-byte swizzle, K-major or (ACROSS) MN-major; accumulator fragments of m64nNk16

#ifndef A_ALONG_K
#define A_ALONG_K 1
#define B_ALONG_K 1
#endif
template <bool ALONG_K>
static float element(uint64_t descriptor, int row, int k) {
  const unsigned group = (descriptor >> 32 & 0x3FFF) << 4, next = (descriptor >> 16 & 0x3FFF) << 4;
  if (descriptor >> 62 != 1) std::abort();
  unsigned address = (unsigned)(descriptor & 0x3FFF) << 4;
  if (ALONG_K)
    address += row / 8 * group + row % 8 * 128 + 2 * k;
  else
    address += row / 64 * next + k / 8 * group + k % 8 * 128 + 2 * (row % 64);
  address ^= (address >> 7 & 7) << 4;
  return from_piece(*(uint16_t*)at(address));
}
static void WGMMA(float (&d)[ACC], uint64_t a, uint64_t b, int add) {
  const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
  for (int i = 0; i < ACC; ++i) {
    const int r = row + (i / 2 % 2) * 8, c = i / 4 * 8 + thread % 4 * 2 + i % 2;
    float sum = add ? d[i] : 0.0f;
    for (int k = 0; k < 16; ++k) sum += element<A_ALONG_K>(a, r, k) * element<B_ALONG_K>(b, c, k);
    d[i] = sum;
  }
}

#if STREAM
static uint32_t to_pieces(float low, float high) { return to_piece(low) | (uint32_t)to_piece(high) << 16; }
static float low_piece(uint32_t both) { return from_piece((uint16_t)both); }
static float high_piece(uint32_t both) { return from_piece((uint16_t)(both >> 16)); }
static void WGMMA_HELD(float (&d)[ACC], const uint32_t (&a)[4], uint64_t b, int add) {
  const int group = threadIdx.x / 128 * 128, thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
  for (int i = 0; i < 4; ++i) block->held[threadIdx.x * 4 + i] = a[i];
  fence_wgmma();
  for (int i = 0; i < ACC; ++i) {
    const int r = row + i / 2 % 2 * 8, c = i / 4 * 8 + thread % 4 * 2 + i % 2;
    float sum = add ? d[i] : 0.0f;
    for (int k = 0; k < 16; ++k) {
      const uint32_t both = block->held[(group + r / 16 * 32 + r % 8 * 4 + k % 8 / 2) * 4 + r % 16 / 8 + k / 8 * 2];
      sum += from_piece((uint16_t)(k % 2 ? both >> 16 : both)) * element<true>(b, c, k);
    }
    d[i] = sum;
  }
  fence_wgmma();
}
#endif

// ---- wgmma of TF32 with its first operand in registers, the second K-major without swizzle; copies that end at once

static uint32_t to_tf32(float x) { return x != x ? bits<uint32_t>(x) : (bits<uint32_t>(x) + 0x1000) & 0xFFFFE000; }
template <int WIDTH, int FIRST>
static void MULTIPLY(float (&d)[ACC], const uint32_t (&a)[4], uint64_t b) {
  const int group = threadIdx.x / 128 * 128, thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
  for (int i = 0; i < 4; ++i) block->held[threadIdx.x * 4 + i] = a[i];
  fence_wgmma();
  const unsigned start = (unsigned)(b & 0x3FFF) << 4, along_k = (unsigned)(b >> 16 & 0x3FFF) << 4, along_n = (unsigned)(b >> 32 & 0x3FFF) << 4;
  if (b >> 62 != 0) std::abort();
  for (int i = 0; i < WIDTH / 2; ++i) {
    const int r = row + i / 2 % 2 * 8, c = i / 4 * 8 + thread % 4 * 2 + i % 2;
    for (int k = 0; k < 8; ++k) {
      const float x = bits<float>(block->held[(group + r / 16 * 32 + r % 8 * 4 + k % 4) * 4 + r % 16 / 8 + k / 4 * 2]);
      d[FIRST + i] += x * *(float*)at(start + c / 8 * along_n + k / 4 * along_k + c % 8 * 16 + k % 4 * 4);
    }
  }
  fence_wgmma();
}
#ifdef VEC
static void copy_some(float* to, const float* from, bool there) {
  if (there) std::memcpy(to, from, 4 * VEC); else std::memset(to, 0, 4 * VEC);
}
#endif
static void copy_16(float* to, const float* from) { std::memcpy(to, from, 16); }
static void copy_or_clear(unsigned to, const void* from, bool inside) {
  if (inside) std::memcpy(at(to), from, 16); else std::memset(at(to), 0, 16);
}
static void take_producer_registers() {}
static void take_consumer_registers() {}
static void commit_copies() {}
template <int LEFT> static void wait_copies() {}
static void fetch_ahead(const void*) {}
static void store_words(void* to, const uint4& word, bool inside) {
  if (inside) *(uint4*)to = word;
}
static void fetch_early(const void* from, bool inside) {
  if (inside) (void)*static_cast<const volatile char*>(from);
}
static void let_next_start() {}
static void wait_for_previous() {}
static float quick_reciprocal(float x) { return 1.0f / x; }
static float quick_exp2(float x) { return std::exp2(x); }
static float exp2_or_zero(float x) { return x < -126 ? 0 : std::exp2(x); }
static void arrive_when_copied(unsigned barrier) { arrive(barrier); }
static void wait_for_copies() {}
static void show_to_wgmma() {}
static int computed_again(int x) { return x; }

// ---- what blocks of a cluster hand each other, and flags in memory; clusters run one after the other, in order

static float* room() { return (float*)memory; }
static float fused(float a, float b, float c) { return std::fmaf(a, b, c); }
static float swapped(float x, int lanes) { return __shfl_xor_sync(~0u, x, lanes); }
static void join_block() { __syncthreads(); }
static void join_warp() { block->warps[threadIdx.x / 32].gate.arrive_and_wait(); }
static unsigned rank_in_cluster() { return blockIdx.x % cluster.size(); }
static void join_cluster() { meet_cluster(); }
static void store_in(unsigned rank, float4* there, float4 value) { std::memcpy(cluster[rank]->room.data() + ((char*)there - memory), &value, 16); }
static unsigned seen(const unsigned* flag) { return *(const volatile unsigned*)flag; }
static void tell(unsigned* flag) { *(volatile unsigned*)flag = 1; }
static void rest() { std::abort(); }  // whoever has to be waited for has run already
static void fetch_four(float* to, const float* from) { memcpy(to, from, 16); }
static void fetch_one(float* to, const float* from) { *to = *from; }
static void close_fetches() {}
template <int left> static void await_fetches() {}

template <class... T, size_t... I>
void call(void (*kernel)(T...), void** arguments, std::index_sequence<I...>) { kernel((T)arguments[I]...); }
template <class... T>
void launch(void (*kernel)(T...), int grid, int threads, int together, void** arguments) {
  for (int first = 0; first < grid; first += together) {
    cluster.clear();
    for (int rank = 0; rank < together; ++rank) cluster.push_back(std::make_unique<Block>(threads));
    std::barrier<> all(together * threads);
    cluster_gate = &all;
    std::vector<std::thread> running;
    for (int i = 0; i < together * threads; ++i)
      running.emplace_back([=] {
        threadIdx.x = i % threads, blockIdx.x = first + i / threads;
        block = cluster[i / threads].get(), memory = block->room.data();
        call(kernel, arguments, std::index_sequence_for<T...>());
        cluster_gate->arrive_and_drop();  // a barrier of a cluster does not wait for threads that have ended
      });
    for (auto& thread : running) thread.join();
  }
}
