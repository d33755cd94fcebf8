/* Opens a library of NVIDIA's by name, wherever the system, the user or pip has put it. */
#include "kernels/cuda/lib.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* As it lies in a folder, and in pip's packages below it. */
static const char *const places[] = {"%.*s/%s", "%.*s/cu13/lib/%s", "%.*s/cublas/lib/%s",
                                     "%.*s/cudnn/lib/%s", "%.*s/nccl/lib/%s"};

static void *open_in(const char *folder, int length, const char *soname) {
  char path[4096];
  for (const char *place : places) {
    snprintf(path, sizeof path, place, length, folder, soname);
    void *lib = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (lib) return lib;
  }
  return nullptr;
}

static void *open_listed(const char *folders, const char *soname) {
  for (const char *at = folders; at && *at;) {
    int length = static_cast<int>(strcspn(at, ":"));
    void *lib = length > 0 ? open_in(at, length, soname) : nullptr;
    if (lib) return lib;
    at += length + (at[length] == ':');
  }
  return nullptr;
}

void *cuda_lib_open(const char *soname, Error *err) {
  static const char usual[] = "/usr/local/cuda/lib64:/usr/local/cuda/lib";
  void *lib = open_listed(getenv("RLHF_CUDA_LIBS"), soname);
  if (!lib) lib = dlopen(soname, RTLD_NOW | RTLD_GLOBAL);
  const char *why = lib ? nullptr : dlerror();
  char first[1024];
  snprintf(first, sizeof first, "%s", why ? why : "");
  if (!lib) lib = open_listed(usual, soname);
  if (!lib)
    error_set(err,
              "device cuda needs %s, which does not open (%s): install it, or name its folder in "
              "RLHF_CUDA_LIBS (pip's: site-packages/nvidia)",
              soname, first);
  return lib;
}

int cuda_lib_find(void *lib, const char *soname, const char *function, void **found, Error *err) {
  *found = dlsym(lib, function);
  if (*found) return 0;
  return error_set(err, "%s has no function %s: it is older than what rlhf was built for", soname,
                   function);
}
