/* rlhf inspect: what a checkpoint folder holds. Every part is looked at on its own, so that an
 * incomplete folder shows what is there and what is missing. */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "core/fs.h"
#include "orchestrator/cli.h"

enum { MOST_MISSING = 20 };

static void field(const char *name) { printf("%-12s ", name); }

static void print_count(int64_t n) { /* 1,234,567 */
  char s[32];
  int len = snprintf(s, sizeof s, "%lld", (long long)n);
  for (int i = 0; i < len; i++) {
    if (i > 0 && (len - i) % 3 == 0) putchar(',');
    putchar(s[i]);
  }
}

static void print_eos(const ModelConfig *c) {
  field("tokens");
  if (c->bos_id >= 0) printf("BOS %d, ", c->bos_id);
  printf("EOS");
  for (int i = 0; i < c->n_eos; i++) printf("%s %d", i ? "," : "", c->eos_ids[i]);
  printf("%s", c->n_eos ? "" : " none");
  if (c->pad_id >= 0) printf(", pad %d", c->pad_id);
  putchar('\n');
}

static void print_rope(const ModelConfig *c) {
  field("positions");
  printf("%d, ", c->max_positions);
  if (c->rope == ROPE_NONE)
    printf("learned");
  else
    printf("rotary base %g", c->rope_theta);
  if (c->rotary_dim) printf(" on %d of %d channels", c->rotary_dim, c->head_dim);
  if (c->rope == ROPE_DYNAMIC)
    printf(", dynamic scaling by %g from %d", c->rope_factor, c->rope_original_positions);
  if (c->rope == ROPE_LONGROPE) printf(", longrope from %d", c->rope_original_positions);
  if (c->rope == ROPE_LINEAR) printf(", linear scaling by %g", c->rope_factor);
  if (c->rope == ROPE_LLAMA3)
    printf(", llama3 scaling by %g (low %g, high %g, from %d)", c->rope_factor, c->rope_low_freq,
           c->rope_high_freq, c->rope_original_positions);
  if (c->window > 0) printf(", window %d", c->window);
  putchar('\n');
}

static void print_config(const ModelConfig *c) {
  field("family");
  puts(c->family);
  field("head");
  if (c->head == HEAD_SCALAR)
    puts("scalar (reward model or critic)");
  else
    printf("language model, %s\n", c->tied_head ? "tied to the embedding" : "untied");
  field("sizes");
  printf("%d layers, hidden %d, %d heads of %d, %d key/value heads, MLP %d\n", c->n_layers,
         c->hidden, c->n_heads, c->head_dim, c->n_kv_heads, c->ffn);
  field("biases");
  printf("%s%s%s%s\n", c->qkv_bias ? "q, k, v " : "", c->o_bias ? "attention output " : "",
         c->mlp_bias ? "MLP" : "", c->qkv_bias || c->o_bias || c->mlp_bias ? "" : "none");
  field("vocabulary");
  printf("%d\n", c->vocab_size);
  print_rope(c);
  field("parameters");
  print_count(model_config_params(c, c->head));
  putchar('\n');
  field("dtype");
  printf("%s by config.json\n", dtype_name(c->dtype));
  print_eos(c);
}

/* ---- tensors ---- */

/* Tensors of one shape and type whose names differ in their numbers only. */
typedef struct Pattern {
  char name[256];
  const StEntry *first;
  int n;
} Pattern;

static void pattern_of(const char *name, char *out, size_t size) {
  size_t n = 0;
  while (*name && n + 1 < size) {
    if (isdigit((unsigned char)*name)) {
      while (isdigit((unsigned char)*name)) name++;
      out[n++] = '*';
    } else {
      out[n++] = *name++;
    }
  }
  out[n] = 0;
}

static bool same_kind(const Pattern *p, const char *name, const StEntry *e) {
  return !strcmp(p->name, name) && p->first->dtype == e->dtype && p->first->ndim == e->ndim &&
         !memcmp(p->first->dim, e->dim, (size_t)e->ndim * sizeof *e->dim);
}

static void print_pattern(const Pattern *p) {
  field("");
  printf("%-4s [", dtype_name(p->first->dtype));
  for (int k = 0; k < p->first->ndim; k++)
    printf("%s%lld", k ? ", " : "", (long long)p->first->dim[k]);
  printf("]%s ", p->first->ndim ? "" : " (scalar)");
  if (p->n > 1)
    printf("%d x %s\n", p->n, p->name);
  else
    puts(p->first->name);
}

