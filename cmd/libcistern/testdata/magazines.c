/* Magazines: what C answers without Go leaves the same books. First one thread, whose own sums are compared with the
 * statistics at random moments, while history, tags, pools, captures, pauses, other streams and trims come and go; then threads
 * that share one stream and a table of the owners of each 512 bytes, while another looks on. */
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

enum { LIVE = 256, THREADS = 4 };

static unsigned seed = 1;
static unsigned rnd(unsigned n) { return (unsigned)rand_r(&seed) % n; }

/* The owner of each 512 bytes of the simulated device's first 4 TiB of addresses. */
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
static sums now, peak, ever, guests; /* guests: of now, what a library asked for */
static uint32_t guest;
static int64_t small, small_ever; /* blocks cut for requests of up to 256 KiB */

static int64_t rounded(size_t n) { return (int64_t)((n + 511) / 512 * 512); }

static void raise(int64_t *peak, int64_t now) {
  if (*peak < now)
    *peak = now;
}

static void *slot[LIVE];
static size_t slot_size[LIVE];
static void *slot_stream[LIVE];
static uint32_t slot_library[LIVE];
static unsigned slot_pauses[LIVE]; /* how many there had been when it was allocated */
static int paused, no_pauses; /* memory from cuMemAlloc cannot be paused */
static unsigned pauses;
static int64_t awake; /* bytes allocated since the last one */
static int64_t history_allocs, history_frees; /* since history is on */

static void compare(void) {
  cistern_stats s = stats_of(0);
  CHECK(s.allocations.all.current == now.blocks && s.allocations.all.peak == peak.blocks && s.allocations.all.added == ever.blocks);
  CHECK(s.requested.all.current == now.requested && s.requested.all.peak == peak.requested &&
        s.requested.all.added == ever.requested);
  CHECK(s.allocated.all.current == now.allocated && s.allocated.all.peak == peak.allocated &&
        s.allocated.all.added == ever.allocated);
  CHECK(s.allocations.small.current == small && s.allocations.small.added == small_ever);
  CHECK(s.allocations.large.current == now.blocks - small && s.allocations.large.added == ever.blocks - small_ever);
  CHECK(s.active_bytes.all.current + s.inactive_bytes.all.current == s.reserved.all.current + s.paused.current);
  CHECK(s.paused.current == 0 || paused);
  CHECK(s.reserved.all.current >= awake); /* nothing that was paused is handed out */
  cistern_library_use use[3];
  size_t n;
  OK(cistern_library_usage(0, use, 3, &n));
  CHECK(n == (size_t)(guests.blocks > 0) + (now.blocks > guests.blocks));
  for (size_t i = 0; i < n; i++) {
    sums u = use[i].library == guest ? guests
                                     : (sums){now.blocks - guests.blocks, now.requested - guests.requested, now.allocated - guests.allocated};
    CHECK(use[i].blocks == u.blocks && (int64_t)use[i].requested == u.requested && (int64_t)use[i].allocated == u.allocated);
  }
  cistern_snapshot *snap;
  OK(cistern_snapshot_take(0, NULL, &snap));
  int64_t used = 0, requested = 0, rest = 0;
  for (size_t i = 0; i < snap->num_blocks; i++)
    if (snap->blocks[i].state == CISTERN_BLOCK_USED) {
      used += (int64_t)snap->blocks[i].size;
      requested += (int64_t)snap->blocks[i].requested;
    } else
      rest += (int64_t)snap->blocks[i].size;
  CHECK(used == now.allocated && requested == now.requested && used + rest == s.reserved.all.current + s.paused.current);
  cistern_snapshot_free(snap);
}

static int history, tags, capture, routed;
static uint64_t pools; /* the pool that a stream is captured into or routed to is {1, pools} */

