/* Graphs of cuDNN's back-end API. */
#include "kernels/cuda/cudnn_graph.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.h"

CudnnGraph *graph_create(const Cudnn *dnn, int64_t first_free_uid) {
  CudnnGraph *g = static_cast<CudnnGraph *>(mem_zalloc(1, sizeof *g));
  g->dnn = dnn;
  g->next_uid = first_free_uid;
  return g;
}

void graph_free(CudnnGraph *g) {
  if (!g) return;
  while (g->n_descs > 0) g->dnn->cudnnBackendDestroyDescriptor(g->descs[--g->n_descs]);
  free(g);
}

GraphShape graph_packed(int64_t a, int64_t b, int64_t c, int64_t d) {
  return {{a, b, c, d}, {b * c * d, c * d, d, 1}};
}

GraphShape graph_transposed(GraphShape s) {
  return {{s.dim[0], s.dim[1], s.dim[3], s.dim[2]},
          {s.stride[0], s.stride[1], s.stride[3], s.stride[2]}};
}

static bool accept(CudnnGraph *g, cudnnStatus_t status, const char *what) {
  if (status == CUDNN_STATUS_SUCCESS) return true;
  if (g->error[0]) return false;
  char last[384] = "";
  g->dnn->cudnnGetLastErrorString(last, sizeof last);
  snprintf(g->error, sizeof g->error, "%s: %s: %s", what, g->dnn->cudnnGetErrorString(status),
           last);
  return false;
}

static cudnnBackendDescriptor_t create(CudnnGraph *g, cudnnBackendDescriptorType_t type,
                                       const char *what) {
  cudnnBackendDescriptor_t d = nullptr;
  require(g->n_descs < GRAPH_DESCRIPTORS);
  if (g->error[0] || !accept(g, g->dnn->cudnnBackendCreateDescriptor(type, &d), what))
    return nullptr;
  g->descs[g->n_descs++] = d;
  return d;
}

static void set(CudnnGraph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                cudnnBackendAttributeType_t type, int64_t n, const void *value, const char *what) {
  if (!g->error[0]) accept(g, g->dnn->cudnnBackendSetAttribute(d, name, type, n, value), what);
}

static void set_int(CudnnGraph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                    int64_t value, const char *what) {
  set(g, d, name, CUDNN_TYPE_INT64, 1, &value, what);
}

static void set_type(CudnnGraph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                     cudnnDataType_t value, const char *what) {
  set(g, d, name, CUDNN_TYPE_DATA_TYPE, 1, &value, what);
}

static void set_bool(CudnnGraph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                     const char *what) {
  bool yes = true;
  set(g, d, name, CUDNN_TYPE_BOOLEAN, 1, &yes, what);
}

/* Absent where the child is. */
static void set_desc(CudnnGraph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                     cudnnBackendDescriptor_t child, const char *what) {
  if (child) set(g, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &child, what);
}

static void finalize(CudnnGraph *g, cudnnBackendDescriptor_t d, const char *what) {
  if (!g->error[0]) accept(g, g->dnn->cudnnBackendFinalize(d), what);
}

static cudnnBackendDescriptor_t start_tensor(CudnnGraph *g, int64_t uid, cudnnDataType_t type,
                                             GraphShape s, const char *what) {
  cudnnBackendDescriptor_t d = create(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR, what);
  set_type(g, d, CUDNN_ATTR_TENSOR_DATA_TYPE, type, what);
  set(g, d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, s.dim, what);
  set(g, d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, s.stride, what);
  set_int(g, d, CUDNN_ATTR_TENSOR_UNIQUE_ID, uid, what);
  set_int(g, d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, 16, what);
  return d;
}

GraphTensor graph_tensor(CudnnGraph *g, int64_t uid, cudnnDataType_t type, GraphShape shape,
                         GraphTensor ragged) {
  char what[48];
  snprintf(what, sizeof what, "tensor %d", static_cast<int>(uid));
  cudnnBackendDescriptor_t d = start_tensor(g, uid, type, shape, what);
  set_desc(g, d, CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC, ragged.desc, what);
  finalize(g, d, what);
  return {d, shape};
}

GraphTensor graph_virtual(CudnnGraph *g, cudnnDataType_t type, GraphShape shape) {
  cudnnBackendDescriptor_t d = start_tensor(g, g->next_uid++, type, shape, "virtual tensor");
  set_bool(g, d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, "virtual tensor");
  finalize(g, d, "virtual tensor");
  return {d, shape};
}

GraphTensor graph_scalar(CudnnGraph *g, float value) {
  GraphShape one = {{1, 1, 1, 1}, {1, 1, 1, 1}};
  require(g->n_scalars < GRAPH_SCALARS);
  g->scalar[g->n_scalars] = value;
  g->scalar_uid[g->n_scalars++] = g->next_uid;
  cudnnBackendDescriptor_t d = start_tensor(g, g->next_uid++, CUDNN_DATA_FLOAT, one, "scalar");
  set_bool(g, d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, "scalar");
  finalize(g, d, "scalar");
  return {d, one};
}