static void print_tensors(const StSet *set) {
  Pattern *v = NULL;
  int n = 0;
  int64_t elements = 0;
  for (int i = 0; i < stset_count(set); i++) {
    const StEntry *e = stset_entry(set, i, NULL);
    char name[sizeof v->name];
    int k = 0;
    pattern_of(e->name, name, sizeof name);
    elements += e->numel;
    while (k < n && !same_kind(&v[k], name, e)) k++;
    if (k == n) {
      v = mem_grow(v, (size_t)++n, sizeof *v);
      v[k] = (Pattern){.first = e};
      memcpy(v[k].name, name, sizeof name);
    }
    v[k].n++;
  }
  field("tensors");
  printf("%d with ", stset_count(set));
  print_count(elements);
  puts(" elements");
  for (int k = 0; k < n; k++) print_pattern(&v[k]);
  free(v);
}

/* Tensors that the config asks for; a scalar head has several names, model_check knows them. */
static int print_missing(const ModelConfig *c, const StSet *set) {
  ParamSpec *specs;
  int n = model_specs(c, c->head, &specs), missing = 0;
  for (int i = 0; i < n; i++) {
    TensorPlace at = model_place(c, &specs[i]);
    if (at.first > 0 || !strncmp(at.name, "score.", 6)) continue; /* once for a fused tensor */
    const char *bare = strchr(at.name, '.'); /* trunks are also published without their prefix */
    if (stset_find(set, at.name, NULL) || (bare && stset_find(set, bare + 1, NULL))) continue;
    if (missing++ >= MOST_MISSING) continue;
    field("missing");
    printf("tensor %s\n", at.name);
  }
  if (missing > MOST_MISSING) {
    field("missing");
    printf("and %d more tensors\n", missing - MOST_MISSING);
  }
  free(specs);
  return missing;
}

/* ---- the rest of the folder ---- */

static void print_tokenizer(const char *dir, const ModelConfig *c) {
  Error err = {""};
  Tokenizer *t = tokenizer_load(dir, &err);
  if (!t) {
    field("missing");
    puts(err.msg);
    return;
  }
  field("tokenizer");
  printf("%s, %d tokens", tokenizer_kind(t), tokenizer_vocab_size(t));
  if (tokenizer_bos(t) >= 0)
    printf(", BOS %d (%s)", tokenizer_bos(t), tokenizer_adds_bos(t) ? "put first" : "not added");
  if (tokenizer_eos(t) >= 0) printf(", EOS %d", tokenizer_eos(t));
  if (c && tokenizer_vocab_size(t) > c->vocab_size)
    printf("; more than the model's vocabulary of %d", c->vocab_size);
  putchar('\n');
  tokenizer_free(t);
}

static void print_scores(const char *dir) {
  ScoreNorm norm = {0};
  Error err = {""};
  if (score_norm_read(dir, &norm, &err) || !norm.known) return;
  field("scores");
  printf("mean %g, deviation %g over pairs of the training data\n", norm.mean, norm.std);
}

static int inspect(const char *dir, Error *err) {
  ModelConfig c, checked;
  Error why = {""};
  if (!fs_is_dir(dir)) return error_set(err, "%s: no such folder", dir);
  field("folder");
  puts(dir);
  bool configured = model_config_read(dir, &c, &why) == 0;
  if (configured) print_config(&c);
  StSet *set = stset_open(dir, configured ? &why : NULL);
  if (set) print_tensors(set);
  if (configured && set) print_missing(&c, set);
  print_tokenizer(dir, configured ? &c : NULL);
  if (configured && c.head == HEAD_SCALAR) print_scores(dir);
  ModelOptions o = {.head = configured ? c.head : HEAD_LM};
  bool loads = configured && set && model_check(dir, &o, &checked, &why) == 0;
  field("loads");
  printf("%s\n", loads ? "yes" : "no");
  if (set) stset_close(set);
  return loads ? 0 : error_set(err, "%s", why.msg);
}

static CliResult run_inspect(const Args *a, Error *err) {
  if (launch_rank() > 0) return CLI_OK;
  int rc = inspect(a->operand[0], err);
  Error out = {""};
  if (out_flush(&out)) rc = error_set(err, "%s", out.msg);
  return rc ? CLI_FAILED : CLI_OK;
}

const Command command_inspect = {
    .name = "inspect",
    .operands = "DIR",
    .help =
        "what a checkpoint holds, and what it lacks\n"
        "Family, sizes, parameters, tensors, head, tokenizer. Fails when the folder does not load.",
    .example = "rlhf inspect runs/demo/actor",
    .min_operands = 1,
    .max_operands = 1,
    .run = run_inspect};
