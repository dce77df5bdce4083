/* What pystack.py calls, through ctypes, to hold what pystack.c reads against what Python says. */
#define _GNU_SOURCE
#include "../pystack.c"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

static struct pystack python;
static struct pystack_learned learned;

static void *lookup(const char *name, void *ctx) { return dlsym(ctx, name); }

int find(void) {
  memset(&learned, 0, sizeof learned);
  return pystack_find(&python, &learned, lookup, RTLD_DEFAULT);
}
const char *why(int found) { return pystack_why(found); }
int state(void) { return pystack_state(&python); }
int version(void) { return (int)python.version; }

/* walk writes a line for each frame: file, function, line, first line, id; parted by characters that no name has. */
int walk(char *out, size_t size, int cap, int file_size) {
  static __thread struct pyframe f[4096];
  int n = pystack_walk(&python, f, cap < 4096 ? cap : 4096);
  size_t at = 0;
  for (int i = 0; i < n; i++) {
    char file[8192], func[8192];
    if (!pystack_names(&python, &f[i], file, (size_t)file_size, func, sizeof func))
      strcpy(file, "?"), strcpy(func, "?");
    int w = snprintf(out + at, size - at, "%s\x1f%s\x1f%u\x1f%u\x1f%llx\x1e", file, func, f[i].line, f[i].first_line, (unsigned long long)f[i].id);
    if (w < 0 || (size_t)w >= size - at)
      return -1;
    at += (size_t)w;
  }
  out[at] = 0;
  return n;
}

/* cost is what a walk takes, in ns. */
double cost(int times, int cap) {
  static __thread struct pyframe f[4096];
  struct timespec a, b;
  clock_gettime(CLOCK_MONOTONIC, &a);
  for (int i = 0; i < times; i++)
    pystack_walk(&python, f, cap);
  clock_gettime(CLOCK_MONOTONIC, &b);
  return ((double)(b.tv_sec - a.tv_sec) * 1e9 + (double)(b.tv_nsec - a.tv_nsec)) / times;
}
