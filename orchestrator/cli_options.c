/* Options: one table per command parses them, checks them and writes the help. */
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/nearest.h"
#include "orchestrator/cli.h"

static int option_count(const Command *c) {
  int n = 0;
  while (n < MAX_OPTIONS && c->options[n].name) n++;
  return n;
}

static int option_find(const Command *c, const char *name, size_t len) {
  for (int i = 0; i < option_count(c); i++)
    if (strlen(c->options[i].name) == len && !strncmp(c->options[i].name, name, len)) return i;
  return -1;
}

static CliResult fail_unknown(const Command *c, const char *arg, size_t len, Error *err) {
  const char *names[MAX_OPTIONS + 1];
  int n = option_count(c);
  for (int i = 0; i < n; i++) names[i] = c->options[i].name;
  names[n++] = "--help";
  char *word = mem_printf("%.*s", (int)len, arg);
  const char *near = nearest_name(word, names, n);
  if (near)
    error_set(err, "unknown option \"%s\"; did you mean \"%s\"?", word, near);
  else
    error_set(err, "unknown option \"%s\"", word);
  free(word);
  return CLI_USAGE;
}

static bool in_range(const Option *o, double x) {
  return isfinite(x) && (o->above_lo ? x > o->lo : x >= o->lo) && x <= o->hi;
}

static bool read_number(const Option *o, const char *s, double *x) {
  char *end;
  errno = 0;
  if (isspace((unsigned char)*s) || !*s) return false;
  if (o->kind == OPT_INT)
    *x = (double)strtoll(s, &end, 10);
  else
    *x = strtod(s, &end);
  return !*end && errno == 0 && in_range(o, *x);
}

static CliResult check_number(const Option *o, const char *value, Error *err) {
  double x;
  if (read_number(o, value, &x)) return CLI_OK;
  error_set(err, "%s: found \"%s\"; expected a %snumber %s %.17g%s%.17g%s", o->name, value,
            o->kind == OPT_INT ? "whole " : "", o->above_lo ? "above" : "from", o->lo,
            o->above_lo ? ", at most " : " to ", o->hi,
            !strcmp(o->name, "--temperature") ? " (--greedy is temperature 0)" : "");
  return CLI_USAGE;
}

static CliResult set_option(Args *a, int i, const char *value, Error *err) {
  const Option *o = &a->command->options[i];
  if (o->kind == OPT_LIST) {
    a->list = (const char **)mem_grow((void *)a->list, (size_t)a->n_list + 1, sizeof *a->list);
    a->list[a->n_list++] = value;
    return CLI_OK;
  }
  if (a->value[i]) {
    error_set(err, "%s: given twice", o->name);
    return CLI_USAGE;
  }
  a->value[i] = value;
  return o->kind == OPT_INT || o->kind == OPT_FLOAT ? check_number(o, value, err) : CLI_OK;
}

/* One option at argv[*at], with its value in the same word or the next. */
static CliResult parse_option(Args *a, int argc, char **argv, int *at, Error *err) {
  const char *arg = argv[*at], *equals = strchr(arg, '=');
  size_t len = equals ? (size_t)(equals - arg) : strlen(arg);
  int i = option_find(a->command, arg, len);
  if (i < 0) return fail_unknown(a->command, arg, len, err);
  const Option *o = &a->command->options[i];
  if (o->kind == OPT_FLAG) {
    if (!equals) return set_option(a, i, "", err);
    error_set(err, "%s: takes no value", o->name);
    return CLI_USAGE;
  }
  if (equals) return set_option(a, i, equals + 1, err);
  if (*at + 1 < argc) return set_option(a, i, argv[++*at], err);
  error_set(err, "%s: expected %s behind it", o->name, o->value);
  return CLI_USAGE;
}

static CliResult add_operand(Args *a, const char *arg, Error *err) {
  if (a->n_operands < a->command->max_operands) {
    a->operand[a->n_operands++] = arg;
    return CLI_OK;
  }
  error_set(err, "found \"%s\"; expected %s%s", arg,
            a->command->max_operands ? "no more than " : "options only",
            a->command->max_operands ? a->command->operands : "");
  return CLI_USAGE;
}

CliResult args_parse(const Command *c, int argc, char **argv, Args *out, Error *err) {
  *out = (Args){.command = c};
  bool options = true;
  CliResult rc = CLI_OK;
  for (int i = 0; i < argc && !rc; i++) {
    const char *arg = argv[i];
    if (options && (!strcmp(arg, "--help") || !strcmp(arg, "-h"))) {
      out->help = true;
      return CLI_OK;
    }
    if (options && !strcmp(arg, "--"))
      options = false;
    else if (options && arg[0] == '-' && arg[1])
      rc = parse_option(out, argc, argv, &i, err);
    else
      rc = add_operand(out, arg, err);
  }
  if (rc || out->n_operands >= c->min_operands) return rc;
  error_set(err, "expected %s", c->operands);
  return CLI_USAGE;
}

