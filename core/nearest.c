/* Edit distance. See nearest.h. */
#include "core/nearest.h"

#include <stdbool.h>
#include <string.h>

enum { MAX_NAME = 63 };

static int min3(int a, int b, int c) {
  int m = a < b ? a : b;
  return m < c ? m : c;
}

int edit_distance(const char *a, const char *b) {
  size_t n = strnlen(a, MAX_NAME + 1), m = strnlen(b, MAX_NAME + 1);
  if (n > MAX_NAME || m > MAX_NAME) return MAX_NAME + 1;
  int d[MAX_NAME + 1][MAX_NAME + 1];
  for (size_t i = 0; i <= n; i++) d[i][0] = (int)i;
  for (size_t j = 0; j <= m; j++) d[0][j] = (int)j;
  for (size_t i = 1; i <= n; i++) {
    for (size_t j = 1; j <= m; j++) {
      int change = d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
      d[i][j] = min3(d[i - 1][j] + 1, d[i][j - 1] + 1, change);
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
          d[i - 2][j - 2] + 1 < d[i][j])
        d[i][j] = d[i - 2][j - 2] + 1;
    }
  }
  return d[n][m];
}

static bool begins(const char *a, const char *b) {
  size_t n = strlen(a), m = strlen(b), k = n < m ? n : m;
  return k >= 3 && !strncmp(a, b, k);
}

const char *nearest_name(const char *word, const char *const *names, int n) {
  size_t len = strlen(word);
  int limit = len < 6 ? 1 : (int)(len > MAX_NAME ? MAX_NAME : len) / 3;
  int best = -1, best_distance = limit + 1;
  for (int i = 0; i < n; i++) {
    int d = edit_distance(word, names[i]);
    if (d < best_distance) {
      best = i;
      best_distance = d;
    }
  }
  for (int i = 0; best < 0 && i < n; i++)
    if (begins(word, names[i])) best = i;
  return best < 0 ? NULL : names[best];
}
