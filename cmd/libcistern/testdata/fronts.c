/* Fronts: what C answers without Go leaves the same books. First one thread, whose own sums are compared with the
 * statistics at random moments, while history, tags, pools, captures, other streams and trims come and go; then threads
 * that share one stream and a table of who owns which 512 bytes, while another looks on. */
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

enum { LIVE = 256, THREADS = 4 };

static unsigned seed = 1;
static unsigned rnd(unsigned n) { return (unsigned)rand_r(&seed) % n; }

/* Who owns which 512 bytes of the simulated device's first 4 TiB of addresses. */
#define ADDRESSES ((size_t)1 << 42)
static _Atomic unsigned char *owned;
static uintptr_t base;

static void stamp(void *p, size_t size, unsigned char from, unsigned char to) {
  size_t first = ((uintptr_t)p - base) / 512, last = first + (size - 1) / 512;
  CHECK(last < ADDRESSES / 512);
  for (size_t i = first; i <= last; i += i + 64 < last ? 64 : i < last ? last - i : 1)
    CHECK(atomic_exchange(&owned[i], to) == from);
}

/* The program's own books. */
typedef struct sums {
  int64_t blocks, requested, allocated;
} sums;
static sums now, peak, ever;

static int64_t rounded(size_t n) { return (int64_t)((n + 511) / 512 * 512); }

static void raise(int64_t *peak, int64_t now) {
  if (*peak < now)
    *peak = now;
}

static void *slot[LIVE];
static size_t slot_size[LIVE];

static void compare(void) {
  cistern_stats s = stats_of(0);
  CHECK(s.allocations.all.current == now.blocks && s.allocations.all.peak == peak.blocks && s.allocations.all.added == ever.blocks);
  CHECK(s.requested.all.current == now.requested && s.requested.all.peak == peak.requested &&
        s.requested.all.added == ever.requested);
  CHECK(s.allocated.all.current == now.allocated && s.allocated.all.peak == peak.allocated &&
        s.allocated.all.added == ever.allocated);
  CHECK(s.active_bytes.all.current + s.inactive_bytes.all.current == s.reserved.all.current);
  cistern_snapshot *snap;
  OK(cistern_snapshot_take(0, NULL, &snap));
  int64_t used = 0, requested = 0, rest = 0;
  for (size_t i = 0; i < snap->num_blocks; i++)
    if (snap->blocks[i].state == CISTERN_BLOCK_USED) {
      used += (int64_t)snap->blocks[i].size;
      requested += (int64_t)snap->blocks[i].requested;
    } else
      rest += (int64_t)snap->blocks[i].size;
  CHECK(used == now.allocated && requested == now.requested && used + rest == s.reserved.all.current);
  cistern_snapshot_free(snap);
}

static void take(int k, size_t size, void *stream) {
  if (rnd(2)) {
    slot[k] = cistern_malloc((ssize_t)size, 0, stream);
    CHECK(slot[k] != NULL);
  } else
    OK(cistern_alloc(&slot[k], size, 0, stream, NULL));
  stamp(slot[k], size, 0, 1);
  slot_size[k] = size;
  now.blocks++, now.requested += (int64_t)size, now.allocated += rounded(size);
  ever.blocks++, ever.requested += (int64_t)size, ever.allocated += rounded(size);
  raise(&peak.blocks, now.blocks), raise(&peak.requested, now.requested), raise(&peak.allocated, now.allocated);
}

static void give(int k) {
  void *p = slot[k];
  stamp(p, slot_size[k], 1, 0);
  now.blocks--, now.requested -= (int64_t)slot_size[k], now.allocated -= rounded(slot_size[k]);
  slot[k] = NULL;
  if (rnd(2))
    cistern_free(p, 0, 0, NULL);
  else
    OK(cistern_release(p));
  if (rnd(50) == 0) {
    CHECK(cistern_release(p) == CISTERN_INVALID); /* twice */
    CHECK(cistern_base(p, NULL) == NULL);
  }
}