static void take(int k, size_t size, void *stream) {
  slot_library[k] = 0;
  switch (rnd(5)) {
  case 0:
    slot_library[k] = guest;
    const cistern_alloc_options o = {.size = sizeof o, .library = guest};
    OK(cistern_alloc_with(&slot[k], size, 0, stream, &o));
    guests.blocks++, guests.requested += (int64_t)size, guests.allocated += rounded(size);
    break;
  case 1:
    OK(cistern_alloc_with(&slot[k], size, 0, stream, NULL));
    break;
  case 2:
    OK(cistern_alloc(&slot[k], size, 0, stream, NULL));
    break;
  default:
    slot[k] = cistern_malloc((ssize_t)size, 0, stream);
    CHECK(slot[k] != NULL);
  }
  stamp(slot[k], size, 0, 1);
  if (rnd(4) == 0) {
    cistern_block b;
    OK(cistern_find(slot[k], &b));
    int in_pool = (routed && stream == STREAM(0)) || (capture && stream == STREAM(1));
    CHECK(b.library == slot_library[k]);
    CHECK(b.requested == size && (b.tag != 0) == tags && b.pool[0] == (uint64_t)in_pool && b.pool[1] == (in_pool ? pools : 0));
  }
  small += size <= MIB / 4;
  small_ever += size <= MIB / 4;
  slot_size[k] = size;
  slot_stream[k] = stream;
  slot_pauses[k] = pauses;
  awake += rounded(size);
  history_allocs++;
  now.blocks++, now.requested += (int64_t)size, now.allocated += rounded(size);
  ever.blocks++, ever.requested += (int64_t)size, ever.allocated += rounded(size);
  raise(&peak.blocks, now.blocks), raise(&peak.requested, now.requested), raise(&peak.allocated, now.allocated);
}

static void forget(int k) {
  small -= slot_size[k] <= MIB / 4;
  now.blocks--, now.requested -= (int64_t)slot_size[k], now.allocated -= rounded(slot_size[k]);
  if (slot_pauses[k] == pauses)
    awake -= rounded(slot_size[k]);
  if (slot_library[k] != 0)
    guests.blocks--, guests.requested -= (int64_t)slot_size[k], guests.allocated -= rounded(slot_size[k]);
  slot[k] = NULL;
  history_frees++;
}

static void give(int k) {
  void *p = slot[k];
  stamp(p, slot_size[k], 1, 0);
  forget(k);
  if (rnd(2))
    cistern_free(p, 0, 0, NULL);
  else
    OK(cistern_release(p));
  if (rnd(50) == 0) {
    CHECK(cistern_release(p) == CISTERN_INVALID); /* twice */
    CHECK(cistern_base(p, NULL) == NULL);
  }
}

/* What was done while history was on is what it has. */
static void check_history(void) {
  static cistern_event list[1000];
  int64_t allocs = 0, frees = 0;
  uint64_t lost;
  size_t n;
  do {
    OK(cistern_history_drain(0, list, sizeof list / sizeof *list, &n, &lost));
    CHECK(lost == 0);
    for (size_t i = 0; i < n; i++) {
      allocs += list[i].kind == CISTERN_EVENT_ALLOC;
      frees += list[i].kind == CISTERN_EVENT_FREE_REQUESTED;
    }
  } while (n > 0);
  CHECK(allocs == history_allocs && frees == history_frees);
}

static void turn_history(void) {
  if (history)
    check_history();
  OK(cistern_history(0, (history = !history) ? 100000 : 0));
  history_allocs = history_frees = 0;
}

static void turn_tag(void) {
  if (tags)
    OK(cistern_tag_pop());
  else
    OK(cistern_tag_push("magazine"));
  tags = !tags;
}

static void turn_route(void) {
  if (capture)
    return;
  const uint64_t id[2] = {1, routed ? pools : ++pools};
  if (routed) {
    OK(cistern_pool_end(0, STREAM(0)));
    OK(cistern_pool_release(0, id));
  } else {
    OK(cistern_pool_create(0, id, NULL));
    OK(cistern_pool_begin(0, id, STREAM(0)));
  }
  routed = !routed;
}

