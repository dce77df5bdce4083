//go:build linux && cgo

/* Requests and frees that need no call into Go; see front.h. Everything here is some tens of nanoseconds long, takes one
 * lock at a time, and gives up rather than wait: Go knows how to. */
#include "front.h"
#include "shim.h"

#define LOAD(p) __atomic_load_n(p, __ATOMIC_ACQUIRE)
#define STORE(p, v) __atomic_store_n(p, v, __ATOMIC_RELEASE)
#define LIKELY(x) __builtin_expect(!!(x), 1)

#define AT(field) offsetof(front, field)
const uint64_t front_layout[FRONT_LAYOUT] = {
    AT(word),  AT(count), AT(net),  AT(owner),     AT(taken),   AT(polls),   AT(turns),  AT(puts),
    AT(takes), AT(frees), AT(epoch), AT(mask),     AT(small_max), AT(version), AT(limited), AT(routed),
    AT(index), AT(tray),  sizeof(front), offsetof(front_entry, mark) /* of an entry */,
    offsetof(front_flags, quick), offsetof(front_flags, waiting)};

const int front_constants[FRONT_CONSTANTS] = {FRONT_SLOTS,      FRONT_CLASSES,    FRONT_POLL_EVERY, FRONT_MARK_BITS,
                                              FRONT_TURNS_MANY, FRONT_TURNS_MOST, FRONT_AGE_SHARED};

static inline void pause_cpu(void) {
#if defined __x86_64__ || defined __i386__
  __builtin_ia32_pause();
#elif defined __aarch64__
  __asm__ volatile("yield");
#endif
}

/* ---- fronts by index, and by stream ---- */

static struct known {
  front *front;
  const front_flags *flags;
  uintptr_t stream; /* by which front_take finds it, as whose() has it; 0 until it does */
} fronts[FRONT_MAX + 1] __attribute__((aligned(64)));

uint64_t front_shut __attribute__((aligned(64))); /* read by everybody, beside nothing that is written */
static const uint64_t next_turn = (uint64_t)1 << 32;

void front_stop(void) { __atomic_add_fetch(&front_shut, next_turn + 1, __ATOMIC_SEQ_CST); }

void front_hold(void) { __atomic_add_fetch(&front_shut, next_turn + 1, __ATOMIC_SEQ_CST); }

void front_release(void) { __atomic_sub_fetch(&front_shut, 1, __ATOMIC_SEQ_CST); }

void front_add(uint32_t index, front *f, const front_flags *flags) {
  fronts[index].flags = flags;
  STORE(&fronts[index].front, f);
}

/* Streams with a front last for ever, so what is once in this table stays. */
enum { STREAM_BITS = 13, STREAM_TRIES = 16 };
static struct stream_slot {
  uintptr_t handle;
  int32_t device;
  uint32_t index; /* 0: empty; written last */
} streams[1 << STREAM_BITS];
static uint32_t streams_lock;

static inline uint32_t stream_place(int device, uintptr_t handle) {
  return (uint32_t)(((handle ^ ((uint64_t)(uint32_t)device << 48)) * 0x9e3779b97f4a7c15u) >> (64 - STREAM_BITS));
}

static inline uint32_t stream_find(int device, uintptr_t handle) {
  uint32_t at = stream_place(device, handle);
  for (int i = 0; i < STREAM_TRIES; i++) {
    struct stream_slot *s = &streams[(at + i) & ((1 << STREAM_BITS) - 1)];
    uint32_t index = LOAD(&s->index);
    if (index == 0)
      return 0;
    if (s->handle == handle && s->device == device)
      return index;
  }
  return 0;
}

/* whose is the same for the two handles of a legacy default stream, and 0 for none. */
static inline uintptr_t whose(void *stream) { return stream == NULL ? 1 : (uintptr_t)stream; }

static void stream_add(int device, uintptr_t handle, uint32_t index) {
  STORE(&fronts[index].stream, whose((void *)handle));
  if (__atomic_exchange_n(&streams_lock, 1, __ATOMIC_ACQUIRE) != 0)
    return; /* another thread adds one: this one is added after the next request */
  if (stream_find(device, handle) == 0) {
    uint32_t at = stream_place(device, handle);
    for (int i = 0; i < STREAM_TRIES; i++) {
      struct stream_slot *s = &streams[(at + i) & ((1 << STREAM_BITS) - 1)];
      if (s->index == 0) {
        s->handle = handle;
        s->device = device;
        STORE(&s->index, index);
        break;
      }
    }
  }
  STORE(&streams_lock, 0);
}

