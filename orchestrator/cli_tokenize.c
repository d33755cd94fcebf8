/* rlhf tokenize: text to ids and back, line by line. */
#include <stdlib.h>
#include <string.h>

#include "core/fs.h"
#include "orchestrator/cli.h"

static int print_tokens(const Tokenizer *t, const char *text, size_t len, int flags,
                        const char *place, Error *err) {
  TokenList ids = {0};
  int rc = tokenizer_encode(t, text, len, flags, &ids, err);
  if (rc) {
    error_prefix(err, "%s", place);
  } else {
    fputs("{\"tokens\":", stdout);
    json_put_i32_array(stdout, ids.v, (size_t)ids.n);
    puts("}");
  }
  token_list_free(&ids);
  return rc;
}

static int encode_lines(const Tokenizer *t, const char *path, int flags, Error *err) {
  LineReader *lines = lines_open(path, err);
  if (!lines) return -1;
  const char *line, *name = strcmp(path, "-") != 0 ? path : "(standard input)";
  size_t len;
  int got, rc = 0;
  while (!rc && (got = lines_next(lines, &line, &len, err)) != 0) {
    char *place = mem_printf("%s:%lld", name, (long long)lines_number(lines));
    rc = got < 0 ? -1 : print_tokens(t, line, len, flags, place, err);
    free(place);
    if (!rc && ferror(stdout)) rc = -1;
  }
  lines_close(lines);
  return rc;
}

static int print_text(const Tokenizer *t, const json_t *record, const char *place, Error *err) {
  TokenList ids = {0};
  size_t len;
  int rc = tokens_from_json(record, place, tokenizer_vocab_size(t), &ids, err);
  char *text = rc ? NULL : tokenizer_decode(t, ids.v, ids.n, &len, err);
  if (!rc && !text) error_prefix(err, "%s", place);
  if (text) {
    fputs("{\"text\":", stdout);
    json_put_str(stdout, text, len);
    puts("}");
  }
  token_list_free(&ids);
  free(text);
  return text ? 0 : -1;
}

static int run_records(const Tokenizer *t, const char *path, bool decode, int flags, Error *err) {
  RecordReader *records = records_open(path, err);
  if (!records) return -1;
  json_t *record;
  int got, rc = 0;
  while (!rc && (got = records_next(records, &record, err)) != 0) {
    const char *place = records_place(records), *text;
    size_t len;
    if (got < 0) {
      rc = -1;
    } else if (decode) {
      rc = print_text(t, record, place, err);
    } else {
      text = text_from_json(record, place, &len, err);
      rc = text ? print_tokens(t, text, len, flags, place, err) : -1;
    }
    if (!rc && ferror(stdout)) rc = -1;
  }
  records_close(records);
  return rc;
}

static CliResult run_tokenize(const Args *a, Error *err) {
  bool decode = args_given(a, "--decode"), json = args_given(a, "--json");
  if (!args_given(a, "--model")) {
    error_set(err, "expected --model DIR");
    return CLI_USAGE;
  }
  if (decode && args_given(a, "--no-bos")) {
    error_set(err, "found --no-bos with --decode; expected one of them");
    return CLI_USAGE;
  }
  if (launch_rank() > 0) return CLI_OK;
  Tokenizer *t = tokenizer_load(args_text(a, "--model"), err);
  if (!t) return CLI_FAILED;
  int flags = args_given(a, "--no-bos") ? 0 : text_flags(t);
  int rc = decode || json ? run_records(t, a->operand[0], decode, flags, err)
                          : encode_lines(t, a->operand[0], flags, err);
  tokenizer_free(t);
  Error out = {""};
  if (out_flush(&out)) rc = err->msg[0] ? rc : error_set(err, "%s", out.msg);
  return rc ? CLI_FAILED : CLI_OK;
}

const Command command_tokenize = {
    .name = "tokenize",
    .operands = "FILE",
    .help =
        "text to token ids, and back\n"
        "Each line of text becomes a line {\"tokens\": [..]}. FILE - is standard input.",
    .example = "echo 'Once upon a time' | rlhf tokenize --model DIR -",
    .min_operands = 1,
    .max_operands = 1,
    .options = {{"--model", OPT_TEXT, "DIR", "a folder with a tokenizer, or a .model file",
                 .dflt = NULL},
                {"--json", OPT_FLAG, NULL, "read JSON Lines of {\"text\": \"..\"}", .dflt = NULL},
                {"--no-bos", OPT_FLAG, NULL,
                 "without the BOS token that the tokenizer is set to put first", .dflt = NULL},
                {"--decode", OPT_FLAG, NULL,
                 "read JSON Lines of {\"tokens\": [..]}, write {\"text\": \"..\"}", .dflt = NULL}},
    .run = run_tokenize};
