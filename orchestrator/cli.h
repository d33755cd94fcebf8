/* The command line: commands, their options, and what they share. Results go to standard output,
 * everything else to standard error. Under mpirun every rank runs the command and rank 0 alone
 * reads input, prints results and prints errors.
 *
 * Exit status: 0; 1 for an error of the outside world; 2 for usage. */
#ifndef ORCHESTRATOR_CLI_H
#define ORCHESTRATOR_CLI_H

#include "generation/chat.h"
#include "orchestrator/orchestrator.h"

#define RLHF_VERSION "0.1.0"

int cli_main(int argc, char **argv); /* the exit status */

/* ---- options (cli_options.c) ---- */

typedef enum OptionKind { OPT_FLAG, OPT_TEXT, OPT_LIST, OPT_INT, OPT_FLOAT } OptionKind;
typedef struct Option {
  const char *name; /* "--model" */
  OptionKind kind;
  const char *value; /* how help calls it: "DIR" */
  const char *help;
  double lo, hi; /* numbers */
  bool above_lo; /* lo itself is out */
  const char *dflt;
} Option;

enum { MAX_OPTIONS = 32, MAX_OPERANDS = 4 };
typedef struct Args {
  const struct Command *command;
  const char *operand[MAX_OPERANDS];
  int n_operands;
  bool help;
  const char *value[MAX_OPTIONS]; /* of each option of the command; NULL: not given */
  const char **list;              /* of the OPT_LIST option */
  int n_list;
} Args;

typedef enum CliResult { CLI_OK = 0, CLI_FAILED = 1, CLI_USAGE = 2 } CliResult;

typedef struct Command {
  const char *name, *operands, *help, *example, *more;
  int min_operands, max_operands;
  Option options[MAX_OPTIONS]; /* ends with a NULL name */
  CliResult (*run)(const Args *a, Error *err);
} Command;

/* argv behind the command's name. CLI_USAGE with a message that names the nearest option. */
CliResult args_parse(const Command *c, int argc, char **argv, Args *out, Error *err);
void args_free(Args *a);
bool args_given(const Args *a, const char *option);
const char *args_text(const Args *a, const char *option); /* NULL: not given */
const char *args_word(const Args *a, const char *option); /* or the default */
int64_t args_int(const Args *a, const char *option);      /* or the default */
double args_float(const Args *a, const char *option);
/* Exactly one of the options (parted by spaces) must be given: its name, or NULL and a message. */
const char *args_one_of(const Args *a, const char *options, Error *err);
void command_help(const Command *c, FILE *out);

/* ---- commands ---- */

extern const Command command_train, command_check, command_report; /* cli_run.c */
extern const Command command_score;                                /* cli_score.c */
extern const Command command_generate;                             /* cli_generate.c */
extern const Command command_tokenize;                             /* cli_tokenize.c */
extern const Command command_inspect;                              /* cli_inspect.c */
extern const Command command_bench;                                /* cli_bench.c */

/* ---- what they share ---- */

/* Flushes standard output; a full disk or a closed pipe is an error. */
int out_flush(Error *err);

/* A model with what runs it (cli_engine.c). Collective. */
typedef struct Engine {
  Grid *grid;
  Device *device;
  Arena *arena;
  Model *model;
  Tokenizer *tokenizer; /* NULL when there is none and none was needed */
} Engine;
typedef enum TokenizerNeed { TOKENIZER_NEEDED, TOKENIZER_IF_THERE } TokenizerNeed;
/* head: HEAD_LM, or -1 for whatever the checkpoint has. device, precision: as in a recipe's run. */
typedef struct EngineOptions {
  const char *dir, *device, *precision;
  int head;
  TokenizerNeed need;
} EngineOptions;
int engine_open(Engine *e, const EngineOptions *o, Error *err);
#define DEVICE_OPTIONS                                                                             \
  {"--device", OPT_TEXT, "NAME", "cpu, cuda, or auto: cuda where there is a GPU", .dflt = "auto"}, \
  {                                                                                                \
    "--precision", OPT_TEXT, "NAME", "float32, bfloat16, or auto: bfloat16 on cuda",               \
        .dflt = "auto"                                                                             \
  }
#define WEIGHTS_OPTIONS                                                                      \
  {"--weights", OPT_TEXT, "HOW",                                                             \
   "of several ranks in generation: replica, tensor_parallel or stream", .dflt = "replica"}, \
  {                                                                                          \
    "--format", OPT_TEXT, "NAME", "of matrices in generation: training, int8 or fp8",        \
        .dflt = "training"                                                                   \
  }
/* Of WEIGHTS_OPTIONS; CLI_USAGE with a message. */
CliResult args_weights(const Args *a, GenParams *p, Error *err);
/* Of DEVICE_OPTIONS; CLI_USAGE with a message. */
CliResult args_device(const Args *a, const char **device, const char **precision, Error *err);
void engine_close(Engine *e);

/* Sequences of a JSON Lines file: {"tokens": [..]} or {"text": ".."} (cli_input.c). Rank 0. */
typedef struct Sequences {
  TokenList tokens;
  int n, cap;
  int32_t *offsets; /* [n + 1] */
  char **text;      /* [n] what was tokenized, or NULL */
  size_t *text_len; /* [n] */
  bool end;         /* nothing follows */
} Sequences;
typedef struct Input Input;
typedef struct InputLimits {
  int vocab_size, max_tokens; /* longest sequence */
  const char *why;            /* of max_tokens, for messages */
} InputLimits;
/* as_text: records hold "text", which the tokenizer encodes. chat: each text is what a user says,
 * and an answer to it is opened; NULL: it is taken as it is. */
Input *input_open(const char *path, bool as_text, const Tokenizer *t, const Chat *chat,
                  InputLimits limits, Error *err);
/* Replaces s by the next sequences: at most max_n of them, and no more once max_tokens are reached.
 * On an error those before the bad record are in s. */
int input_next(Input *in, int max_n, int64_t max_tokens, Sequences *s, Error *err);
void input_close(Input *in);
/* The only sequence of an input that is no file. */
int sequences_from_text(const char *text, const Tokenizer *t, const Chat *chat, InputLimits limits,
                        Sequences *s, Error *err);
void sequences_clear(Sequences *s);
void sequences_free(Sequences *s);
/* Tokens and offsets of rank 0 to all, with its rc: < 0 on rank 0 is < 0 on all. */
void sequences_share(Comm *c, Sequences *s, int *rc);

/* The ids of {"tokens": [..]}, each in [0, vocab_size); place stands in messages. */
int tokens_from_json(const json_t *record, const char *place, int vocab_size, TokenList *out,
                     Error *err);
/* The text of {"text": ".."}; borrowed. */
const char *text_from_json(const json_t *record, const char *place, size_t *len, Error *err);
/* BOS as the tokenizer's own configuration has it. */
int text_flags(const Tokenizer *t);

#endif
