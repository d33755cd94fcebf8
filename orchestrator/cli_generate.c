/* rlhf generate: answers to prompts. A sample depends on (seed, line, sample) and not on what else
 * is generated beside it, nor on the number of ranks. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "orchestrator/cli.h"

enum { GROUP_SEQUENCES = 256, GROUP_TOKENS = 1 << 16 };

typedef struct Generation {
  Engine e;
  Chat *chat; /* of --chat */
  GenParams params;
  int samples;
  int64_t lines; /* prompts of earlier groups */
  bool warned;
} Generation;

/* ---- one group of prompts over all ranks ---- */

/* Request r is sample r % samples of prompt r / samples; rank r % world generates it. */
static int own_requests(const Generation *g, const Sequences *s, GenRequest **out) {
  int n = 0, all = s->n * g->samples, world = g->e.grid->world;
  *out = mem_alloc((size_t)(all / world) + 1, sizeof **out);
  for (int r = g->e.grid->rank; r < all; r += world) {
    int i = r / g->samples;
    (*out)[n++] = (GenRequest){.prompt = s->tokens.v + s->offsets[i],
                               .prompt_len = s->offsets[i + 1] - s->offsets[i],
                               .prompt_id = (int)(g->lines + i),
                               .sample_id = r % g->samples};
  }
  return n;
}

/* All requests' answers on every rank, from each rank's own. Sums of zeros and one value are exact.
 */
static GenResult *share_results(Comm *c, const GenResult *own, int all) {
  int world = comm_size(c), rank = comm_rank(c), longest = 0;
  double *head = mem_zalloc((size_t)all, 2 * sizeof *head);
  for (int r = rank, i = 0; r < all; r += world, i++) {
    head[2 * r] = own[i].n;
    head[2 * r + 1] = own[i].ended;
  }
  comm_all_reduce_f64(c, head, 2 * all, false);
  for (int r = 0; r < all; r++) longest = (int)head[2 * r] > longest ? (int)head[2 * r] : longest;
  double *row = mem_alloc((size_t)longest, 2 * sizeof *row);
  GenResult *out = mem_zalloc((size_t)all, sizeof *out);
  for (int r = 0; r < all; r++) {
    int n = (int)head[2 * r];
    const GenResult *mine = r % world == rank ? &own[r / world] : NULL;
    for (int t = 0; t < n; t++) {
      row[t] = mine ? mine->tokens[t] : 0;
      row[n + t] = mine ? (double)mine->logprobs[t] : 0;
    }
    comm_all_reduce_f64(c, row, 2 * n, false);
    out[r] = (GenResult){.tokens = mem_alloc((size_t)n, sizeof(int32_t)),
                         .logprobs = mem_alloc((size_t)n, sizeof(float)),
                         .n = n,
                         .ended = head[2 * r + 1] > 0};
    for (int t = 0; t < n; t++) {
      out[r].tokens[t] = (int32_t)row[t];
      out[r].logprobs[t] = (float)row[n + t];
    }
  }
  free(row);
  free(head);
  return out;
}

/* ---- printing ---- */

static void put_text(const char *s, size_t len) {
  if (s)
    json_put_str(stdout, s, len);
  else
    fputs("null", stdout);
}

/* The text that the answer adds to the prompt's: leading spaces are part of it. NULL when an id has
 * no text: the model's vocabulary may be larger than the tokenizer's. */
static char *answer_text(Generation *g, const int32_t *prompt, int prompt_len, const GenResult *r,
                         size_t *len) {
  Error err = {""};
  if (!g->e.tokenizer) return NULL;
  int n = prompt_len + r->n;
  int32_t *ids = mem_alloc((size_t)n, sizeof *ids);
  memcpy(ids, prompt, (size_t)prompt_len * sizeof *ids);
  memcpy(ids + prompt_len, r->tokens, (size_t)r->n * sizeof *ids);
  size_t before = 0, whole = 0;
  char *head = tokenizer_decode(g->e.tokenizer, ids, prompt_len, &before, &err);
  char *text = head ? tokenizer_decode(g->e.tokenizer, ids, n, &whole, &err) : NULL;
  if (text) {
    *len = whole - before;
    memmove(text, text + before, *len + 1);
  } else if (!g->warned) {
    log_warn("an answer has no text: %s", err.msg);
    g->warned = true;
  }
  free(head);
  free(ids);
  return text;
}

