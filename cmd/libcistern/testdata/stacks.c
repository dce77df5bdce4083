/* Stacks of native functions: allocations by stack, through every function that hands memory out; which
 * requests are caught; threads; what happens while stacks go on and off. */
#include "check.h"

#include <pthread.h>
#include <sys/syscall.h>

#define KEEP __asm__ volatile("" ::: "memory") /* no tail call: the frame is there */
#define FAR __attribute__((noinline))

FAR static void *by_malloc(size_t n) { void *p = cistern_malloc((ssize_t)n, 0, NULL); KEEP; return p; }
FAR static void *by_alloc(size_t n) { void *p; OK(cistern_alloc(&p, n, 0, NULL, NULL)); KEEP; return p; }
FAR static void *by_pool(size_t n) { void *p; const uint64_t pool[2] = {1, 2}; OK(cistern_alloc(&p, n, 0, NULL, pool)); KEEP; return p; }
FAR static void *by_options(size_t n) {
  void *p;
  cistern_alloc_options o = {.size = sizeof o, .library = cistern_library("somebody")};
  OK(cistern_alloc_with(&p, n, 0, NULL, &o));
  KEEP;
  return p;
}
FAR static void *by_source(size_t n) {
  cistern_source s = {NULL, {.size = sizeof s.options, .flags = CISTERN_ALLOC_HOST_ORDER}};
  void *p = cistern_source_malloc(&s, n, 0);
  KEEP;
  return p;
}
FAR static void *by_tag(size_t n) {
  OK(cistern_tag_push("a tag"));
  void *p = cistern_malloc((ssize_t)n, 0, STREAM(3));
  OK(cistern_tag_pop());
  return p;
}
static const struct way {
  const char *name;
  void *(*get)(size_t);
} ways[] = {{"by_malloc", by_malloc}, {"by_alloc", by_alloc}, {"by_pool", by_pool}, {"by_options", by_options},
            {"by_source", by_source}, {"by_tag", by_tag}};
enum { WAYS = sizeof ways / sizeof *ways };

FAR static void *through(const struct way *w, size_t n) { void *p = w->get(n); KEEP; return p; }

static size_t usage(cistern_stack_use *u, size_t cap) {
  size_t n;
  OK(cistern_stack_usage(0, u, cap, &n));
  return n;
}

/* starts reports whether a stack's first lines are these functions, in this program. */
static int starts(uint32_t stack, const char *first, const char *second) {
  char text[1 << 16], want[256];
  OK(cistern_stack_text(stack, text, sizeof text));
  char *line = text;
  for (int i = 0; i < 2; i++) {
    int n = snprintf(want, sizeof want, "%s /", i == 0 ? first : second);
    char *end = strchr(line, '\n'), *program = strstr(line, "/stacks_c");
    if (end == NULL || strncmp(line, want, (size_t)n) != 0 || program == NULL || program > end)
      return 0;
    line = end + 1;
  }
  return strstr(line, "main /") != NULL;
}

static void every_way(void) {
  const uint64_t pool[2] = {1, 2};
  OK(cistern_pool_create(0, pool, NULL));
  OK(cistern_stacks(CISTERN_STACKS_NATIVE, 0));
  void *p[WAYS][3];
  for (size_t w = 0; w < WAYS; w++)
    for (int i = 0; i < 3; i++)
      CHECK((p[w][i] = through(&ways[w], (w + 1) * MIB)) != NULL);
  cistern_stack_use u[32];
  CHECK(usage(u, 32) == WAYS);
  CHECK(usage(NULL, 0) == WAYS);
  for (size_t i = 0; i < WAYS; i++) {
    size_t w = WAYS - 1 - i; /* the most bytes first */
    CHECK(u[i].stack != 0 && u[i].blocks == 3 && u[i].requested == 3 * (w + 1) * MIB && u[i].allocated == u[i].requested);
    if (!starts(u[i].stack, ways[w].name, "through")) {
      char text[4096];
      cistern_stack_text(u[i].stack, text, sizeof text);
      fprintf(stderr, "stack of %s:\n%s\n", ways[w].name, text);
      CHECK(0);
    }
  }
  /* What is free has no stack, and its next block has its own, or none. */
  for (int i = 0; i < 3; i++)
    OK(cistern_release(p[0][i]));
  CHECK(usage(u, 32) == WAYS - 1);
  OK(cistern_stacks(0, 0));
  CHECK(usage(u, 32) == 0);
  void *again = through(&ways[0], MIB);
  OK(cistern_stacks(CISTERN_STACKS_NATIVE, 64 * MIB));
  CHECK(usage(u, 32) == 1 && u[0].stack == 0); /* stopping forgot them */
  OK(cistern_release(again));
  for (size_t w = 1; w < WAYS; w++)
    for (int i = 0; i < 3; i++)
      OK(cistern_release(p[w][i]));
  CHECK(usage(u, 32) == 0);
}

