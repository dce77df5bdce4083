/* What requests and frees cost through the C interface, in nanoseconds, as one line of JSON:
 *
 *     cc -O2 -pthread bench.c -lcistern -o bench && CISTERN_CONF=driver:sim ./bench
 *
 * pair: one allocation and its free. churn: a population of blocks of 512 B to 8 MiB, log-uniform, that are replaced one by
 * one. threads: pairs of 1 MiB by four threads on one stream, wall time per pair. sparse: one allocation after the program
 * did nothing for 300 us. native_8 and native_32: what a pair of 1 MiB costs more where the native stack of each request is
 * taken, in functions that call each other so deep; sampled: where that is done at one request in 1024. */
#define _GNU_SOURCE
#include <cistern.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e9 + t.tv_nsec;
}

static void *get(size_t size) {
  void *p = cistern_malloc((ssize_t)size, 0, NULL);
  if (p == NULL) {
    char why[512];
    cistern_last_error(why, sizeof why);
    fprintf(stderr, "bench: %s\n", why);
    exit(1);
  }
  return p;
}

static void put(void *p) { cistern_free(p, 0, 0, NULL); }

static double pairs(size_t size, int n) {
  for (int i = 0; i < 1000; i++)
    put(get(size));
  double t = now();
  for (int i = 0; i < n; i++)
    put(get(size));
  return (now() - t) / n;
}

static uint64_t seed = 1;
static uint64_t rnd(void) { /* splitmix64 */
  uint64_t z = seed += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

/* 512 B to 8 MiB, so that every doubling is as likely as any other. */
static size_t log_uniform(void) {
  uint64_t r = rnd();
  double x = 1;
  for (uint64_t i = r % 1024; i > 0; i--)
    x *= 1.0006771306930664; /* the 1024th root of 2 */
  return (size_t)(x * (double)(512u << r / 1024 % 14));
}

static double churn(int live, int n) {
  static size_t sizes[4096];
  static uint32_t order[65536];
  for (int i = 0; i < 4096; i++)
    sizes[i] = log_uniform();
  for (int i = 0; i < 65536; i++)
    order[i] = rnd() % live;
  void **v = malloc(live * sizeof *v);
  for (int i = 0; i < live; i++)
    v[i] = get(sizes[i % 4096]);
  double t = 0;
  for (int64_t i = 0; i < n / 2 + n; i++) {
    if (i == n / 2)
      t = now();
    uint32_t k = order[i & 65535];
    put(v[k]);
    v[k] = get(sizes[(i * 2654435761u >> 7) & 4095]);
  }
  t = now() - t;
  for (int i = 0; i < live; i++)
    put(v[i]);
  free(v);
  return t / n;
}

enum { EACH = 50000 };
static void *worker(void *arg) {
  for (int i = 0; i < EACH; i++)
    put(get(1 << 20));
  return arg;
}

static double threads(int n) {
  pthread_t t[16];
  double t0 = now();
  for (int i = 0; i < n; i++)
    pthread_create(&t[i], NULL, worker, NULL);
  for (int i = 0; i < n; i++)
    pthread_join(t[i], NULL);
  return (now() - t0) / ((double)EACH * n);
}

static double sparse(int n) {
  double sum = 0;
  for (int i = 0; i < n; i++) {
    usleep(300);
    double t = now();
    void *p = get(1 << 20);
    sum += now() - t;
    put(p);
  }
  return sum / n;
}

static __attribute__((noinline)) double deep(int n, int pairs_) {
  double d = n > 1 ? deep(n - 1, pairs_) : pairs(1 << 20, pairs_);
  __asm__ volatile("" ::: "memory");
  return d;
}

static double with_stacks(int n, uint64_t sample) {
  double without = deep(n, 20000);
  if (cistern_stacks(CISTERN_STACKS_NATIVE, sample) != CISTERN_OK)
    return -1;
  double with = deep(n, 20000);
  cistern_stacks(0, 0);
  return with - without;
}

int main(void) {
  put(get(1 << 20));
  printf("{\"pair_512\":%.1f,", pairs(512, 1000000));
  printf("\"pair_1048576\":%.1f,", pairs(1 << 20, 1000000));
  printf("\"pair_20971520\":%.1f,", pairs(20 << 20, 1000000));
  printf("\"churn_2000\":%.1f,", churn(2000, 200000));
  printf("\"churn_20000\":%.1f,", churn(20000, 200000));
  printf("\"threads_4\":%.1f,", threads(4));
  printf("\"sparse_alloc_300us\":%.1f,", sparse(1000));
  printf("\"native_8\":%.1f,", with_stacks(8, 0));
  printf("\"native_32\":%.1f,", with_stacks(32, 0));
  printf("\"sampled\":%.1f}\n", with_stacks(8, 1 << 30));
  return 0;
}
