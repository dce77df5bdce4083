/* Hostile hosts: programs that do what is legal and hard on a library. One scenario an argument, and for how many seconds:
 *
 *     cc -pthread -I include *.c -lcistern -o hosts && CISTERN_CONF=driver:sim ./hosts signals_plain 10
 *
 * It prints "ok" and ends with 0 when the library and all contents were right; without an argument it lists the scenarios. */
#define _GNU_SOURCE
#include "hosts.h"

double duration = 1;
atomic_int stop;
atomic_long rounds;
char *argument[2];

static const struct scenario {
  const char *name;
  void (*run)(void);
} scenarios[] = {
    {"descriptors", descriptors},
    {"closeall", closeall},
    {"filesize", filesize},
    {"seccomp", seccomp},
    {"threads", threads},
    {"stacks", stacks},
    {"forks", forks},
    {"execs", execs},
    {"exits", exits},
    {"setuids", setuids},
    {"elevated", elevated},
    {"nproc", nproc},
    {"space", space},
    {"dlclose", dlcloses},
    {"copies", copies},
    {"signals_plain", signals_plain},
    {"signals_onstack", signals_onstack},
    {"signals_collected", signals_collected},
    {"signals_changing", signals_changing},
    {"signals_onstack_deep", signals_onstack_deep},
    {"signals_altstack", signals_altstack},
    {"signals_deep", signals_deep},
    {"signals_profile", signals_profile},
};

enum { BLOCKS = 64, BUDGET = 512 };

static uint64_t pool_of(uintptr_t number) { return 100 + number; }

void prepare(void) {
  for (uintptr_t i = 0; i < WORKERS; i++) {
    cistern_pool_options o = {.size = sizeof o, .upstream = "pinned"};
    OK(cistern_pool_create(0, (uint64_t[2]){pool_of(i), 1}, &o));
  }
  OK(cistern_stream_durable(0, NULL));
}

void fill(uint64_t *p, size_t bytes, uint64_t with) {
  for (size_t i = 0; i < bytes / 8; i++)
    p[i] = with + i;
}

void compare(const uint64_t *p, size_t bytes, uint64_t with) {
  size_t wrong = 0;
  for (size_t i = 0; i < bytes / 8; i++)
    wrong += p[i] != with + i;
  CHECK(wrong == 0);
}

void turn(uintptr_t number, unsigned *seed) {
  void *block[BLOCKS];
  size_t size[BLOCKS];
  for (int i = 0; i < BLOCKS; i++) {
    size[i] = 512 * (size_t)(1 + rand_r(seed) % 64);
    if (i % 2 == 0) {
      OK(cistern_alloc(&block[i], size[i], 0, NULL, (uint64_t[2]){pool_of(number), 1}));
      fill(block[i], size[i], (uint64_t)(uintptr_t)block[i] ^ number << 48);
    } else {
      CHECK((block[i] = cistern_malloc((ssize_t)size[i], 0, NULL)) != NULL);
      CHECK((uintptr_t)block[i] % 512 == 0);
    }
  }
  for (int i = 0; i < BLOCKS; i++) {
    size_t found;
    CHECK(cistern_base(block[i], &found) == block[i] && found >= size[i]);
    if (i % 2 == 0)
      compare(block[i], size[i], (uint64_t)(uintptr_t)block[i] ^ number << 48);
    OK(cistern_release(block[i]));
  }
  atomic_fetch_add(&rounds, 1);
}

void *work(void *number) {
  unsigned seed = (unsigned)(uintptr_t)number + 1;
  while (!stop)
    turn((uintptr_t)number, &seed);
  return NULL;
}

int main(int argc, char **argv) {
  if (argc < 2) {
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++)
      puts(scenarios[i].name);
    return 0;
  }
  if (argc > 2)
    duration = atof(argv[2]);
  for (int i = 0; i < 2 && argc > 3 + i; i++)
    argument[i] = argv[3 + i];
  for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++)
    if (strcmp(argv[1], scenarios[i].name) == 0) {
      scenarios[i].run();
      if (argument[0] == NULL)
        puts("ok");
      return 0;
    }
  fprintf(stderr, "hosts: there is no scenario %s\n", argv[1]);
  return 2;
}