static void turn_capture(void) {
  if (routed)
    return;
  const uint64_t id[2] = {1, capture ? pools : ++pools};
  if (capture) {
    OK(cistern_capture_end(0, STREAM(1)));
    OK(cistern_pool_release(0, id));
  } else {
    OK(cistern_pool_create(0, id, NULL));
    OK(cistern_capture_begin(0, id, STREAM(1)));
  }
  capture = !capture;
}

static void turn_pause(void) {
  if (capture || no_pauses)
    return;
  if (paused)
    OK(cistern_resume(0, NULL, NULL));
  else {
    const cistern_pause_options o = {.size = sizeof o, .keep = rnd(4) ? CISTERN_KEEP_NONE : CISTERN_KEEP_HOST};
    OK(cistern_pause(0, &o, NULL));
    cistern_stats s = stats_of(0);
    CHECK(s.paused.current == now.allocated);
    pauses++;
    awake = 0;
  }
  paused = !paused;
}

static void turn(unsigned what) {
  switch (what) {
  case 0:
    turn_history();
    break;
  case 1:
    OK(cistern_trim(rnd(2) ? 0 : -1));
    break;
  case 2:
    turn_tag();
    break;
  case 3:
    turn_route();
    break;
  case 4:
    turn_capture();
    break;
  case 5:
    turn_pause();
  }
}

static void alone(int steps) {
  static const size_t sizes[] = {1, 512, 513, 3000, 4096, 100000, MIB / 4, MIB / 4 + 1, MIB, MIB, MIB, 5 * MIB + 7, 20 * MIB};
  for (int i = 0; i < steps; i++) {
    int k = (int)rnd(rnd(3) ? 8 : LIVE);
    void *stream = rnd(4) ? NULL : STREAM(rnd(3));
    unsigned what = rnd(200);
    switch (what) {
    default:
      if (slot[k] != NULL)
        give(k);
      else {
        take(k, sizes[rnd(sizeof sizes / sizeof *sizes)], stream);
        for (unsigned again = rnd(4); again > 0; again--) { /* a temporary, with something between free and request */
          give(k);
          if (rnd(8) == 0)
            turn(rnd(6));
          take(k, slot_size[k], stream);
        }
      }
      break;
    case 0:
    case 1:
    case 2:
    case 3:
    case 4:
    case 5:
      turn(what);
      break;
    case 12:
      if (slot[k] != NULL && !capture) {
        OK(cistern_record_stream(slot[k], stream));
        if (stream != slot_stream[k]) {
          give(k); /* it waits for that stream */
          cistern_stats s = stats_of(0);
          CHECK(s.active.all.current > now.blocks);
        }
      }
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
      if (slot[k] == NULL) { /* it goes by itself */
        static const uint64_t pool[2] = {0, 0};
        static cistern_block list[LIVE];
        size_t n;
        OK(cistern_pool_blocks(0, pool, list, LIVE, &n));
        CHECK(n <= LIVE);
        take(k, sizes[rnd(8)], NULL);
        OK(cistern_pool_restore(0, pool, list, n));
        void *p = slot[k];
        stamp(p, slot_size[k], 1, 0);
        forget(k);
        CHECK(cistern_release(p) == CISTERN_INVALID);
      }
      break;
    case 11:
      for (unsigned n = rnd(LIVE); k < LIVE && n > 0; k++, n--) /* many in a row */
        if (slot[k] != NULL)
          give(k);
      break;
    case 9:
    case 10:
      compare();
    }
  }
  if (tags)
    turn_tag();
  if (routed)
    turn_route();
  if (capture)
    turn_capture();
  if (history)
    turn_history();
  if (paused)
    turn_pause();
  for (int k = 0; k < LIVE; k++)
    if (slot[k] != NULL)
      give(k);
  compare();
}

