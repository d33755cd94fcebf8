/* Admission, growth, preemption and the end of sequences; see scheduler.h. */
#include "generation/scheduler.h"

#include <stdlib.h>
#include <string.h>

Scheduler sched_create(KvCache *kv, const GenRequest *requests, GenResult *results,
                       const int32_t *limits, int n_requests, const int32_t *owner, int rank,
                       int max_rows, int table_width) {
  Scheduler s = {.kv = kv,
                 .requests = requests,
                 .results = results,
                 .limits = limits,
                 .max_rows = max_rows,
                 .table_width = table_width};
  s.waiting = mem_alloc((size_t)n_requests, sizeof *s.waiting);
  for (int i = n_requests; i-- > 0;)
    if (!owner || owner[i] == rank) s.waiting[s.n_waiting++] = i;
  s.rows = mem_alloc((size_t)max_rows, sizeof *s.rows);
  s.seats = mem_alloc((size_t)max_rows, sizeof *s.seats);
  for (int i = 0; i < max_rows; i++) s.seats[i] = i;
  s.tables = mem_zalloc((size_t)max_rows * (size_t)table_width, sizeof *s.tables);
  return s;
}

void sched_destroy(Scheduler *s) {
  free(s->waiting);
  free(s->rows);
  free(s->seats);
  free(s->tables);
}

void sched_give(Scheduler *s, int request) {
  int i = 0;
  while (i < s->n_waiting && s->waiting[i] != request) i++;
  require(i < s->n_waiting && s->results[request].n == 0);
  memmove(s->waiting + i, s->waiting + i + 1, (size_t)(--s->n_waiting - i) * sizeof *s->waiting);
}

void sched_take(Scheduler *s, int request) {
  int i = s->n_waiting++;
  for (; i > 0 && s->waiting[i - 1] < request; i--) s->waiting[i] = s->waiting[i - 1];
  s->waiting[i] = request;
}

/* Takes a row out; its pages go back, the last row moves into its place. */
static void remove_row(Scheduler *s, int row) {
  int last = --s->n_rows;
  s->seats[last] = s->rows[row].seat;
  kv_drop(s->kv, sched_table(s, row), s->rows[row].n_pages);
  if (row == last) return;
  s->rows[row] = s->rows[last];
  s->rows[row].uploaded = 0;
  memcpy(sched_table(s, row), sched_table(s, last),
         (size_t)s->rows[row].n_pages * sizeof *s->tables);
}

static bool same_prompt(const Scheduler *s, int a, int b) {
  const GenRequest *p = &s->requests[a], *q = &s->requests[b];
  return p->prompt_id == q->prompt_id && p->prompt_len == q->prompt_len &&
         memcmp(p->prompt, q->prompt, (size_t)p->prompt_len * sizeof *p->prompt) == 0;
}

/* The row among those just admitted whose prompt the request repeats, both without a response yet;
 * -1: none. Samples of a prompt stand next to each other, so the newest row tells. */
static int find_lead(const Scheduler *s, int first_new, int request) {
  if (s->n_rows == first_new) return -1;
  int newest = s->n_rows - 1, lead = s->rows[newest].lead;
  if (lead < 0) lead = newest;
  int other = s->rows[lead].request;
  if (s->results[request].n > 0 || s->results[other].n > 0) return -1;
  return same_prompt(s, request, other) ? lead : -1;
}

/* Rows that will want another page. */
static int rows_that_grow(const Scheduler *s) {
  int n = 0;
  for (int r = 0; r < s->n_rows; r++)
    n += s->rows[r].n_pages < kv_pages_of(s->kv, s->limits[s->rows[r].request] - 1);
  return n;
}

/* Pages for the request at row n_rows. One page is left over for each row that grows, so that a
 * newcomer does not take what the others need for their next token. */
static bool take_pages(Scheduler *s, Row *row) {
  KvCache *kv = s->kv;
  int32_t *table = sched_table(s, s->n_rows);
  int shared = row->lead >= 0 ? row->len / kv->page_size : 0;
  if (kv_pages_of(kv, row->len) - shared + rows_that_grow(s) > kv->n_free) return false;
  if (shared) kv_share(kv, sched_table(s, row->lead), shared, table);
  row->n_pages = shared;
  return kv_grow(kv, table, &row->n_pages, row->len);
}

int sched_admit(Scheduler *s, int prefill_tokens) {
  int first_new = s->n_rows, tokens = 0;
  while (s->n_waiting > 0 && s->n_rows < s->max_rows) {
    int request = s->waiting[s->n_waiting - 1];
    Row row = {.request = request,
               .len = s->requests[request].prompt_len + s->results[request].n,
               .lead = find_lead(s, first_new, request)};
    int cost = row.lead >= 0 ? 0 : row.len;
    if (tokens > 0 && cost > prefill_tokens - tokens) break;
    if (!take_pages(s, &row)) break;
    tokens += cost;
    row.seat = s->seats[s->n_rows];
    s->rows[s->n_rows++] = row;
    s->n_waiting--;
  }
  return s->n_rows - first_new;
}

/* Requests enter in order, so the one with the highest number came last, but for what other ranks
 * gave; so it belongs on top. */
static void preempt_youngest(Scheduler *s) {
  int youngest = 0;
  for (int r = 1; r < s->n_rows; r++)
    if (s->rows[r].request > s->rows[youngest].request) youngest = r;
  s->waiting[s->n_waiting++] = s->rows[youngest].request;
  remove_row(s, youngest);
}

/* Tokens in the cache of a row that goes on for so many steps. Its last one is never there. */
static int tokens_after(const Scheduler *s, const Row *row, int steps) {
  int most = s->limits[row->request] - 1, tokens = row->len + steps - 1;
  return tokens < most ? tokens : most;
}

static int64_t pages_short(const Scheduler *s, int steps) {
  int64_t pages = 0;
  for (int r = 0; r < s->n_rows; r++) {
    int more = kv_pages_of(s->kv, tokens_after(s, &s->rows[r], steps)) - s->rows[r].n_pages;
    if (more > 0) pages += more;
  }
  return pages;
}

int sched_make_room(Scheduler *s, int ahead) {
  require(ahead > 0);
  while (ahead > 1 && pages_short(s, ahead) > s->kv->n_free) ahead /= 2;
  for (int r = 0; r < s->n_rows;) {
    Row *row = &s->rows[r];
    if (kv_grow(s->kv, sched_table(s, r), &row->n_pages, tokens_after(s, row, ahead))) {
      r++;
    } else {
      require(s->n_rows > 1 && ahead == 1);
      preempt_youngest(s);
      r = 0; /* rows have moved */
    }
  }
  return ahead;
}

void sched_append(Scheduler *s, int row, int32_t token, float logprob, bool is_eos) {
  Row *w = &s->rows[row];
  GenResult *out = &s->results[w->request];
  out->tokens[out->n] = token;
  out->logprobs[out->n++] = logprob;
  out->ended = is_eos;
  w->len++;
  if (is_eos || w->len == s->limits[w->request]) remove_row(s, row);
}