static void print_answer(Generation *g, const Sequences *s, int i, const GenResult *r) {
  const int32_t *prompt = s->tokens.v + s->offsets[i];
  int prompt_len = s->offsets[i + 1] - s->offsets[i];
  size_t given = s->text_len[i], len = 0;
  char *decoded = NULL;
  if (!s->text[i] && g->e.tokenizer)
    decoded = tokenizer_decode(g->e.tokenizer, prompt, prompt_len, &given, NULL);
  char *text = answer_text(g, prompt, prompt_len, r, &len);
  fputs("{\"prompt\":", stdout);
  put_text(s->text[i] ? s->text[i] : decoded, given);
  fputs(",\"text\":", stdout);
  put_text(text, len);
  fputs(",\"tokens\":", stdout);
  json_put_i32_array(stdout, r->tokens, (size_t)r->n);
  fputs(",\"logprobs\":", stdout);
  json_put_f32_array(stdout, r->logprobs, (size_t)r->n);
  printf(",\"finish\":\"%s\"}\n", r->ended ? "eos" : "length");
  free(text);
  free(decoded);
}

/* ---- the loop ---- */

static int generate_group(Generation *g, const Sequences *s, Error *err) {
  GenRequest *req;
  GenStats stats;
  int n = own_requests(g, s, &req), all = s->n * g->samples;
  GenResult *own = mem_zalloc((size_t)n, sizeof *own);
  int rc = generate(g->e.model, &g->params, req, n, own, &stats, err);
  if (!rc) {
    GenResult *every = share_results(g->e.grid->all, own, all);
    for (int r = 0; r < all && g->e.grid->rank == 0; r++)
      print_answer(g, s, r / g->samples, &every[r]);
    gen_results_free(every, all);
    free(every);
  }
  gen_results_free(own, n);
  free(own);
  free(req);
  g->lines += s->n;
  return rc;
}

/* Prompts that were read before a bad one are answered all the same. */
static int next_group(Generation *g, Input *in, Sequences *s, Error *err) {
  int most = GROUP_SEQUENCES / g->samples, rc = 0;
  if (in) rc = input_next(in, most > 0 ? most : 1, GROUP_TOKENS, s, err);
  sequences_share(g->e.grid->all, s, &rc);
  Error late = {""};
  if (s->n > 0 && generate_group(g, s, &late)) rc = rc ? rc : error_set(err, "%s", late.msg);
  if (g->e.grid->rank == 0 && out_flush(&late)) rc = rc ? rc : error_set(err, "%s", late.msg);
  return comm_agree(g->e.grid->all, rc, err);
}

static InputLimits prompt_limits(const Model *m) {
  const ModelConfig *c = model_config(m);
  return (InputLimits){c->vocab_size, c->max_positions - 1,
                       "which leaves room for an answer within the model's positions"};
}

static int generate_all(Generation *g, const Args *a, const char *input, Error *err) {
  InputLimits limits = prompt_limits(g->e.model);
  Sequences s = {0};
  Input *in = NULL;
  int rc = 0;
  if (g->e.grid->rank == 0 && !strcmp(input, "--prompt"))
    rc = sequences_from_text(args_text(a, input), g->e.tokenizer, g->chat, limits, &s, err);
  else if (g->e.grid->rank == 0)
    in = input_open(args_text(a, input), !strcmp(input, "--text"), g->e.tokenizer, g->chat, limits,
                    err);
  if (g->e.grid->rank == 0 && strcmp(input, "--prompt") != 0 && !in) rc = -1;
  rc = comm_agree(g->e.grid->all, rc, err);
  if (!rc) {
    do rc = next_group(g, in, &s, err);
    while (!rc && !s.end);
  }
  sequences_free(&s);
  input_close(in);
  return rc;
}

static GenParams params_from(const Args *a, const ModelConfig *c) {
  GenParams p = {.sample = {.temperature = (float)args_float(a, "--temperature"),
                            .top_k = (int)args_int(a, "--top-k"),
                            .top_p = (float)args_float(a, "--top-p"),
                            .min_p = (float)args_float(a, "--min-p"),
                            .repetition_penalty = (float)args_float(a, "--repetition-penalty"),
                            .greedy = args_given(a, "--greedy")},
                 .max_new_tokens = (int)args_int(a, "--max-new-tokens"),
                 .n_eos = c->n_eos,
                 .seed = (uint64_t)args_int(a, "--seed")};
  memcpy(p.eos_ids, c->eos_ids, sizeof p.eos_ids);
  return p;
}

/* Prompts become what a user says; an answer also ends where the template ends its turn. */
static int open_chat(Generation *g, const char *dir, Error *err) {
  g->chat = chat_open("auto", dir, g->e.tokenizer, err);
  if (!g->chat) return error_prefix(err, "--chat");
  int end = chat_end_token(g->chat);
  return end < 0 ? 0 : model_add_eos(g->e.model, end, err);
}

