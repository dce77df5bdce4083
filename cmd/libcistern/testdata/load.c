/* What it costs to load the library and to allocate for the first time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static double ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static long kib(void) {
  long all = 0, resident = 0;
  FILE *f = fopen("/proc/self/statm", "r");
  if (f == NULL || fscanf(f, "%ld %ld", &all, &resident) != 2)
    return -1;
  fclose(f);
  return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

int main(int argc, char **argv) {
  if (argc != 2)
    return 2;
  long before = kib();
  double begin = ms();
  void *lib = dlopen(argv[1], RTLD_NOW);
  double loaded = ms();
  if (lib == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  long resident = kib() - before;
  double again = ms();
  void *(*alloc)(ssize_t, int, void *) = (void *(*)(ssize_t, int, void *))dlsym(lib, "cistern_malloc");
  void *p = alloc(1 << 20, 0, NULL);
  double done = ms();
  usleep(100000); /* what the runtime does in threads of its own */
  printf("load %.2f ms %ld KiB, first call %.2f ms %ld KiB\n", loaded - begin, resident, done - again, kib() - before);
  return p == NULL;
}
