/* A stand-in for libcuda.so.1 (and for PyTorch's current stream): it records what it gets, and fails when told to.

   Compiled by test_driver.py against NVIDIA's own cuda.h, so structure layouts and calling conventions are the real ones. */
#include <cuda.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#undef cuEventElapsedTime
#undef cuGraphGetEdges
#undef cuGraphAddDependencies
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
  if (!strncmp(name, "cudal1_copy", 11) || !strncmp(name, "cudal1_fill", 11)) {  /* a mover: C.. or F.. with its width */
    *f = (CUfunction)(intptr_t)((name[7] == 'c' ? 0xC00 : 0xF00) + atoi(name + 11));
    return CUDA_SUCCESS;
  }
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
/* Graphs: nodes, of which each waits for others, and executables that run them with the parameters of that moment. A handle below
   FIRST_GRAPH is a graph that a test captured: a fill, if `captured_fill` says so, a copy likewise, what `graph_body` does, and
   `captured_kernels` more that do nothing. */
enum { FIRST_GRAPH = 0x6A00, FIRST_EXEC = 0xEE00, FIRST_NODE = 0x10000, PER_GRAPH = 2200, MOST_WAITS = 64, IDLE = 0xA11 };
enum { KERNEL = CU_GRAPH_NODE_TYPE_KERNEL, COPY = CU_GRAPH_NODE_TYPE_MEMCPY, FILL = CU_GRAPH_NODE_TYPE_MEMSET, GONE = 99 };
EXPORT int graphs_made, nodes_added, nodes_set, nodes_gone, graphs_destroyed, fail_node, fail_set, fail_clone, chained, size_node;
EXPORT int captured_kernels;
EXPORT CUDA_MEMSET_NODE_PARAMS captured_fill;
EXPORT CUDA_MEMCPY3D captured_copy;
static struct node {
  int type, waits[MOST_WAITS], waiting;
  CUDA_KERNEL_NODE_PARAMS kernel;  /* without a function: what the test captured */
  unsigned char bytes[32][8];
  CUDA_MEMSET_NODE_PARAMS fill;
  CUDA_MEMCPY3D copy;
} nodes[64][PER_GRAPH];
static int counts[64], running_fill, running_copy;
static CUgraph captured_as[64];
static int graph_of(CUgraph g) { return (int)(intptr_t)g - FIRST_GRAPH; }
static struct node *node_of(CUgraphNode n) {
  int i = (int)(intptr_t)n - FIRST_NODE;
  return &nodes[i / PER_GRAPH][i % PER_GRAPH];
}
static CUgraphNode handle_of(int g, int i) { return (CUgraphNode)(intptr_t)(FIRST_NODE + g * PER_GRAPH + i); }
static int mover_width(CUfunction f) { return (intptr_t)f >> 8 == 0xC || (intptr_t)f >> 8 == 0xF ? (int)((intptr_t)f & 0xff) : 0; }
static CUresult fill_node(struct node *n, const CUDA_KERNEL_NODE_PARAMS *p) {
  int mover = mover_width(p->func);
  n->type = KERNEL; n->kernel = *p; size_node = sizeof *p;
  for (int i = 0; i < (mover ? 3 : param_count); i++) memcpy(n->bytes[i], p->kernelParams[i], mover ? 8 : param_sizes[i]);
  return CUDA_SUCCESS;
}
static CUgraphNode new_node(int g, const CUgraphNode *deps, size_t count) {
  struct node *n = &nodes[g][counts[g]];
  for (size_t i = 0; i < count; i++) n->waits[n->waiting++] = (int)(intptr_t)deps[i] - FIRST_NODE - g * PER_GRAPH;
  return handle_of(g, counts[g]++);
}
EXPORT CUresult cuGraphCreate(CUgraph *g, unsigned flags) {
  *g = (CUgraph)(intptr_t)(FIRST_GRAPH + graphs_made++);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGraphClone(CUgraph *copy, CUgraph g) {
  CUgraphNode last = NULL;
  if (fail_clone) return (CUresult)fail_clone;
  int made = graphs_made;
  cuGraphCreate(copy, 0);
  captured_as[made] = g;
  if (captured_fill.dst) last = new_node(made, &last, 0), node_of(last)->type = FILL, node_of(last)->fill = captured_fill;
  if (captured_copy.dstDevice) last = new_node(made, &last, last != NULL), node_of(last)->type = COPY, node_of(last)->copy = captured_copy;
  last = new_node(made, &last, last != NULL);  /* the body */
  for (int i = 0; i < captured_kernels; i++) last = new_node(made, &last, 1), node_of(last)->kernel.func = (CUfunction)(intptr_t)IDLE;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *found, size_t *count) {
  int g = graph_of(graph);
  size_t n = 0;
  for (int i = 0; i < counts[g]; i++)
    if (nodes[g][i].type != GONE) { if (found) found[n] = handle_of(g, i); n++; }
  *count = n;
  return CUDA_SUCCESS;
}
static CUresult all_edges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count) {
  int g = graph_of(graph);
  size_t n = 0;
  for (int i = 0; i < counts[g]; i++)
    for (int k = 0; k < nodes[g][i].waiting && nodes[g][i].type != GONE; k++, n++)
      if (from) from[n] = handle_of(g, nodes[g][i].waits[k]), to[n] = handle_of(g, i);
  *count = n;
  return CUDA_SUCCESS;
}
/* With `early_edges` kernels begin before those ahead have ended: the driver then refuses to tell of edges without their data. */
EXPORT int early_edges;
EXPORT CUresult cuGraphGetEdges_v2(CUgraph graph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data, size_t *count) {
  CUresult status = early_edges && from && !data ? CUDA_ERROR_LOSSY_QUERY : all_edges(graph, from, to, count);
  for (size_t i = 0; status == CUDA_SUCCESS && data && i < *count; i++) {
    memset(&data[i], 0, sizeof data[i]);
    data[i].type = early_edges ? CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC : 0;
  }
  return status;
}
EXPORT CUresult cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count) {
  return early_edges ? CUDA_ERROR_LOSSY_QUERY : all_edges(graph, from, to, count);
}
EXPORT CUresult cuGraphNodeGetType(CUgraphNode n, CUgraphNodeType *type) { *type = node_of(n)->type; return CUDA_SUCCESS; }
EXPORT CUresult cuGraphMemsetNodeGetParams(CUgraphNode n, CUDA_MEMSET_NODE_PARAMS *p) { *p = node_of(n)->fill; return CUDA_SUCCESS; }
EXPORT CUresult cuGraphMemcpyNodeGetParams(CUgraphNode n, CUDA_MEMCPY3D *p) { *p = node_of(n)->copy; return CUDA_SUCCESS; }
EXPORT CUresult cuGraphAddDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count) {
  for (size_t i = 0; i < count; i++)
    node_of(to[i])->waits[node_of(to[i])->waiting++] = (int)(intptr_t)from[i] - FIRST_NODE - graph_of(graph) * PER_GRAPH;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGraphDestroyNode(CUgraphNode node) {
  int i = (int)(intptr_t)node - FIRST_NODE, g = i / PER_GRAPH;
  nodes_gone++;
  node_of(node)->type = GONE;
  for (int k = 0; k < counts[g]; k++)
    for (int w = 0; w < nodes[g][k].waiting; w++)
      if (nodes[g][k].waits[w] == i % PER_GRAPH) nodes[g][k].waits[w--] = nodes[g][k].waits[--nodes[g][k].waiting];
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGraphAddKernelNode_v2(CUgraphNode *n, CUgraph graph, const CUgraphNode *deps, size_t count,
                                        const CUDA_KERNEL_NODE_PARAMS *p) {
  if (fail_node) return (CUresult)fail_node;
  chained += count;
  nodes_added++;
  *n = new_node(graph_of(graph), deps, count);
  return fill_node(node_of(*n), p);
}
EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *e, CUgraph g, unsigned long long flags) {
  int made = (intptr_t)g >= FIRST_GRAPH;
  *e = (CUgraphExec)(made ? (intptr_t)graph_of(g) + FIRST_EXEC : (intptr_t)g);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec e, CUgraphNode n, const CUDA_KERNEL_NODE_PARAMS *p) {
  if (fail_set) return (CUresult)fail_set;
  nodes_set++;
  return fill_node(node_of(n), p);
}
EXPORT CUresult cuGraphExecDestroy(CUgraphExec e) { graphs_destroyed++; return CUDA_SUCCESS; }
EXPORT CUresult cuGraphDestroy(CUgraph g) { graphs_destroyed++; return CUDA_SUCCESS; }
EXPORT unsigned node_grid(int n) { return nodes[0][n].kernel.gridDimX; }
EXPORT unsigned long long node_word(int n, int i) {
  unsigned long long word = 0;
  memcpy(&word, nodes[0][n].bytes[i], param_sizes[i]);
  return word;
}
static void fill_now(const CUDA_MEMSET_NODE_PARAMS *p) {  /* elements of four bytes or less, little-endian */
  for (size_t i = 0; i < p->width; i++) memcpy((char *)(uintptr_t)p->dst + i * p->elementSize, &p->value, p->elementSize);
}
static void move_now(const struct node *n) {
  uint64_t words[3];
  for (int i = 0; i < 3; i++) memcpy(&words[i], n->bytes[i], 8);
  int width = mover_width(n->kernel.func);
  size_t threads = (size_t)n->kernel.gridDimX * n->kernel.blockDimX;
  for (uint64_t i = 0; i < words[2] && i < threads; i++)
    if ((intptr_t)n->kernel.func >> 8 == 0xC) memcpy((char *)words[0] + i * width, (char *)words[1] + i * width, width);
    else for (int k = 0; k < width; k++) ((char *)words[0])[i * width + k] = (char)(words[1] >> 8 * (k % 4));
}
static void run_node(CUgraph captured, const struct node *n) {
  if (n->type == FILL) running_fill++, fill_now(&n->fill);
  else if (n->type == COPY) running_copy++, memcpy((void *)(uintptr_t)n->copy.dstDevice, (void *)(uintptr_t)n->copy.srcDevice, n->copy.WidthInBytes);
  else if (!n->kernel.func) { replayed = captured; if (graph_body) graph_body(); }
  else if (mover_width(n->kernel.func)) move_now(n);
  else if ((intptr_t)n->kernel.func != IDLE) { calls_launch++; memcpy(param_bytes, n->bytes, sizeof param_bytes); }
}
EXPORT CUresult cuGraphLaunch(CUgraphExec graph, CUstream s) {
  if (fail_replay) return (CUresult)fail_replay;
  replays++; replayed = graph; replayed_on = s;
  if ((intptr_t)graph < FIRST_EXEC) {  /* as it was captured */
    if (captured_fill.dst) fill_now(&captured_fill);
    if (captured_copy.dstDevice) memcpy((void *)(uintptr_t)captured_copy.dstDevice, (void *)(uintptr_t)captured_copy.srcDevice, captured_copy.WidthInBytes);
    if (graph_body) graph_body();
    return CUDA_SUCCESS;
  }
  int g = (int)(intptr_t)graph - FIRST_EXEC, done[PER_GRAPH] = {0}, left = counts[g];
  while (left)  /* last made first, as far as what it waits for allows */
    for (int i = counts[g] - 1; i >= 0; i--) {
      int ready = !done[i];
      for (int k = 0; k < nodes[g][i].waiting; k++) ready &= done[nodes[g][i].waits[k]];
      if (!ready) continue;
      done[i] = 1; left--;
      if (nodes[g][i].type != GONE) run_node(captured_as[g], &nodes[g][i]);
    }
  return CUDA_SUCCESS;
}
EXPORT int nodes_of_other_kinds(void) { return running_fill + running_copy; }
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
EXPORT int size_kernel_node = sizeof(CUDA_KERNEL_NODE_PARAMS), size_fill = sizeof(CUDA_MEMSET_NODE_PARAMS), size_copy = sizeof(CUDA_MEMCPY3D);
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