static CliResult check_args(const Args *a, const char *input, Error *err) {
  static const char *const of_sampling[] = {"--temperature", "--top-k", "--top-p", "--min-p",
                                            "--samples"};
  if (!args_given(a, "--model")) {
    error_set(err, "expected --model DIR");
    return CLI_USAGE;
  }
  if (args_given(a, "--chat") && !strcmp(input, "--tokens")) {
    error_set(err, "found --chat with --tokens; expected it with --prompt or --text");
    return CLI_USAGE;
  }
  for (size_t i = 0; i < sizeof of_sampling / sizeof *of_sampling && args_given(a, "--greedy"); i++)
    if (args_given(a, of_sampling[i])) {
      error_set(err, "found %s with --greedy; expected one of them", of_sampling[i]);
      return CLI_USAGE;
    }
  return CLI_OK;
}

static CliResult run_generate(const Args *a, Error *err) {
  const char *input = args_one_of(a, "--prompt --text --tokens", err);
  if (!input || check_args(a, input, err)) return CLI_USAGE;
  Generation g = {.samples = (int)args_int(a, "--samples")};
  TokenizerNeed need = strcmp(input, "--tokens") ? TOKENIZER_NEEDED : TOKENIZER_IF_THERE;
  EngineOptions o = {.dir = args_text(a, "--model"), .head = HEAD_LM, .need = need};
  GenParams kind;
  if (args_device(a, &o.device, &o.precision, err) || args_weights(a, &kind, err)) return CLI_USAGE;
  int rc = engine_open(&g.e, &o, err);
  if (!rc && model_rollout_check(g.e.model, kind.weights, kind.format, err))
    rc = error_prefix(err, "--format");
  if (!rc && args_given(a, "--chat"))
    rc = comm_agree(g.e.grid->all, open_chat(&g, args_text(a, "--model"), err), err);
  if (!rc) {
    g.params = params_from(a, model_config(g.e.model));
    g.params.weights = kind.weights;
    g.params.format = kind.format;
    rc = generate_all(&g, a, input, err);
  }
  chat_free(g.chat);
  engine_close(&g.e);
  return rc ? CLI_FAILED : CLI_OK;
}

const Command command_generate = {
    .name = "generate",
    .operands = "",
    .help =
        "answers to prompts\n"
        "Writes a line {\"prompt\", \"text\", \"tokens\", \"logprobs\", \"finish\": \"eos\" or "
        "\"length\"} for "
        "each\nsample. tokens are the answer's, its EOS included; logprobs are of what was sampled "
        "from (of the\nsoftmax without filters with --greedy). Every EOS id of "
        "generation_config.json ends "
        "an "
        "answer.",
    .example =
        "rlhf generate --model DIR --prompt 'Once upon a time' --temperature 0.8 --samples 3",
    .options = {{"--model", OPT_TEXT, "DIR", "a Hugging Face folder", .dflt = NULL},
                {"--prompt", OPT_TEXT, "TEXT", "one prompt", .dflt = NULL},
                {"--text", OPT_TEXT, "FILE",
                 "JSON Lines of {\"text\": \"..\"}; - is standard input", .dflt = NULL},
                {"--tokens", OPT_TEXT, "FILE",
                 "JSON Lines of {\"tokens\": [..]}; - is standard input", .dflt = NULL},
                {"--chat", OPT_FLAG, NULL, "put prompts, as a user, into the chat template",
                 .dflt = NULL},
                {"--max-new-tokens", OPT_INT, "N", "longest answer", 1, INT_MAX, .dflt = "128"},
                {"--temperature", OPT_FLOAT, "X", "of sampling", 0.001, 1e6, .dflt = "1"},
                {"--top-k", OPT_INT, "N", "sample among the likeliest N; 0: all", 0, INT_MAX,
                 .dflt = "0"},
                {"--top-p", OPT_FLOAT, "X", "sample among the likeliest with this much probability",
                 0.0001, 1, .dflt = "1"},
                {"--min-p", OPT_FLOAT, "X",
                 "sample among those at least so many times as likely as the likeliest; 0: all", 0,
                 1, .dflt = "0"},
                {"--repetition-penalty", OPT_FLOAT, "X",
                 "of tokens that prompt or answer have had; 1: none", 0.01, 100, .dflt = "1"},
                {"--greedy", OPT_FLAG, NULL, "always the likeliest token", .dflt = NULL},
                {"--seed", OPT_INT, "N", "of sampling", 0, 9007199254740991.0, .dflt = "0"},
                {"--samples", OPT_INT, "N", "answers to each prompt", 1, 1000000, .dflt = "1"},
                WEIGHTS_OPTIONS,
                DEVICE_OPTIONS},
    .run = run_generate};