/* blocks_with counts live allocations whose stack is known, and those in all. */
static int64_t blocks_with(int64_t *all) {
  cistern_stack_use u[4096];
  size_t n = usage(u, 4096);
  CHECK(n <= 4096);
  int64_t known = 0;
  *all = 0;
  for (size_t i = 0; i < n; i++) {
    *all += u[i].blocks;
    known += u[i].stack != 0 ? u[i].blocks : 0;
  }
  return known;
}

static void *p[40000];

/* Small requests are caught by their share of the sample, large ones always; a block from a magazine has no stack of whoever had
 * it before. */
static void sampling(int part) {
  const struct {
    uint64_t sample;
    size_t size;
    int n;
    double share;
  } cases[] = {{0, 512, 2000, 1}, {MIB, MIB, 500, 1}, {MIB, 2 * MIB, 500, 1}, {MIB, MIB / 4, 8000, 0.25}, {MIB, 8192, 40000, 1.0 / 128}, {UINT64_MAX, 512, 2000, 0}};
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
    for (int round = 0; round < 3; round++) {
      OK(cistern_stacks(CISTERN_STACKS_NATIVE, cases[c].sample));
      int n = cases[c].n / part;
      for (int i = 0; i < n; i++) {
        CHECK((p[i] = by_malloc(cases[c].size)) != NULL);
        if (i % 3 == 0) { /* in and out of the magazine */
          cistern_free(p[i], 0, 0, NULL);
          CHECK((p[i] = by_malloc(cases[c].size)) != NULL);
        }
      }
      int64_t all, known = blocks_with(&all);
      double want = n * cases[c].share, off = (double)known - want;
      if (all != n || off * off > 25 * want * (1 - cases[c].share)) { /* five standard deviations */
        fprintf(stderr, "case %zu: %ld of %ld blocks have a stack, want about %.0f\n", c, (long)known, (long)all, want);
        CHECK(0);
      }
      for (int i = 0; i < n; i++)
        OK(cistern_release(p[i]));
    }
}

static volatile int stop;
static void *toggle(void *arg) {
  for (int i = 0; !stop; i++)
    OK(cistern_stacks(i % 2 ? CISTERN_STACKS_NATIVE : 0, (uint64_t)(i % 3) * 4096));
  return arg;
}

static void *churn(void *arg) {
  const struct way *w = arg;
  void *mine[32] = {0};
  for (int i = 0; i < 3000; i++) {
    int k = i * 7 % 32;
    cistern_free(mine[k], 0, 0, NULL);
    CHECK((mine[k] = through(w, 512u << i % 12)) != NULL);
    if (i % 500 == 0) {
      cistern_stack_use u[64];
      char text[2000];
      size_t n = usage(u, 64);
      for (size_t j = 0; j < n && j < 64; j++)
        if (u[j].stack != 0)
          OK(cistern_stack_text(u[j].stack, text, sizeof text));
    }
  }
  for (int k = 0; k < 32; k++)
    cistern_free(mine[k], 0, 0, NULL);
  return NULL;
}

static void threads(void) {
  pthread_t t[4], other;
  pthread_create(&other, NULL, toggle, NULL);
  for (int i = 0; i < 4; i++)
    pthread_create(&t[i], NULL, churn, (void *)&ways[i]);
  for (int i = 0; i < 4; i++)
    pthread_join(t[i], NULL);
  stop = 1;
  pthread_join(other, NULL);
  OK(cistern_stacks(CISTERN_STACKS_NATIVE, 0));
  cistern_stack_use u[4];
  CHECK(usage(u, 4) == 0);
}

FAR static void *deep(int n) {
  void *q = n > 0 ? deep(n - 1) : cistern_malloc(MIB, 0, NULL);
  KEEP;
  return q;
}

/* A stack that is too deep loses its outermost frames; a text that is too long its end. */
static void bounds(void) {
  void *q = deep(300);
  cistern_stack_use u;
  CHECK(usage(&u, 1) == 1);
  char text[1 << 16], small[20];
  OK(cistern_stack_text(u.stack, text, sizeof text));
  int lines = 1;
  for (char *c = text; *c != 0; c++)
    lines += *c == '\n';
  CHECK(lines == 64 && strncmp(text, "deep /", 6) == 0 && strstr(text, "main") == NULL);
  OK(cistern_stack_text(u.stack, small, sizeof small));
  CHECK(strlen(small) == sizeof small - 1 && strncmp(small, text, sizeof small - 1) == 0);
  OK(cistern_stack_text(u.stack, NULL, 0));
  FAILS(CISTERN_INVALID, "no stack 12345", cistern_stack_text(12345, text, sizeof text));
  CHECK(text[0] == 0);
  OK(cistern_release(q));
}

/* The argument makes less of it: a share of so many. */
int main(int argc, char **argv) {
  every_way();
  sampling(argc > 1 ? atoi(argv[1]) : 1);
  threads();
  bounds();
  puts("ok");
  return 0;
}
