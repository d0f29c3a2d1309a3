// C = A B for fp32 matrices on Hopper's tensor cores: three kernels, "measure", "pack" and "multiply", specialised by -D constants.
//
// "Rows" of an operand are rows of A and columns of B. measure notes of each row its largest and least magnitudes, its squares, and whether it
// has NaN or infinity, for each segment of k. pack writes each operand as PLANES planes of 16-bit pieces (fp16 of the row scaled by a power of
// two, or bf16), cut into atoms of 8 rows x 64 of k, 1024 bytes, already in the 128-byte swizzle that wgmma reads: any layout of the operands
// costs nothing later, ragged edges become zeros, and a tile is one contiguous bulk copy, so that no tensor map is needed.
//
// multiply: one producer warp copies tiles into a ring of stages, two warpgroups of consumers run wgmma. PRODUCTS products of planes,
// the small ones first, are summed over PROMOTE * 64 of k in the tensor core's accumulator, which truncates; that partial sum is then added to
// fp32 registers, which round. A tile that has a NaN, an infinity or numbers the pieces do not hold is computed again, with plain fp32 FMA
// from A and B themselves, in the order of k.
//
// Constants: HALF (1: fp16 pieces with row scales, 0: bf16), PLANES, PRODUCTS (1, 3 or 6), BM = 128, BN (multiple of 32 up to 192; to 256 without promotion), STAGES,
// PROMOTE (0: never), GROUP, CLUSTER (blocks that share columns of B: 1 or 2); M, N, K; A_ROW, A_K, A_BATCH, A_OFFSET, A_BATCHES and the same of B: strides in elements, how many matrices there are;
// STREAM (1: A is not packed, see packed_stream.cu), SWAPPED (1: rows of A are columns of C);
// M_PAD (multiple of BM * CLUSTER), N_PAD (of BN), CHUNKS (64 of k each, a multiple of PROMOTE), SEGMENTS of SEGMENT chunks to measure, PACK_CHUNKS a
// block packs; ACC = BN / 2; PAIRS (columns 2i and 2i + 1 of C are one
// aligned float2). Words that the generator replaces: MEASURE, PACK, MULTIPLY, INDEX, WGMMA_DEFINITION, TAIL_DEFINITION, TAIL_PARAMETERS, TAIL_ARGUMENTS.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef long long i64;

#define BK 64
#define CONSUMERS 256
#define ATOM 512                   // 16-bit elements of 8 rows x 64 of k
#define STAGE_A (PLANES * BM * BK * 2)  // bytes
#define STAGE_B (PLANES * BN * BK * 2)
#define STAGE (STAGE_A + STAGE_B)
#define STAGE_STREAM (STAGE_B + BM * 320)  // packed_stream.cu: rows of A as they lie
#define INEXACT 0x10000            // flags beside the exponent: a piece was cut off; nothing of the row may be trusted
#define SPECIAL 0x20000
#define EXPONENT_BIAS 1024

#if CLUSTER > 1
#define CLUSTER_DIMENSIONS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMENSIONS
#endif

// ---------------------------------------------------------------- the machine: what tests without a GPU put something else for

#ifndef EMULATED
__device__ __forceinline__ u16 to_piece(float x) {
  u16 piece;
#if HALF
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(piece) : "f"(x));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(piece) : "f"(x));
#endif
  return piece;
}
__device__ __forceinline__ float from_piece(u16 piece) {
#if HALF
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(piece));
  return x;
#else
  return __uint_as_float((u32)piece << 16);
#endif
}
#if STREAM
__device__ __forceinline__ u32 to_pieces(float low, float high) {
  u32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ float low_piece(u32 both) { return from_piece((u16)both); }
__device__ __forceinline__ float high_piece(u32 both) { return from_piece((u16)(both >> 16)); }
#endif
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}
__device__ __forceinline__ void copy(u32 to, const void* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void copy_to_all(u32 to, const void* from, int bytes, u32 barrier) {  // the same place of every block of the cluster
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier), "h"((u16)((1 << CLUSTER) - 1))
               : "memory");
}
__device__ __forceinline__ void arrive_at(u32 barrier, int block) {  // the barrier of another block of the cluster
  asm volatile("{\n.reg .b32 far;\nmapa.shared::cluster.u32 far, %0, %1;\nmbarrier.arrive.release.cluster.shared::cluster.b64 _, [far];\n}" ::"r"(barrier),
               "r"(block)
               : "memory");
}
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }  // all consumers
__device__ __forceinline__ bool any_consumer(bool mine) {
  int found;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.s32 p, %1, 0;\nbarrier.cta.red.or.pred q, 1, 256, p;\nselp.s32 %0, 1, 0, q;\n}"
      : "=r"(found)
      : "r"((int)mine)
      : "memory");
  return found != 0;
}

__device__ __forceinline__ void fence_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }
__device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
extern __shared__ char memory[];

// WGMMA(d, a, b, add): d[ACC] (+)= 64 x 16 of a times 16 x BN of b; written by the generator for BN
WGMMA_DEFINITION
#endif

