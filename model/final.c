/* Behind the last block: the last residual sum, the final norm, and the projection to the width of
 * the embedding, as far as the model has them. */
#include "model/internal.h"

FinalActs final_forward(Model *m, Tensor x_NC, Tensor delta_NC, bool backward_follows) {
  const HeadParams *p = &m->params.head;
  int64_t n = x_NC.dim[0];
  FinalActs f = {.norm_NC = x_NC};
  if (p->norm.weight >= 0) {
    f.norm_NC = push_act(m, n, m->config.hidden);
    if (backward_follows) f.stats = norm_stats_push(m, n);
    norm_forward(m, p->norm, x_NC, delta_NC, f.norm_NC, f.stats);
  } else if (delta_NC.data) {
    m->ops->axpy(m->device, 1, delta_NC, x_NC);
  }
  f.h_NE = f.norm_NC;
  if (p->project_out >= 0) {
    f.h_NE = push_act(m, n, embed_width(&m->config));
    linear(m, f.norm_NC, p->project_out, -1, 1, f.h_NE);
  }
  return f;
}

void final_backward(Model *m, const FinalActs *f, Tensor x_NC, Tensor dh_NE, Tensor dx_NC) {
  const HeadParams *p = &m->params.head;
  bool norm = p->norm.weight >= 0;
  ArenaMark mark = arena_mark(m->arena);
  Tensor dnorm_NC = dh_NE;
  if (p->project_out >= 0) {
    dnorm_NC = norm ? push_act(m, x_NC.dim[0], m->config.hidden) : dx_NC;
    linear_backward_weight(m, dh_NE, f->norm_NC, p->project_out, -1, 1);
    linear_backward_input(m, dh_NE, p->project_out, 1, 0, dnorm_NC);
  }
  if (norm || p->project_out < 0) device_zero(m->device, dx_NC.data, tensor_bytes(dx_NC));
  if (norm)
    norm_backward(m, p->norm, dnorm_NC, x_NC, f->stats, dx_NC);
  else if (p->project_out < 0)
    m->ops->axpy(m->device, 1, dh_NE, dx_NC);
  arena_pop(m->arena, mark);
}
