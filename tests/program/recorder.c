/* A stand-in for libcuda.so.1 (and for PyTorch's current stream): it records what it gets, and fails when told to.

   Compiled by test_driver.py against NVIDIA's own cuda.h, so structure layouts and calling conventions are the real ones. */
#include <cuda.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#undef cuEventElapsedTime
#undef cuCtxPushCurrent
#undef cuCtxPopCurrent
#define EXPORT __attribute__((visibility("default")))

/* Atomic, because the launcher lets go of the interpreter lock: several threads count at once. */
EXPORT _Atomic int calls_init, calls_load, calls_get, calls_push, calls_pop, calls_func_load, calls_launch;
EXPORT int fail_load, fail_launch;
EXPORT int load_aligned, param_count = 8;
EXPORT int param_sizes[32];
EXPORT unsigned char param_bytes[32][8];
EXPORT int attribute_ids[32], attribute_values[32], attribute_count;
EXPORT CUlaunchConfig config;
EXPORT CUlaunchAttribute launch_attributes[4];
EXPORT void *launched_function, *context_at_launch;
EXPORT char symbols[32][64];
static __thread void *stack[8];
static __thread int depth;

EXPORT CUresult cuInit(unsigned flags) { calls_init++; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGet(CUdevice *d, int i) { *d = 100 + i; return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) {
  *c = (CUcontext)(intptr_t)(0xC0DE00000000ull + d);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext *c) { *c = depth ? stack[depth - 1] : NULL; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext c) { calls_push++; stack[depth++] = c; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *c) { calls_pop++; *c = stack[--depth]; return CUDA_SUCCESS; }
EXPORT CUresult cuModuleLoadData(CUmodule *m, const void *image) {
  if (fail_load) return (CUresult)fail_load;
  load_aligned = ((uintptr_t)image % 64 == 0) && memcmp(image, "\177ELF", 4) == 0 && depth > 0;
  *m = (CUmodule)(intptr_t)(0x1000000000ull + ++calls_load);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) {
  strncpy(symbols[calls_get++], name, 63);
  *f = (CUfunction)((intptr_t)m << 4);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) {
  if (v > 232448) return CUDA_ERROR_INVALID_VALUE;
  attribute_ids[attribute_count] = a; attribute_values[attribute_count++] = v;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncLoad(CUfunction f) { calls_func_load++; return CUDA_SUCCESS; }
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
  if (fail_launch) return (CUresult)fail_launch;
  if (extra) return CUDA_ERROR_INVALID_VALUE;
  calls_launch++;
  config = *c; launched_function = f; context_at_launch = depth ? stack[depth - 1] : NULL;
  for (unsigned i = 0; i < c->numAttrs; i++) launch_attributes[i] = c->attrs[i];
  for (int i = 0; i < param_count; i++) memcpy(param_bytes[i], params[i], param_sizes[i]);
  return CUDA_SUCCESS;
}
EXPORT int calls_stream, fail_stream, stream_base = 0xABC0;
EXPORT int aoti_torch_get_current_cuda_stream(int device, void **stream) {  /* PyTorch's, not the driver's */
  calls_stream++;
  *stream = (void *)(intptr_t)(stream_base + device);
  return fail_stream;
}
EXPORT int copies, replays, recorded, waited, capturing, fail_copy, fail_replay;
EXPORT void (*graph_body)(void);
EXPORT void *replayed_on, *recorded_on, *waited_on, *replayed;
EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream s) {
  if (fail_copy) return (CUresult)fail_copy;
  copies++;
  memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes);
  return CUDA_SUCCESS;
}
/* one graph of kernel nodes: what is launched are the parameters that the nodes have at that moment */
EXPORT int graphs_made, nodes_added, nodes_set, graphs_destroyed, fail_node, fail_set, chained, size_node;
static CUDA_KERNEL_NODE_PARAMS nodes[16];
static unsigned char node_bytes[16][32][8];
static CUresult fill_node(int n, const CUDA_KERNEL_NODE_PARAMS *p) {
  nodes[n] = *p; size_node = sizeof *p;
  for (int i = 0; i < param_count; i++) memcpy(node_bytes[n][i], p->kernelParams[i], param_sizes[i]);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGraphCreate(CUgraph *g, unsigned flags) { graphs_made++; *g = (CUgraph)0x6A00; return CUDA_SUCCESS; }
EXPORT CUresult cuGraphAddKernelNode_v2(CUgraphNode *n, CUgraph g, const CUgraphNode *deps, size_t count,
                                        const CUDA_KERNEL_NODE_PARAMS *p) {
  if (fail_node) return (CUresult)fail_node;
  if (count != (nodes_added > 0)) return CUDA_ERROR_INVALID_VALUE;
  if (count && deps[0] != (CUgraphNode)(intptr_t)(0x100 + nodes_added - 1)) return CUDA_ERROR_INVALID_VALUE;
  chained += count;
  *n = (CUgraphNode)(intptr_t)(0x100 + nodes_added);
  return fill_node(nodes_added++, p);
}
EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *e, CUgraph g, unsigned long long flags) {
  *e = (CUgraphExec)0xEE00;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec e, CUgraphNode n, const CUDA_KERNEL_NODE_PARAMS *p) {
  if (fail_set) return (CUresult)fail_set;
  nodes_set++;
  return fill_node((int)(intptr_t)n - 0x100, p);
}
EXPORT CUresult cuGraphExecDestroy(CUgraphExec e) { graphs_destroyed++; return CUDA_SUCCESS; }
EXPORT CUresult cuGraphDestroy(CUgraph g) { graphs_destroyed++; return CUDA_SUCCESS; }
EXPORT unsigned node_grid(int n) { return nodes[n].gridDimX; }
EXPORT unsigned long long node_word(int n, int i) {
  unsigned long long word = 0;
  memcpy(&word, node_bytes[n][i], param_sizes[i]);
  return word;
}
EXPORT CUresult cuGraphLaunch(CUgraphExec graph, CUstream s) {
  if (fail_replay) return (CUresult)fail_replay;
  replays++; replayed = graph; replayed_on = s;
  if (graph == (CUgraphExec)0xEE00) {
    calls_launch += nodes_added;
    memcpy(param_bytes, node_bytes[nodes_added - 1], sizeof param_bytes);
  } else if (graph_body) graph_body();
  return CUDA_SUCCESS;
}
EXPORT int joins, fills, events_alive;
EXPORT CUresult cuCtxSynchronize(void) { joins++; return depth ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT; }
EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char byte, size_t bytes, CUstream s) {
  fills++;
  memset((void *)(uintptr_t)to, byte, bytes);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventElapsedTime(float *ms, CUevent a, CUevent b) {
  *ms = 1.5f;
  return a == b ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
EXPORT CUresult cuEventDestroy_v2(CUevent e) { events_alive--; return CUDA_SUCCESS; }
EXPORT CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *status) {
  *status = capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventCreate(CUevent *e, unsigned flags) { *e = (CUevent)(intptr_t)(0xE0 + events_alive++); return CUDA_SUCCESS; }
EXPORT CUresult cuEventRecord(CUevent e, CUstream s) { recorded++; recorded_on = s; return CUDA_SUCCESS; }
EXPORT CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned flags) { waited++; waited_on = s; return CUDA_SUCCESS; }
EXPORT CUresult cuGetErrorName(CUresult r, const char **s) {
  *s = r == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : r == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : NULL;
  return *s ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
/* what cuda.h says, for the layout test */
EXPORT int size_kernel_node = sizeof(CUDA_KERNEL_NODE_PARAMS);
EXPORT int size_config = sizeof(CUlaunchConfig), size_attribute = sizeof(CUlaunchAttribute);
EXPORT int numbers[] = {CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
                        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE,
                        CU_CLUSTER_SCHEDULING_POLICY_SPREAD};
EXPORT unsigned cluster_x(void) { return launch_attributes[0].value.clusterDim.x; }
EXPORT unsigned cluster_y(void) { return launch_attributes[0].value.clusterDim.y; }
EXPORT unsigned cluster_z(void) { return launch_attributes[0].value.clusterDim.z; }
EXPORT int policy(void) { return launch_attributes[1].value.clusterSchedulingPolicyPreference; }
EXPORT unsigned geometry(int i) {
  unsigned g[] = {config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX, config.blockDimY, config.blockDimZ,
                  config.sharedMemBytes, config.numAttrs};
  return g[i];
}
EXPORT void *stream(void) { return config.hStream; }
