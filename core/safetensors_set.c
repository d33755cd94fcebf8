/* A checkpoint's tensors as one view: a single file, or the shards that an index names. */
#include <stdlib.h>
#include <string.h>

#include "core/fs.h"
#include "core/json.h"
#include "core/safetensors.h"

typedef struct Item {
  const StEntry *entry;
  int file;
} Item;

struct StSet {
  StFile **files;
  int n_files;
  Item *items; /* by file, then by offset */
  int n;
  const Item **by_name;
};

static int by_place(const void *a, const void *b) {
  const Item *x = a, *y = b;
  if (x->file != y->file) return x->file < y->file ? -1 : 1;
  return (x->entry > y->entry) - (x->entry < y->entry); /* entries of a file lie in its order */
}

static int by_name(const void *a, const void *b) {
  return strcmp((*(const Item *const *)a)->entry->name, (*(const Item *const *)b)->entry->name);
}

static void sort_items(StSet *s) {
  qsort(s->items, (size_t)s->n, sizeof *s->items, by_place);
  s->by_name = mem_alloc((size_t)s->n, sizeof(void *));
  for (int i = 0; i < s->n; i++) s->by_name[i] = &s->items[i];
  qsort(s->by_name, (size_t)s->n, sizeof(void *), by_name);
}

StSet *stset_open_file(const char *path, Error *err) {
  StFile *f = st_open(path, err);
  if (!f) return NULL;
  StSet *s = mem_zalloc(1, sizeof *s);
  s->files = mem_alloc(1, sizeof(StFile *));
  s->files[s->n_files++] = f;
  s->items = mem_alloc((size_t)st_count(f), sizeof *s->items);
  for (s->n = 0; s->n < st_count(f); s->n++) s->items[s->n] = (Item){st_entry(f, s->n), 0};
  sort_items(s);
  return s;
}

/* Shards lie in the checkpoint's folder or below it, nowhere else. */
static bool stays_inside(const char *name) {
  if (name[0] == '/' || name[0] == '\0') return false;
  for (const char *part = name; part; part = strchr(part, '/') ? strchr(part, '/') + 1 : NULL) {
    size_t n = strcspn(part, "/");
    if (n == 2 && !strncmp(part, "..", 2)) return false;
  }
  return true;
}

/* The shard of that path, opened at its first use; -1 on error. */
static int shard_of(StSet *s, const char *path, Error *err) {
  for (int i = s->n_files - 1; i >= 0;
       i--) /* an index tends to name one shard many times in a row */
    if (!strcmp(st_path(s->files[i]), path)) return i;
  StFile *f = st_open(path, err);
  if (!f) return -1;
  s->files = mem_grow(s->files, (size_t)s->n_files + 1, sizeof(StFile *));
  s->files[s->n_files] = f;
  return s->n_files++;
}

static int add_item(StSet *s, const char *dir, const char *index, const char *name,
                    const json_t *file, Error *err) {
  if (!json_is_string(file) || !stays_inside(json_string_value(file)))
    return error_set(err, "%s: tensor \"%s\": %s%s; expected a file of the same folder", index,
                     name, json_is_string(file) ? "shard " : "no shard name",
                     json_is_string(file) ? json_string_value(file) : "");
  char *path = fs_join(dir, json_string_value(file));
  int shard = shard_of(s, path, err);
  free(path);
  if (shard < 0) return error_prefix(err, "%s: tensor \"%s\"", index, name);
  const StEntry *e = st_find(s->files[shard], name);
  if (!e)
    return error_set(err, "%s: tensor \"%s\" is not in %s, where the index says it is", index, name,
                     st_path(s->files[shard]));
  s->items[s->n++] = (Item){e, shard};
  return 0;
}

static json_t *read_index(const char *path, Error *err) {
  size_t len;
  char *text = fs_read(path, &len, err);
  if (!text) return NULL;
  json_t *index = json_parse_unique(text, len, path, err);
  free(text);
  return index;
}

static StSet *open_index(const char *dir, const char *path, Error *err) {
  json_t *index = read_index(path, err);
  if (!index) return NULL;
  json_t *map = json_object_get(index, "weight_map");
  StSet *s = mem_zalloc(1, sizeof *s);
  int bad = 0;
  if (!json_is_object(map) || json_object_size(map) == 0)
    bad = error_set(err, "%s: no \"weight_map\" object that names a shard for each tensor", path);
  s->items = mem_alloc(json_object_size(map), sizeof *s->items);
  const char *name;
  json_t *file;
  json_object_foreach(map, name, file) {
    if (!bad) bad = add_item(s, dir, path, name, file, err);
  }
  json_decref(index);
  if (bad) {
    stset_close(s);
    return NULL;
  }
  sort_items(s);
  return s;
}

/* Other programs' forms of weights, and what to do about them. */
static void no_weights(const char *dir, Error *err) {
  static const struct {
    const char *file, *hint;
  } others[] = {
      {"adapter_model.safetensors", "merge the adapter into its model, and save that"},
      {"pytorch_model.bin", "save the model as safetensors"},
      {"pytorch_model.bin.index.json", "save the model as safetensors"},
  };
  error_set(err, "%s: neither model.safetensors nor model.safetensors.index.json is there", dir);
  for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
    char *path = fs_join(dir, others[i].file);
    if (fs_exists(path)) error_set(err, "%s: cannot be read; %s", path, others[i].hint);
    free(path);
  }
}

StSet *stset_open(const char *dir, Error *err) {
  char *single = fs_join(dir, "model.safetensors");
  char *index = fs_join(dir, "model.safetensors.index.json");
  StSet *s = NULL;
  if (fs_exists(single))
    s = stset_open_file(single, err);
  else if (fs_exists(index))
    s = open_index(dir, index, err);
  else if (!fs_is_dir(dir))
    error_set(err, "%s: is not a folder; expected a checkpoint folder", dir);
  else
    no_weights(dir, err);
  free(single);
  free(index);
  return s;
}

int stset_count(const StSet *s) { return s->n; }

const StEntry *stset_entry(const StSet *s, int i, const StFile **file) {
  require(i >= 0 && i < s->n);
  if (file) *file = s->files[s->items[i].file];
  return s->items[i].entry;
}

const StEntry *stset_find(const StSet *s, const char *name, const StFile **file) {
  StEntry named = {.name = (char *)name};
  Item key = {&named, 0};
  const Item *k = &key;
  const Item **hit = bsearch(&k, s->by_name, (size_t)s->n, sizeof(void *), by_name);
  if (!hit) return NULL;
  if (file) *file = s->files[(*hit)->file];
  return (*hit)->entry;
}

void stset_close(StSet *s) {
  if (!s) return;
  for (int i = 0; i < s->n_files; i++) st_close(s->files[i]);
  free((void *)s->files);
  free(s->items);
  free((void *)s->by_name);
  free(s);
}
