/* The program from its arguments to its exit status. */
#include "orchestrator/cli.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/nearest.h"

static const Command *const commands[] = {&command_train,    &command_check,    &command_score,
                                          &command_generate, &command_tokenize, &command_inspect,
                                          &command_report,   &command_bench};
enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

int out_flush(Error *err) {
  errno = 0;
  if (fflush(stdout) == 0 && !ferror(stdout)) return 0;
  return error_set(err, "standard output: %s", errno ? strerror(errno) : "cannot be written");
}

static void print_usage(FILE *out) {
  fputs(
      "usage: rlhf COMMAND [ARGUMENT]...\n\n"
      "RLHF training of Llama-style Hugging Face checkpoints: SFT, reward model, PPO.\n\n"
      "commands:\n",
      out);
  for (int i = 0; i < N_COMMANDS; i++) {
    const char *help = commands[i]->help;
    fprintf(out, "  %-9s %.*s\n", commands[i]->name, (int)strcspn(help, "\n"), help);
  }
  fputs(
      "  help      this text; help COMMAND; help recipe: every key of a recipe\n\n"
      "rlhf COMMAND --help says more, with an example. rlhf --version prints the version.\n"
      "Under mpirun -n N the same commands run on N ranks.\n\n"
      "example:\n"
      "  rlhf train recipes/demo.yaml --set run.seed=2\n",
      out);
}

static const Command *find_command(const char *name) {
  for (int i = 0; i < N_COMMANDS; i++)
    if (!strcmp(commands[i]->name, name)) return commands[i];
  return NULL;
}

static CliResult fail_command(const char *name, Error *err) {
  const char *names[N_COMMANDS + 2];
  for (int i = 0; i < N_COMMANDS; i++) names[i] = commands[i]->name;
  names[N_COMMANDS] = "help";
  names[N_COMMANDS + 1] = "--version";
  const char *near = nearest_name(name, names, N_COMMANDS + 2);
  if (near)
    error_set(err, "unknown command \"%s\"; did you mean \"%s\"?\nsee rlhf --help", name, near);
  else
    error_set(err, "unknown command \"%s\"\nsee rlhf --help", name);
  return CLI_USAGE;
}

static CliResult run_help(int argc, char **argv, Error *err) {
  if (argc == 0 || (argc == 1 && (!strcmp(argv[0], "--help") || !strcmp(argv[0], "-h")))) {
    print_usage(stdout);
    return CLI_OK;
  }
  if (argc > 1) {
    error_set(err, "help: found \"%s\"; expected one command or \"recipe\"", argv[1]);
    return CLI_USAGE;
  }
  if (!strcmp(argv[0], "recipe")) {
    recipe_help(stdout);
    return CLI_OK;
  }
  const Command *c = find_command(argv[0]);
  if (!c) return fail_command(argv[0], err);
  command_help(c, stdout);
  return CLI_OK;
}

static CliResult run_command(const Command *c, int argc, char **argv, Error *err) {
  Args a;
  CliResult rc = args_parse(c, argc, argv, &a, err);
  if (!rc && a.help)
    command_help(c, stdout);
  else if (!rc)
    rc = c->run(&a, err);
  args_free(&a);
  if (rc == CLI_USAGE) {
    size_t used = strlen(err->msg);
    snprintf(err->msg + used, sizeof err->msg - used, "\nsee rlhf %s --help", c->name);
    error_prefix(err, "%s", c->name);
  }
  return rc;
}

static CliResult dispatch(int argc, char **argv, Error *err) {
  const char *name = argv[0];
  if (!strcmp(name, "--version")) {
    puts("rlhf " RLHF_VERSION);
    return CLI_OK;
  }
  if (!strcmp(name, "--help") || !strcmp(name, "-h") || !strcmp(name, "help"))
    return run_help(argc - 1, argv + 1, err);
  const Command *c = find_command(name);
  return c ? run_command(c, argc - 1, argv + 1, err) : fail_command(name, err);
}

/* One message may be many lines: every problem of a recipe. */
static void print_error(const Error *err) {
  for (const char *p = err->msg; *p;) {
    size_t len = strcspn(p, "\n");
    fprintf(stderr, "rlhf: %.*s\n", (int)len, p);
    p += len + (p[len] == '\n');
  }
}

/* Other ranks have nothing to say; what they print by mistake must not reach the results. */
static void silence_stdout(void) {
  if (launch_rank() > 0 && !freopen("/dev/null", "w", stdout)) die("cannot open /dev/null");
}

int cli_main(int argc, char **argv) {
  Error err = {""};
  CliResult rc;
  signal(SIGPIPE, SIG_IGN); /* a closed pipe is an error like a full disk */
  if (launch_init(&argc, &argv, &err)) {
    print_error(&err);
    return CLI_FAILED;
  }
  silence_stdout();
  if (argc < 2) {
    if (launch_rank() == 0) print_usage(stderr);
    rc = CLI_USAGE;
  } else {
    rc = dispatch(argc - 1, argv + 1, &err);
    if (rc == CLI_OK && out_flush(&err)) rc = CLI_FAILED;
  }
  if (launch_rank() == 0) print_error(&err);
  launch_finish();
  return rc;
}
