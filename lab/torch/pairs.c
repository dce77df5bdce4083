// Times allocations and frees through two functions of an allocator, without PyTorch: the loops of bench_alloc.py in C.
// Each returns nanoseconds for one allocation and free, or -1 where an allocation failed.
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

typedef void *(*allocate_fn)(size_t size, int device, void *stream);
typedef void (*free_fn)(void *ptr, size_t size, int device, void *stream);

enum { SIZES = 4096, PICKS = 65536, WARM = 1000 };

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e9 + t.tv_nsec;
}

static uint64_t next(uint64_t *state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  return *state ^= *state << 17;
}

double pair_ns(allocate_fn allocate, free_fn release, size_t size, long n) {
  double start = 0;
  for (long i = -WARM; i < n; i++) {
    if (i == 0)
      start = now();
    void *p = allocate(size, 0, NULL);
    if (!p)
      return -1;
    release(p, size, 0, NULL);
  }
  return (now() - start) / n;
}

struct block {
  void *p;
  size_t size;
};

static int replace(struct block *b, size_t size, allocate_fn allocate, free_fn release) {
  if (b->p)
    release(b->p, b->size, 0, NULL);
  *b = (struct block){allocate(size, 0, NULL), size};
  return b->p != NULL;
}

// The sizes are 2 to the power of a uniform number from 9 to 23.
double churn_ns(allocate_fn allocate, free_fn release, long live, long n) {
  struct block *blocks = calloc(live, sizeof *blocks);
  size_t *sizes = malloc(SIZES * sizeof *sizes);
  uint32_t *picks = malloc(PICKS * sizeof *picks);
  uint64_t state = 88172645463325252u;
  double start = 0, took = -1;
  if (!blocks || !sizes || !picks)
    goto end;
  for (int i = 0; i < SIZES; i++)
    sizes[i] = (size_t)exp2(9 + 14 * ((double)(next(&state) >> 11) / (1ull << 53)));
  for (int i = 0; i < PICKS; i++)
    picks[i] = next(&state) % live;
  for (long i = 0; i < live; i++)
    if (!replace(&blocks[i], sizes[i % SIZES], allocate, release))
      goto end;
  for (long i = -n / 2; i < n; i++) {
    if (i == 0)
      start = now();
    if (!replace(&blocks[picks[i & (PICKS - 1)]], sizes[(uint64_t)i * 2654435761u >> 7 & (SIZES - 1)], allocate, release))
      goto end;
  }
  took = (now() - start) / n;
end:
  for (long i = 0; blocks && i < live; i++)
    if (blocks[i].p)
      release(blocks[i].p, blocks[i].size, 0, NULL);
  free(blocks);
  free(sizes);
  free(picks);
  return took;
}

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

// The time of one allocation each, in nanoseconds, from an empty cache on: out is the median, the times that 99 and 99.9 of 100
// do not exceed, and the longest. The clock is part of each, some 20 ns. -1 where an allocation failed.
double tail_ns(allocate_fn allocate, free_fn release, long live, long n, double *out) {
  struct block *blocks = calloc(live, sizeof *blocks);
  double *times = malloc(n * sizeof *times), done = -1;
  uint64_t state = 88172645463325252u;
  if (!blocks || !times)
    goto end;
  for (long i = 0; i < n; i++) {
    struct block *b = &blocks[next(&state) % live];
    size_t size = (size_t)exp2(9 + 14 * ((double)(next(&state) >> 11) / (1ull << 53)));
    if (b->p)
      release(b->p, b->size, 0, NULL);
    double start = now();
    *b = (struct block){allocate(size, 0, NULL), size};
    times[i] = now() - start;
    if (!b->p)
      goto end;
  }
  qsort(times, n, sizeof *times, compare);
  out[0] = times[(n - 1) / 2];
  out[1] = times[(n * 99 + 99) / 100 - 1];
  out[2] = times[(n * 999 + 999) / 1000 - 1];
  out[3] = times[n - 1];
  done = 0;
end:
  for (long i = 0; blocks && i < live; i++)
    if (blocks[i].p)
      release(blocks[i].p, blocks[i].size, 0, NULL);
  free(blocks);
  free(times);
  return done;
}