static void alone(int steps) {
  static const size_t sizes[] = {1, 512, 513, 3000, 4096, 100000, MIB / 4, MIB / 4 + 1, MIB, MIB, MIB, 5 * MIB + 7, 20 * MIB};
  int history = 0, tags = 0, capture = 0, routed = 0;
  uint64_t pools = 0;
  for (int i = 0; i < steps; i++) {
    int k = (int)rnd(rnd(3) ? 8 : LIVE);
    void *stream = rnd(4) ? NULL : STREAM(rnd(3));
    switch (rnd(200)) {
    default:
      if (slot[k] == NULL)
        take(k, sizes[rnd(sizeof sizes / sizeof *sizes)], stream);
      else
        give(k);
      break;
    case 0:
      OK(cistern_history(0, (history = !history) ? 1000 : 0));
      break;
    case 1:
      OK(cistern_trim(rnd(2) ? 0 : -1));
      break;
    case 2:
      if (tags == 0)
        OK(cistern_tag_push("front"));
      else
        OK(cistern_tag_pop());
      tags = !tags;
      break;
    case 3: {
      const uint64_t id[2] = {1, routed || capture ? pools : ++pools};
      if (capture)
        break;
      if (routed) {
        OK(cistern_pool_end(0, STREAM(0)));
        OK(cistern_pool_release(0, id));
      } else {
        OK(cistern_pool_create(0, id, NULL));
        OK(cistern_pool_begin(0, id, STREAM(0)));
      }
      routed = !routed;
      break;
    }
    case 4: {
      const uint64_t id[2] = {1, routed || capture ? pools : ++pools};
      if (routed)
        break;
      if (capture) {
        OK(cistern_capture_end(0, STREAM(1)));
        OK(cistern_pool_release(0, id));
      } else {
        OK(cistern_pool_create(0, id, NULL));
        OK(cistern_capture_begin(0, id, STREAM(1)));
      }
      capture = !capture;
      break;
    }
    case 5:
      if (slot[k] != NULL && !capture)
        OK(cistern_record_stream(slot[k], stream));
      break;
    case 6:
      OK(cistern_reset_peaks(0));
      peak = now;
      break;
    case 7:
      if (slot[k] != NULL) {
        size_t size;
        CHECK(cistern_base(slot[k], &size) == slot[k] && (int64_t)size == rounded(slot_size[k]));
      }
      break;
    case 8:
    case 9:
      compare();
    }
  }
  if (tags)
    OK(cistern_tag_pop());
  if (routed)
    OK(cistern_pool_end(0, STREAM(0)));
  if (capture)
    OK(cistern_capture_end(0, STREAM(1)));
  OK(cistern_history(0, 0));
  for (int k = 0; k < LIVE; k++)
    if (slot[k] != NULL)
      give(k);
  compare();
}

static int rounds = 30000;
static _Atomic int working;
static pthread_mutex_t exchange_lock = PTHREAD_MUTEX_INITIALIZER;
static void *exchange;
static size_t exchange_size;

static void *share(void *arg) {
  unsigned s = (unsigned)(uintptr_t)arg;
  void *mine[4] = {0};
  size_t size[4] = {0};
  static const size_t sizes[] = {512, 100000, MIB, MIB, MIB, 3 * MIB};
  for (int i = 0; i < rounds; i++) {
    int k = (int)((unsigned)rand_r(&s) % 4);
    if (mine[k] == NULL) {
      size[k] = sizes[(unsigned)rand_r(&s) % (sizeof sizes / sizeof *sizes)];
      mine[k] = cistern_malloc((ssize_t)size[k], 0, NULL);
      CHECK(mine[k] != NULL);
      stamp(mine[k], size[k], 0, 1);
    } else if (rand_r(&s) % 8 == 0) { /* for another thread to free */
      pthread_mutex_lock(&exchange_lock);
      void *p = exchange;
      size_t n = exchange_size;
      exchange = mine[k], exchange_size = size[k];
      mine[k] = p, size[k] = n;
      pthread_mutex_unlock(&exchange_lock);
    } else {
      stamp(mine[k], size[k], 1, 0);
      cistern_free(mine[k], 0, 0, NULL);
      mine[k] = NULL;
    }
  }
  for (int k = 0; k < 4; k++)
    if (mine[k] != NULL) {
      stamp(mine[k], size[k], 1, 0);
      OK(cistern_release(mine[k]));
    }
  atomic_fetch_sub(&working, 1);
  return NULL;
}

static void *onlook(void *arg) {
  for (int i = 0; atomic_load(&working) > 0; i++) {
    cistern_stats s = stats_of(0);
    CHECK(s.active_bytes.all.current + s.inactive_bytes.all.current == s.reserved.all.current);
    CHECK(s.allocated.all.current <= s.allocated.all.peak && s.allocated.all.current >= 0);
    switch (i % 4) {
    case 0:
      OK(cistern_trim(0));
      break;
    case 1:
      OK(cistern_history(0, 100));
      OK(cistern_history(0, 0));
      break;
    case 2: {
      cistern_snapshot *snap;
      OK(cistern_snapshot_take(0, NULL, &snap));
      cistern_snapshot_free(snap);
    }
    }
    usleep(500);
  }
  return arg;
}

int main(int argc, char **argv) {
  int steps = argc > 1 ? atoi(argv[1]) : 100000;
  if (argc > 2)
    seed = (unsigned)atoi(argv[2]);
  void *first = cistern_malloc(512, 0, NULL);
  CHECK(first != NULL);
  base = (uintptr_t)first & ~(((uintptr_t)1 << 40) - 1);
  OK(cistern_release(first));
  ever = (sums){1, 512, 512}, peak = ever;
  owned = mmap(NULL, ADDRESSES / 512, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK((void *)owned != MAP_FAILED);
  OK(cistern_stream_durable(0, STREAM(0)));
  OK(cistern_stream_durable(0, STREAM(1)));
  alone(steps);
  working = THREADS;
  pthread_t t[THREADS + 1];
  for (int i = 0; i < THREADS; i++)
    pthread_create(&t[i], NULL, share, (void *)(uintptr_t)(i + 1));
  pthread_create(&t[THREADS], NULL, onlook, NULL);
  for (int i = 0; i <= THREADS; i++)
    pthread_join(t[i], NULL);
  if (exchange != NULL)
    OK(cistern_release(exchange));
  OK(cistern_trim(0));
  cistern_stats s = stats_of(0);
  CHECK(s.allocations.all.current == 0 && s.active_bytes.all.current == 0 && s.requested.all.current == 0);
  puts("ok");
  return 0;
}