static void add_op(CudnnGraph *g, cudnnBackendDescriptor_t op, const char *what) {
  finalize(g, op, what);
  require(g->n_ops < GRAPH_OPS);
  g->ops[g->n_ops++] = op;
}

static void add_pointwise(CudnnGraph *g, cudnnPointwiseMode_t mode, cudnnDataType_t compute,
                          int64_t axis, GraphTensor x, GraphTensor b, GraphTensor t,
                          GraphTensor y) {
  char what[48];
  snprintf(what, sizeof what, "operation %d: pointwise mode %d", g->n_ops, static_cast<int>(mode));
  cudnnBackendDescriptor_t p = create(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR, what);
  set(g, p, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode, what);
  set_type(g, p, CUDNN_ATTR_POINTWISE_MATH_PREC, compute, what);
  if (mode == CUDNN_POINTWISE_GEN_INDEX) set_int(g, p, CUDNN_ATTR_POINTWISE_AXIS, axis, what);
  finalize(g, p, what);
  cudnnBackendDescriptor_t op = create(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, what);
  set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, p, what);
  set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x.desc, what);
  set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b.desc, what);
  set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t.desc, what);
  set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y.desc, what);
  add_op(g, op, what);
}

GraphTensor graph_pointwise(CudnnGraph *g, cudnnPointwiseMode_t mode, cudnnDataType_t type,
                            GraphTensor x, GraphTensor b, GraphTensor t) {
  GraphTensor y = graph_virtual(g, type, x.shape);
  add_pointwise(g, mode, type, -1, x, b, t, y);
  return y;
}

void graph_pointwise_to(CudnnGraph *g, cudnnPointwiseMode_t mode, GraphTensor x, GraphTensor b,
                        GraphTensor y) {
  add_pointwise(g, mode, CUDNN_DATA_FLOAT, -1, x, b, {}, y);
}

GraphTensor graph_index(CudnnGraph *g, GraphTensor x, int64_t axis) {
  GraphTensor y = graph_virtual(g, CUDNN_DATA_INT32, x.shape);
  add_pointwise(g, CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_INT32, axis, x, {}, {}, y);
  return y;
}

void graph_reduce_to(CudnnGraph *g, cudnnReduceTensorOp_t mode, GraphTensor x, GraphTensor y) {
  char what[48];
  snprintf(what, sizeof what, "operation %d: reduction", g->n_ops);
  cudnnBackendDescriptor_t r = create(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR, what);
  set_type(g, r, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT, what);
  set(g, r, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &mode, what);
  finalize(g, r, what);
  cudnnBackendDescriptor_t op = create(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, what);
  set_desc(g, op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, r, what);
  set_desc(g, op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x.desc, what);
  set_desc(g, op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y.desc, what);
  add_op(g, op, what);
}

void graph_reshape_to(CudnnGraph *g, GraphTensor x, GraphTensor y) {
  char what[48];
  snprintf(what, sizeof what, "operation %d: reshape", g->n_ops);
  cudnnBackendDescriptor_t op = create(g, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, what);
  set_desc(g, op, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x.desc, what);
  set_desc(g, op, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y.desc, what);
  add_op(g, op, what);
}

void graph_matmul_to(CudnnGraph *g, GraphTensor a, GraphTensor b, GraphTensor c, GraphLengths len) {
  char what[48];
  snprintf(what, sizeof what, "operation %d: product", g->n_ops);
  cudnnBackendDescriptor_t m = create(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR, what);
  set_type(g, m, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT, what);
  finalize(g, m, what);
  cudnnBackendDescriptor_t op = create(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, what);
  set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_DESC, m, what);
  set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a.desc, what);
  set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b.desc, what);
  set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c.desc, what);
  set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC, len.m.desc, what);
  set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC, len.n.desc, what);
  set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC, len.k.desc, what);
  add_op(g, op, what);
}

static int64_t get_int(CudnnGraph *g, cudnnBackendDescriptor_t d,
                       cudnnBackendAttributeName_t name) {
  int64_t n = 0, value = -1;
  g->dnn->cudnnBackendGetAttribute(d, name, CUDNN_TYPE_INT64, 1, &n, &value);
  return value;
}