/* ---- blocks that may be put into a tray ---- */

/* A table of sets of four. Where a set is full a block is not remembered, and its free is Go's. Nobody but the owner of a
 * block asks about it, so an entry is written and taken with one atomic operation each. */
enum { SET_BITS = 15, SET_SIZE = 4, BUSY = 1, SIZE_BITS = 40, MARK_AT = 52, MARK_MASK = (1 << FRONT_MARK_BITS) - 1 };
static struct block_entry {
  uint64_t key;  /* the address; 0 empty, BUSY while it is written or taken */
  uint64_t info; /* the bytes asked for, the index of the front from bit SIZE_BITS, the mark from bit MARK_AT */
} blocks[1 << SET_BITS][SET_SIZE] __attribute__((aligned(64)));

static inline struct block_entry *block_set(uint64_t addr) {
  return blocks[((addr >> 9) * 0x9e3779b97f4a7c15u) >> (64 - SET_BITS)];
}

static inline void block_add(uint64_t addr, uint64_t size, uint32_t index, uint32_t mark) {
  if (size >> SIZE_BITS)
    return;
  uint64_t info = size | (uint64_t)index << SIZE_BITS | (uint64_t)mark << MARK_AT;
  struct block_entry *set = block_set(addr);
  for (int i = 0; i < SET_SIZE; i++) {
    uint64_t empty = 0;
    if (LOAD(&set[i].key) == 0 &&
        __atomic_compare_exchange_n(&set[i].key, &empty, BUSY, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
      __atomic_store_n(&set[i].info, info, __ATOMIC_RELAXED);
      STORE(&set[i].key, addr);
      return;
    }
  }
}

/* block_take removes a block and returns what add said of it, 0 if it is not there. */
static inline uint64_t block_take(uint64_t addr) {
  struct block_entry *set = block_set(addr);
  for (int i = 0; i < SET_SIZE; i++) {
    uint64_t key = addr;
    if (LOAD(&set[i].key) == addr &&
        __atomic_compare_exchange_n(&set[i].key, &key, BUSY, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
      uint64_t info = __atomic_load_n(&set[i].info, __ATOMIC_RELAXED);
      STORE(&set[i].key, 0);
      return info;
    }
  }
  return 0;
}

/* ---- the tray ---- */

static inline int lock(front *f) {
  for (int wait = 1; wait <= 64; wait *= 2) {
    if (LIKELY(LOAD(&f->word) == 0) && LIKELY(__atomic_exchange_n(&f->word, 1, __ATOMIC_ACQUIRE) == 0))
      return 1;
    for (int i = 0; i < wait; i++)
      pause_cpu();
  }
  return 0;
}

static inline void unlock(front *f) { STORE(&f->word, 0); }

static inline int64_t rounded(const front *f, uint64_t size) { return (int64_t)((size + f->mask) & ~f->mask); }

/* below reports whether a sum may fall by one block. */
static inline int below(int64_t blocks, int64_t bytes, int64_t requested, int64_t n, int64_t r, const front_amount *limit) {
  return 1 - blocks <= limit->blocks && n - bytes <= limit->bytes && r - requested <= limit->requested;
}

/* visit notes which thread is here and returns the age of the oldest block that may be taken. */
static inline uint32_t visit(front *f) {
  uint64_t me = (uintptr_t)&shim_self;
  if (f->owner != me) {
    f->owner = me;
    f->turns += FRONT_TURNS_MANY;
    if (f->turns > FRONT_TURNS_MOST)
      f->turns = FRONT_TURNS_MOST;
  } else if (f->turns > 0)
    f->turns--;
  return f->turns > FRONT_TURNS_MANY ? FRONT_AGE_SHARED : 0;
}

/* has reports whether the tray may have a block of this size. It looks without the lock: most requests are not met from
 * the tray, and a wrong answer does no harm. */
static inline int has(front *f, uint64_t size) {
  for (uint32_t i = __atomic_load_n(&f->count, __ATOMIC_RELAXED); i-- > 0;)
    if (__atomic_load_n(&f->tray[i].requested, __ATOMIC_RELAXED) == size)
      return 1;
  return 0;
}

void *front_take(uint64_t size, int device, void *stream, int *known) {
  uint32_t index = stream_find(device, (uintptr_t)stream);
  *known = index != 0;
  uint64_t turn = front_turn();
  if (index == 0 || (uint32_t)turn != 0)
    return NULL;
  front *f = fronts[index].front;
  const front_flags *flags = fronts[index].flags;
  if (!LOAD(&flags->quick) || LOAD(&f->routed) || !has(f, size) || !lock(f))
    return NULL;
  uint32_t oldest = visit(f);
  for (uint32_t i = f->count; i-- > 0;) {
    uint32_t mark = f->tray[i].mark;
    if (f->tray[i].requested != size || mark == 0 || ((f->version - mark) & MARK_MASK) > oldest)
      continue;
    int64_t n = rounded(f, size), r = (int64_t)size;
    int c = (uint64_t)n > f->small_max;
    front_amount *own = &f->net[c], *other = &f->net[1 - c];
    if (!below(own->blocks, own->bytes, own->requested, n, r, &f->takes[c]) ||
        !below(own->blocks + other->blocks, own->bytes + other->bytes, own->requested + other->requested, n, r,
               &f->takes[FRONT_CLASSES]))
      break;
    if (LOAD(&flags->waiting)) {
      if (f->polls % FRONT_POLL_EVERY == FRONT_POLL_EVERY - 1)
        break; /* this request looks after frees that wait for other streams */
      f->polls++;
    }
    uint64_t addr = f->tray[i].addr;
    __atomic_store_n(&f->count, f->count - 1, __ATOMIC_RELAXED);
    for (; i < f->count; i++)
      f->tray[i] = f->tray[i + 1];
    own->blocks--;
    own->bytes -= n;
    own->requested -= r;
    f->taken[c].blocks++;
    f->taken[c].bytes += n;
    f->taken[c].requested += r;
    unlock(f);
    block_add(addr, size, index, mark);
    if (!LIKELY(front_turn() == turn))
      block_take(addr);
    return (void *)addr;
  }
  unlock(f);
  return NULL;
}

/* put is front_put for a block that was taken, of which add said info. */
static inline int put(void *ptr, uint64_t info) {
  uint64_t size = info & (((uint64_t)1 << SIZE_BITS) - 1);
  struct known *k = &fronts[info >> SIZE_BITS & FRONT_MAX];
  front *f = k->front;
  if (!LOAD(&k->flags->quick) || !lock(f))
    return 0;
  if (!LIKELY((uint32_t)front_turn() == 0)) { /* asked here, as whoever holds has the lock next, or had it */
    unlock(f);
    return 0;
  }
  visit(f);
  int64_t n = rounded(f, size);
  int c = (uint64_t)n > f->small_max;
  front_amount *own = &f->net[c], *other = &f->net[1 - c];
  if (f->count == FRONT_SLOTS || own->blocks + 1 > f->puts[c].blocks || own->bytes + n > f->puts[c].bytes ||
      own->blocks + other->blocks + 1 > f->puts[FRONT_CLASSES].blocks ||
      own->bytes + other->bytes + n > f->puts[FRONT_CLASSES].bytes || own->bytes + f->taken[c].bytes + n >= f->frees[c]) {
    unlock(f);
    return 0;
  }
  f->tray[f->count] = (front_entry){(uintptr_t)ptr, size, LOAD(&f->epoch), (uint32_t)(info >> MARK_AT), 0};
  __atomic_store_n(&f->count, f->count + 1, __ATOMIC_RELAXED);
  own->blocks++;
  own->bytes += n;
  own->requested += (int64_t)size;
  unlock(f);
  return 1;
}

int front_put(void *ptr) {
  uint64_t info = block_take((uintptr_t)ptr);
  return info != 0 && put(ptr, info);
}

int front_put_on(void *ptr, void *stream) {
  uint64_t info = block_take((uintptr_t)ptr);
  return info != 0 && LOAD(&fronts[info >> SIZE_BITS & FRONT_MAX].stream) == whose(stream) && put(ptr, info);
}

void front_forget(void *ptr) { block_take((uintptr_t)ptr); }

void front_forget_all(void) {
  for (size_t i = 0; i < (size_t)1 << SET_BITS; i++)
    for (int k = 0; k < SET_SIZE; k++) {
      uint64_t key = LOAD(&blocks[i][k].key);
      if (key > BUSY) /* who is writing an entry looks whether it may be there */
        __atomic_compare_exchange_n(&blocks[i][k].key, &key, 0, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }
}

void front_know(void *ptr, uint64_t size, uint32_t ticket) { block_add((uintptr_t)ptr, size, ticket & 0xffff, ticket >> 16); }

void front_know_stream(int device, void *stream, uint32_t ticket) { stream_add(device, (uintptr_t)stream, ticket & 0xffff); }
