/* Threads that allocate, free and record on several streams at once, each other's memory too. Every block is stamped in a
 * table of the program's own, so that two owners of a byte are seen. */
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

enum { THREADS = 8, SLOTS = 512, STREAMS = 6 };

static int rounds = 20000;
static pthread_mutex_t lock[SLOTS];
static void *slot[SLOTS];
static size_t slot_size[SLOTS];
/* The owner of each 512 bytes of the simulated device's first 2 TiB of addresses. */
#define ADDRESSES ((size_t)1 << 41)
static _Atomic unsigned char *owned;
static uintptr_t base;

static void stamp(void *p, size_t size, unsigned char from, unsigned char to) {
  for (size_t i = ((uintptr_t)p - base) / 512, end = i + (size + 511) / 512; i < end; i++) {
    CHECK(i < ADDRESSES / 512);
    CHECK(atomic_exchange(&owned[i], to) == from);
  }
}

static void *work(void *arg) {
  unsigned seed = (unsigned)(uintptr_t)arg;
  OK(cistern_tag_push(seed % 2 ? "odd" : "even"));
  for (int i = 0; i < rounds; i++) {
    int k = rand_r(&seed) % SLOTS;
    pthread_mutex_lock(&lock[k]);
    void *s = rand_r(&seed) % 8 == 0 ? (void *)2 : STREAM(rand_r(&seed) % STREAMS);
    if (slot[k] == NULL) {
      size_t size = (size_t)1 << rand_r(&seed) % 16;
      size = 1 + size * (rand_r(&seed) % 40);
      void *p = cistern_malloc((ssize_t)size, 0, s);
      if (p != NULL) {
        CHECK((uintptr_t)p % 512 == 0);
        stamp(p, size, 0, 1);
        slot_size[k] = size;
      } else
        CHECK(cistern_last_error(NULL, 0) == CISTERN_OUT_OF_MEMORY);
      slot[k] = p;
    } else {
      if (rand_r(&seed) % 4 == 0)
        OK(cistern_record_stream(slot[k], s));
      size_t size;
      CHECK(cistern_base(slot[k], &size) == slot[k] && size >= slot_size[k]);
      stamp(slot[k], slot_size[k], 1, 0);
      OK(cistern_release(slot[k]));
      slot[k] = NULL;
    }
    pthread_mutex_unlock(&lock[k]);
    if (i % 997 == 0) {
      cistern_snapshot *snap;
      OK(cistern_snapshot_take(0, NULL, &snap));
      cistern_snapshot_free(snap);
    }
    if (i % 1999 == 0)
      OK(cistern_trim(0));
  }
  OK(cistern_tag_pop());
  return NULL;
}

int main(int argc, char **argv) {
  if (argc > 1)
    rounds = atoi(argv[1]);
  void *first = cistern_malloc(512, 0, NULL);
  CHECK(first != NULL);
  base = (uintptr_t)first & ~(((uintptr_t)1 << 40) - 1);
  OK(cistern_release(first));
  owned = mmap(NULL, ADDRESSES / 512, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK((void *)owned != MAP_FAILED);
  OK(cistern_set_limit(0, 256 * MIB));
  OK(cistern_stream_durable(0, STREAM(0)));
  OK(cistern_stream_durable(0, STREAM(1)));
  pthread_t t[THREADS];
  for (int i = 0; i < SLOTS; i++)
    pthread_mutex_init(&lock[i], NULL);
  for (int i = 0; i < THREADS; i++)
    pthread_create(&t[i], NULL, work, (void *)(uintptr_t)(i + 1));
  for (int i = 0; i < THREADS; i++)
    pthread_join(t[i], NULL);
  for (int i = 0; i < SLOTS; i++)
    OK(cistern_release(slot[i]));
  OK(cistern_trim(0));
  cistern_stats s = stats_of(0);
  CHECK(s.allocations.all.current == 0 && s.reserved.all.current == 0 && s.allocations.all.added > rounds);
  puts("ok");
  return 0;
}