/* The kernel configuration that a proposal chooses; -1: none. */
static int64_t kernel_of(CudnnGraph *g, cudnnBackendDescriptor_t config) {
  enum { KNOBS = 16 };
  cudnnBackendDescriptor_t knob[KNOBS];
  for (int i = 0; i < KNOBS; i++) knob[i] = create(g, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR, "knob");
  int64_t n = 0, kernel = -1;
  g->dnn->cudnnBackendGetAttribute(config, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES,
                                   CUDNN_TYPE_BACKEND_DESCRIPTOR, KNOBS, &n, knob);
  for (int64_t i = 0; i < n && i < KNOBS; i++) {
    int64_t one = 0;
    cudnnBackendKnobType_t type = CUDNN_KNOB_TYPE_COUNTS;
    g->dnn->cudnnBackendGetAttribute(knob[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE,
                                     CUDNN_TYPE_KNOB_TYPE, 1, &one, &type);
    if (type == CUDNN_KNOB_TYPE_KERNEL_CFG)
      kernel = get_int(g, knob[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE);
  }
  return kernel;
}

/* "engine 2, kernel 26": what cuDNN calls it, for people who compare versions. */
static void describe_engine(CudnnGraph *g, cudnnBackendDescriptor_t config) {
  int64_t n = 0;
  cudnnBackendDescriptor_t engine = create(g, CUDNN_BACKEND_ENGINE_DESCRIPTOR, "engine");
  g->dnn->cudnnBackendGetAttribute(config, CUDNN_ATTR_ENGINECFG_ENGINE,
                                   CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &n, &engine);
  snprintf(g->engine, sizeof g->engine, "engine %d, kernel %d",
           static_cast<int>(get_int(g, engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX)),
           static_cast<int>(kernel_of(g, config)));
}

static bool build_plan(CudnnGraph *g, cudnnHandle_t handle, cudnnBackendDescriptor_t config) {
  cudnnBackendDescriptor_t plan = create(g, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, "plan");
  set(g, plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle, "plan");
  set_desc(g, plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config, "plan");
  finalize(g, plan, "plan");
  int64_t n = 0;
  if (!g->error[0])
    accept(g,
           g->dnn->cudnnBackendGetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                            CUDNN_TYPE_INT64, 1, &n, &g->workspace),
           "workspace");
  if (g->error[0]) return false;
  g->plan = plan;
  describe_engine(g, config);
  return true;
}

bool graph_build(CudnnGraph *g, cudnnHandle_t handle, int64_t liked) {
  enum { PROPOSALS = 8 };
  cudnnBackendDescriptor_t graph =
      create(g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, "operation graph");
  set(g, graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle, "operation graph");
  set(g, graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, g->n_ops, g->ops,
      "operation graph");
  finalize(g, graph, "operation graph");
  cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
  cudnnBackendDescriptor_t heur = create(g, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, "heuristics");
  set_desc(g, heur, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph, "heuristics");
  set(g, heur, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode, "heuristics");
  finalize(g, heur, "heuristics");
  cudnnBackendDescriptor_t config[PROPOSALS];
  for (int i = 0; i < PROPOSALS; i++)
    config[i] = create(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, "engine configuration");
  int64_t n = 0;
  if (!g->error[0])
    accept(g,
           g->dnn->cudnnBackendGetAttribute(heur, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                            CUDNN_TYPE_BACKEND_DESCRIPTOR, PROPOSALS, &n, config),
           "heuristics");
  if (g->error[0]) return false;
  if (n == 0) snprintf(g->error, sizeof g->error, "cuDNN proposes no engine");
  if (n > PROPOSALS) n = PROPOSALS;
  for (int turn = liked == ANY_KERNEL; turn < 2; turn++)
    for (int64_t i = 0; i < n && !g->plan; i++) {
      g->error[0] = '\0'; /* of the proposal before */
      if (turn > 0 || kernel_of(g, config[i]) == liked) build_plan(g, handle, config[i]);
    }
  return g->plan != nullptr;
}

bool graph_run(CudnnGraph *g, cudnnHandle_t handle, int n, const int64_t *uids, void *const *data,
               void *workspace) {
  enum { MOST = 32 };
  int64_t all_uids[MOST];
  void *all[MOST];
  require(n + g->n_scalars <= MOST);
  memcpy(all_uids, uids, sizeof *uids * static_cast<size_t>(n));
  memcpy(all, data, sizeof *data * static_cast<size_t>(n));
  for (int i = 0; i < g->n_scalars; i++) {
    all_uids[n + i] = g->scalar_uid[i];
    all[n + i] = &g->scalar[i];
  }
  int total = n + g->n_scalars, kept = g->n_descs;
  cudnnBackendDescriptor_t pack = create(g, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, "variant pack");
  set(g, pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, total, all_uids,
      "variant pack");
  set(g, pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, total, all,
      "variant pack");
  set(g, pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace,
      "variant pack");
  finalize(g, pack, "variant pack");
  if (!g->error[0]) accept(g, g->dnn->cudnnBackendExecute(handle, g->plan, pack), "execution");
  while (g->n_descs > kept) g->dnn->cudnnBackendDestroyDescriptor(g->descs[--g->n_descs]);
  return !g->error[0];
}