void args_free(Args *a) { free((void *)a->list); }

static int option_index(const Args *a, const char *option) {
  int i = option_find(a->command, option, strlen(option));
  require(i >= 0);
  return i;
}

bool args_given(const Args *a, const char *option) {
  return a->value[option_index(a, option)] != NULL;
}

const char *args_text(const Args *a, const char *option) {
  return a->value[option_index(a, option)];
}

static const char *value_or_default(const Args *a, const char *option) {
  int i = option_index(a, option);
  return a->value[i] ? a->value[i] : a->command->options[i].dflt;
}

const char *args_word(const Args *a, const char *option) { return value_or_default(a, option); }

static bool is_one_of(const char *word, const char *const *words) {
  for (; *words; words++)
    if (!strcmp(word, *words)) return true;
  return false;
}

CliResult args_weights(const Args *a, GenParams *p, Error *err) {
  const char *weights = args_word(a, "--weights"), *format = args_word(a, "--format");
  if (rollout_weights_parse(weights, &p->weights)) {
    error_set(err, "--weights: found \"%s\"; expected replica, tensor_parallel or stream", weights);
    return CLI_USAGE;
  }
  if (rollout_format_parse(format, &p->format)) {
    error_set(err, "--format: found \"%s\"; expected training, int8 or fp8", format);
    return CLI_USAGE;
  }
  return CLI_OK;
}

CliResult args_device(const Args *a, const char **device, const char **precision, Error *err) {
  static const char *const devices[] = {"auto", "cpu", "cuda", NULL};
  static const char *const precisions[] = {"auto", "float32", "bfloat16", "fp32", NULL};
  *device = args_word(a, "--device");
  *precision = args_word(a, "--precision");
  if (!is_one_of(*device, devices)) {
    error_set(err, "--device: found \"%s\"; expected auto, cpu or cuda", *device);
    return CLI_USAGE;
  }
  if (!is_one_of(*precision, precisions)) {
    error_set(err, "--precision: found \"%s\"; expected auto, float32 or bfloat16", *precision);
    return CLI_USAGE;
  }
  return CLI_OK;
}

int64_t args_int(const Args *a, const char *option) {
  return strtoll(value_or_default(a, option), NULL, 10);
}

double args_float(const Args *a, const char *option) {
  return strtod(value_or_default(a, option), NULL);
}

const char *args_one_of(const Args *a, const char *options, Error *err) {
  const char *found = NULL;
  int n = 0;
  for (const char *p = options; *p;) {
    size_t len = strcspn(p, " ");
    int i = option_find(a->command, p, len);
    if (a->value[i]) {
      found = a->command->options[i].name;
      n++;
    }
    p += len + (p[len] == ' ');
  }
  if (n == 1) return found;
  error_set(err, "expected exactly one of %s; found %d of them", options, n);
  return NULL;
}

/* The option's name in its column, and the text beside it in lines that end before LINE. */
static void print_option(const Option *o, FILE *out) {
  enum { COLUMN = 25, LINE = 100 };
  char *name = mem_printf("%s%s%s", o->name, o->value ? " " : "", o->value ? o->value : "");
  char *text =
      o->dflt ? mem_printf("%s (default %s)", o->help, o->dflt) : mem_printf("%s", o->help);
  fprintf(out, "  %-*s", COLUMN - 3, name);
  int at = COLUMN - 1;
  for (const char *p = text, *end; *p; p = end + strspn(end, " ")) {
    end = p + strcspn(p, " ");
    int len = (int)(end - p);
    if (at + 1 + len > LINE) at = fprintf(out, "\n%*s", COLUMN - 1, "") - 1;
    at += fprintf(out, " %.*s", len, p);
  }
  fputc('\n', out);
  free(text);
  free(name);
}

void command_help(const Command *c, FILE *out) {
  fprintf(out, "usage: rlhf %s%s%s%s\n\n%s\n", c->name, *c->operands ? " " : "", c->operands,
          option_count(c) ? " [OPTION]..." : "", c->help);
  if (option_count(c)) fputs("\noptions:\n", out);
  for (int i = 0; i < option_count(c); i++) print_option(&c->options[i], out);
  if (c->more) fprintf(out, "\n%s\n", c->more);
  fprintf(out, "\nexample:\n  %s\n", c->example);
}
