/* The step line on stderr: a bar that is redrawn in place on a terminal, plain lines elsewhere. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "orchestrator/report.h"

enum { BAR_WIDTH = 20 };

void progress_open(Progress *p, const char *mode) {
  bool automatic = strcmp(mode, "auto") == 0;
  *p = (Progress){.bar = automatic ? isatty(STDERR_FILENO) != 0 : strcmp(mode, "bar") == 0,
                  .off = strcmp(mode, "off") == 0,
                  .stage = ""};
}

void progress_stage(Progress *p, const char *stage, int64_t done, int64_t total) {
  progress_end(p);
  p->drawn = false;
  p->stage = stage;
  p->done_at_start = done;
  p->total = total;
  p->started = clock_seconds();
}

/* "1:05:09", "12:30", "0:04" */
static void format_time(double seconds, char *out, size_t size) {
  long s = seconds > 0 ? (long)(seconds + 0.5) : 0;
  if (s >= 3600)
    snprintf(out, size, "%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
  else
    snprintf(out, size, "%ld:%02ld", s / 60, s % 60);
}

/* Columns of the terminal: a longer line would wrap, and could not be drawn over. */
static int terminal_columns(void) {
  struct winsize w;
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_col > 0 ? w.ws_col : 80;
}

static void draw_bar(const Progress *p, int64_t step, const char *line) {
  char bar[BAR_WIDTH + 1] = "";
  int full = p->total > 0 ? (int)(step * BAR_WIDTH / p->total) : BAR_WIDTH;
  for (int i = 0; i < BAR_WIDTH; i++) bar[i] = i < full ? '=' : i == full ? '>' : ' ';
  int room = terminal_columns() - BAR_WIDTH - 4;
  fprintf(stderr, "\r\033[K[%s] %.*s", bar, room > 0 ? room : 0, line);
}

void progress_step(Progress *p, int64_t step, const char *figures, double step_seconds,
                   double tokens_per_second) {
  if (p->off) return;
  int64_t behind = step - p->done_at_start;
  double mean = behind > 0 ? (clock_seconds() - p->started) / (double)behind : 0;
  char left[32] = "", rate[32] = "";
  if (behind > 0) format_time(mean * (double)(p->total - step), left, sizeof left);
  if (tokens_per_second > 0) snprintf(rate, sizeof rate, "  %.0f tok/s", tokens_per_second);
  char *line =
      mem_printf("%s %lld/%lld%s  %.2f s%s%s%s", p->stage, (long long)step, (long long)p->total,
                 figures, step_seconds, rate, left[0] ? "  left " : "", left);
  if (p->bar)
    draw_bar(p, step, line);
  else
    fprintf(stderr, "%s\n", line);
  fflush(stderr);
  free(line);
  p->drawn = p->bar;
}

void progress_end(Progress *p) {
  if (p->drawn) fputc('\n', stderr);
  p->drawn = false;
}