enum { EACH = 10, SMALL = 2 * EACH, ALL = 4 * EACH };
static const size_t peak_sizes[] = {512, 4096, MIB, 3 * MIB};

/* Gives some blocks back and asks for the same again. */
static void blink(void **p, int from, int to) {
  for (int i = from; i < to; i++)
    cistern_free(p[i], 0, 0, NULL);
  for (int i = to; i-- > from;) {
    p[i] = cistern_malloc((ssize_t)peak_sizes[i / EACH], 0, NULL);
    CHECK(p[i] != NULL);
  }
}

/* What was free for a moment only, between frees and the requests after them, is in the peaks: in those of each class, and
 * in those of both, which are less than their sum where the moments were different ones. */
static void peaks(void) {
  const int64_t small_bytes = EACH * (512 + 4096), large_bytes = (int64_t)(EACH * 4 * MIB);
  void *p[ALL];
  for (int round = 0; round < 20; round++) {
    for (int i = 0; i < ALL; i++) {
      p[i] = cistern_malloc((ssize_t)peak_sizes[i / EACH], 0, NULL);
      CHECK(p[i] != NULL);
    }
    OK(cistern_reset_peaks(0));
    cistern_stats before = stats_of(0);
    const cistern_grouped *b = &before.inactive_bytes;
    blink(p, SMALL, ALL);
    blink(p, 0, SMALL);
    if (round % 2) {
      cistern_stats s = stats_of(0);
      CHECK(s.inactive_bytes.small.peak == b->small.current + small_bytes);
      CHECK(s.inactive_bytes.large.peak == b->large.current + large_bytes);
      CHECK(s.inactive_bytes.all.peak == b->all.current + large_bytes);
    }
    blink(p, 0, ALL);
    cistern_stats after = stats_of(0);
    CHECK(after.reserved.all.peak == before.reserved.all.current);
    CHECK(after.inactive_bytes.all.peak == b->all.current + small_bytes + large_bytes);
    CHECK(after.allocated.all.peak == before.allocated.all.current && after.active_bytes.all.peak == before.active_bytes.all.current);
    for (int i = 0; i < ALL; i++)
      OK(cistern_release(p[i]));
  }
}

static int rounds;
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
    CHECK(s.active_bytes.all.current + s.inactive_bytes.all.current == s.reserved.all.current + s.paused.current);
    CHECK(s.allocated.all.current <= s.allocated.all.peak && s.allocated.all.current >= 0);
    switch (i % 5) {
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
      break;
    }
    case 3: {
      const cistern_pause_options o = {.size = sizeof o, .keep = CISTERN_KEEP_NONE};
      if (no_pauses)
        break;
      OK(cistern_pause(0, &o, NULL));
      OK(cistern_resume(0, NULL, NULL));
    }
    }
    usleep(500);
  }
  return arg;
}

int main(int argc, char **argv) {
  int steps = argc > 1 ? atoi(argv[1]) : 100000;
  rounds = steps / 2;
  if (argc > 2)
    seed = (unsigned)atoi(argv[2]);
  CHECK((guest = cistern_library("guest")) != 0);
  const char *conf = getenv("CISTERN_CONF");
  no_pauses = conf != NULL && strstr(conf, "backend:malloc") != NULL;
  void *first = cistern_malloc(512, 0, NULL);
  CHECK(first != NULL);
  base = (uintptr_t)first & ~(((uintptr_t)1 << 40) - 1);
  OK(cistern_release(first));
  ever = (sums){1, 512, 512}, peak = ever, small_ever = 1;
  owned = mmap(NULL, ADDRESSES / 512, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK((void *)owned != MAP_FAILED);
  OK(cistern_stream_durable(0, STREAM(0)));
  OK(cistern_stream_durable(0, STREAM(1)));
  alone(steps);
  peaks();
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
