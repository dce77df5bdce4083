//go:build linux && cgo

/* Requests and frees that need no call into Go; see magazine.h. Everything here is some tens of nanoseconds long, takes one
 * lock at a time, and gives up rather than wait: Go knows how to. magazine_forget_all, which Go calls, is the exception. */
#include "magazine.h"
#include "shim.h"

#include <time.h>

/* The order of each access to what another thread may access at the same time. internal/magazine/model has the same constants in
 * the same functions, and tries every interleaving of two threads; its TestOrders compares the constants. */
#define WORD_LOOK __ATOMIC_RELAXED /* magazine.word */
#define WORD_LOCK __ATOMIC_ACQUIRE
#define WORD_UNLOCK __ATOMIC_RELEASE
#define SLOT_LOOK __ATOMIC_RELAXED /* magazine.count and magazine_slot.requested: has() reads them without the lock */
#define SLOT_KEEP __ATOMIC_RELAXED
#define GO_LOOK __ATOMIC_ACQUIRE /* what Go alone writes: flags, magazine.routed, magazine.epoch */
#define TURN_RAISE __ATOMIC_SEQ_CST /* magazine_shut */
#define TURN_LOWER __ATOMIC_RELEASE
#define TURN_LOOK __ATOMIC_SEQ_CST
#define KEY_LOOK __ATOMIC_RELAXED /* block_entry.key */
#define KEY_CLAIM __ATOMIC_SEQ_CST
#define KEY_TAKE __ATOMIC_ACQUIRE
#define KEY_GIVE __ATOMIC_RELEASE
#define KEY_SCAN __ATOMIC_SEQ_CST
#define KEY_FORGET __ATOMIC_RELEASE
#define INFO_LOOK __ATOMIC_RELAXED /* block_entry.info */
#define INFO_KEEP __ATOMIC_RELAXED
#define NAME_LOOK __ATOMIC_ACQUIRE /* magazines and streams, whose entries are written once */
#define NAME_KEEP __ATOMIC_RELEASE
#define NAMES_LOCK __ATOMIC_ACQUIRE /* streams_lock */
#define NAMES_UNLOCK __ATOMIC_RELEASE
#define FAILED __ATOMIC_RELAXED /* a compare-and-exchange that changes nothing */

#define LIKELY(x) __builtin_expect(!!(x), 1)

#define AT(field) offsetof(magazine, field)
const uint64_t magazine_layout[MAGAZINE_LAYOUT] = {
    AT(word),  AT(count), AT(net),  AT(owner),     AT(taken),   AT(polls),   AT(turns),  AT(puts),
    AT(takes), AT(frees), AT(epoch), AT(mask),     AT(small_max), AT(version), AT(limited), AT(routed),
    AT(index), AT(slots), sizeof(magazine), offsetof(magazine_slot, mark) /* of an entry */,
    offsetof(magazine_flags, quick), offsetof(magazine_flags, waiting)};

const int magazine_constants[MAGAZINE_CONSTANTS] = {
    MAGAZINE_CAPACITY,   MAGAZINE_CLASSES,    MAGAZINE_POLL_EVERY, MAGAZINE_MARK_BITS,
    MAGAZINE_TURNS_MANY, MAGAZINE_TURNS_MOST, MAGAZINE_AGE_SHARED};

static inline void pause_cpu(void) {
#if defined __x86_64__ || defined __i386__
  __builtin_ia32_pause();
#elif defined __aarch64__
  __asm__ volatile("yield");
#endif
}

/* ---- magazines by index, and by stream ---- */

static struct known {
  magazine *magazine;
  const magazine_flags *flags;
  uintptr_t stream; /* by which magazine_take finds it, as whose() has it; 0 until it does */
} magazines[MAGAZINE_MAX + 1] __attribute__((aligned(64)));

static uint64_t magazine_shut __attribute__((aligned(64))); /* read by all threads; nothing beside it is written */
static const uint64_t next_turn = (uint64_t)1 << 32;

void magazine_hold(void) { __atomic_add_fetch(&magazine_shut, next_turn + 1, TURN_RAISE); }

void magazine_release(void) { __atomic_sub_fetch(&magazine_shut, 1, TURN_LOWER); }

void magazine_stop(void) { magazine_hold(); }

uint64_t magazine_turn(void) { return __atomic_load_n(&magazine_shut, TURN_LOOK); }

/* is_open reports whether C may do anything in a turn. */
static inline int is_open(uint64_t turn) { return LIKELY((uint32_t)turn == 0); }

void magazine_add(uint32_t index, magazine *m, const magazine_flags *flags) {
  magazines[index].flags = flags;
  __atomic_store_n(&magazines[index].magazine, m, NAME_KEEP);
}

/* Streams with a magazine are never freed, so what is once in this table stays. */
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
    uint32_t index = __atomic_load_n(&s->index, NAME_LOOK);
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
  __atomic_store_n(&magazines[index].stream, whose((void *)handle), NAME_KEEP);
  if (__atomic_exchange_n(&streams_lock, 1, NAMES_LOCK) != 0)
    return; /* another thread adds one: this one is added after the next request */
  if (stream_find(device, handle) == 0) {
    uint32_t at = stream_place(device, handle);
    for (int i = 0; i < STREAM_TRIES; i++) {
      struct stream_slot *s = &streams[(at + i) & ((1 << STREAM_BITS) - 1)];
      if (s->index == 0) {
        s->handle = handle;
        s->device = device;
        __atomic_store_n(&s->index, index, NAME_KEEP);
        break;
      }
    }
  }
  __atomic_store_n(&streams_lock, 0, NAMES_UNLOCK);
}

/* ---- blocks that may be put into a magazine ---- */

/* A table of sets of four. Where a set is full a block is not remembered, and its free is Go's. Only the owner of a block asks
 * about it, so an entry is written and taken with one atomic operation each. */
enum { SET_BITS = 15, SET_SIZE = 4, BUSY = 1, SIZE_BITS = 40, MARK_AT = 52, MARK_MASK = (1 << MAGAZINE_MARK_BITS) - 1 };
static struct block_entry {
  uint64_t key;  /* the address; 0 empty, BUSY while it is written or taken */
  uint64_t info; /* the bytes asked for, the index of the magazine from bit SIZE_BITS, the mark from bit MARK_AT */
} blocks[1 << SET_BITS][SET_SIZE] __attribute__((aligned(64)));

static inline struct block_entry *block_set(uint64_t addr) {
  return blocks[((addr >> 9) * 0x9e3779b97f4a7c15u) >> (64 - SET_BITS)];
}

/* block_add remembers a block that was handed out since magazine_turn returned turn, unless it has changed. The entry is claimed
 * before the turn is looked at, and magazine_hold raises the turn before magazine_forget_all looks at the entry. Of these four, all
 * SEQ_CST, one is last: so the turn is seen here to have changed, or the claim is seen there and its end waited for. */
static inline void block_add(uint64_t addr, uint64_t size, uint32_t index, uint32_t mark, uint64_t turn) {
  if (size >> SIZE_BITS || !is_open(turn))
    return;
  uint64_t info = size | (uint64_t)index << SIZE_BITS | (uint64_t)mark << MARK_AT;
  struct block_entry *set = block_set(addr);
  for (int i = 0; i < SET_SIZE; i++) {
    uint64_t empty = 0;
    if (__atomic_load_n(&set[i].key, KEY_LOOK) == 0 &&
        __atomic_compare_exchange_n(&set[i].key, &empty, BUSY, 0, KEY_CLAIM, FAILED)) {
      uint64_t key = LIKELY(magazine_turn() == turn) ? addr : 0;
      __atomic_store_n(&set[i].info, info, INFO_KEEP);
      __atomic_store_n(&set[i].key, key, KEY_GIVE);
      return;
    }
  }
}

/* block_take removes a block and returns what block_add said of it, 0 if it is not there. */
static inline uint64_t block_take(uint64_t addr) {
  struct block_entry *set = block_set(addr);
  for (int i = 0; i < SET_SIZE; i++) {
    uint64_t key = addr;
    if (__atomic_load_n(&set[i].key, KEY_LOOK) == addr &&
        __atomic_compare_exchange_n(&set[i].key, &key, BUSY, 0, KEY_TAKE, FAILED)) {
      uint64_t info = __atomic_load_n(&set[i].info, INFO_LOOK);
      __atomic_store_n(&set[i].key, 0, KEY_GIVE);
      return info;
    }
  }
  return 0;
}

/* ---- the magazine ---- */

static inline int lock(magazine *m) {
  for (int wait = 1; wait <= 64; wait *= 2) {
    if (LIKELY(__atomic_load_n(&m->word, WORD_LOOK) == 0) && LIKELY(__atomic_exchange_n(&m->word, 1, WORD_LOCK) == 0))
      return 1;
    for (int i = 0; i < wait; i++)
      pause_cpu();
  }
  return 0;
}

static inline void unlock(magazine *m) { __atomic_store_n(&m->word, 0, WORD_UNLOCK); }

static inline int64_t rounded(const magazine *m, uint64_t size) { return (int64_t)((size + m->mask) & ~m->mask); }

/* below reports whether a sum may fall by one block. */
static inline int below(int64_t blocks, int64_t bytes, int64_t requested, int64_t n, int64_t r, const magazine_amount *limit) {
  return 1 - blocks <= limit->blocks && n - bytes <= limit->bytes && r - requested <= limit->requested;
}

/* visit notes which thread is here and returns the age of the oldest block that may be taken. */
static inline uint32_t visit(magazine *m) {
  uint64_t me = (uintptr_t)&shim_self;
  if (m->owner != me) {
    m->owner = me;
    m->turns += MAGAZINE_TURNS_MANY;
    if (m->turns > MAGAZINE_TURNS_MOST)
      m->turns = MAGAZINE_TURNS_MOST;
  } else if (m->turns > 0)
    m->turns--;
  return m->turns > MAGAZINE_TURNS_MANY ? MAGAZINE_AGE_SHARED : 0;
}

/* has reports whether the magazine may have a block of this size. It looks without the lock: most requests are not met from
 * the magazine, and a wrong answer does no harm. */
static inline int has(magazine *m, uint64_t size) {
  for (uint32_t i = __atomic_load_n(&m->count, SLOT_LOOK); i-- > 0;)
    if (__atomic_load_n(&m->slots[i].requested, SLOT_LOOK) == size)
      return 1;
  return 0;
}

/* set_count and set_slot are for holders of the lock: has may look at the same time. */
static inline void set_count(magazine *m, uint32_t n) { __atomic_store_n(&m->count, n, SLOT_KEEP); }

static inline void set_slot(magazine_slot *to, uint64_t addr, uint64_t requested, uint64_t stamp, uint32_t mark) {
  to->addr = addr;
  __atomic_store_n(&to->requested, requested, SLOT_KEEP);
  to->stamp = stamp;
  to->mark = mark;
}

/* quick reports whether requests and frees need not be Go's. It is asked with the lock held: Go that has turned it off locks
 * every magazine next, and relies on it from then on. */
static inline int quick(const magazine_flags *flags) { return LIKELY(__atomic_load_n(&flags->quick, GO_LOOK)); }

void *magazine_take(uint64_t size, int device, void *stream, int *known) {
  uint32_t index = stream_find(device, (uintptr_t)stream);
  *known = index != 0;
  uint64_t turn = magazine_turn();
  if (index == 0 || !is_open(turn))
    return NULL;
  magazine *m = magazines[index].magazine;
  const magazine_flags *flags = magazines[index].flags;
  if (__atomic_load_n(&m->routed, GO_LOOK) || !has(m, size) || !lock(m))
    return NULL;
  if (!quick(flags)) {
    unlock(m);
    return NULL;
  }
  uint32_t oldest = visit(m);
  for (uint32_t i = m->count; i-- > 0;) {
    uint32_t mark = m->slots[i].mark;
    if (m->slots[i].requested != size || mark == 0 || ((m->version - mark) & MARK_MASK) > oldest)
      continue;
    int64_t n = rounded(m, size), r = (int64_t)size;
    int c = (uint64_t)n > m->small_max;
    magazine_amount *own = &m->net[c], *other = &m->net[1 - c];
    if (!below(own->blocks, own->bytes, own->requested, n, r, &m->takes[c]) ||
        !below(own->blocks + other->blocks, own->bytes + other->bytes, own->requested + other->requested, n, r,
               &m->takes[MAGAZINE_CLASSES]))
      break;
    if (__atomic_load_n(&flags->waiting, GO_LOOK)) {
      if (m->polls % MAGAZINE_POLL_EVERY == MAGAZINE_POLL_EVERY - 1)
        break; /* this request looks after frees that wait for other streams */
      m->polls++;
    }
    uint64_t addr = m->slots[i].addr;
    set_count(m, m->count - 1);
    for (; i < m->count; i++) {
      const magazine_slot *next = &m->slots[i + 1];
      set_slot(&m->slots[i], next->addr, next->requested, next->stamp, next->mark);
    }
    own->blocks--;
    own->bytes -= n;
    own->requested -= r;
    m->taken[c].blocks++;
    m->taken[c].bytes += n;
    m->taken[c].requested += r;
    unlock(m);
    block_add(addr, size, index, mark, turn);
    return (void *)addr;
  }
  unlock(m);
  return NULL;
}

/* put is magazine_put for a block that was taken since magazine_turn returned turn, of which add said info. The turn is compared
 * with the lock held: a thread that raises it locks the magazine next, or has done so. */
static inline int put(void *ptr, uint64_t info, uint64_t turn) {
  uint64_t size = info & (((uint64_t)1 << SIZE_BITS) - 1);
  struct known *k = &magazines[info >> SIZE_BITS & MAGAZINE_MAX];
  magazine *m = k->magazine;
  if (!is_open(turn) || !lock(m))
    return 0;
  if (!LIKELY(magazine_turn() == turn) || !quick(k->flags)) {
    unlock(m);
    return 0;
  }
  visit(m);
  int64_t n = rounded(m, size);
  int c = (uint64_t)n > m->small_max;
  magazine_amount *own = &m->net[c], *other = &m->net[1 - c];
  if (m->count == MAGAZINE_CAPACITY || own->blocks + 1 > m->puts[c].blocks || own->bytes + n > m->puts[c].bytes ||
      own->blocks + other->blocks + 1 > m->puts[MAGAZINE_CLASSES].blocks ||
      own->bytes + other->bytes + n > m->puts[MAGAZINE_CLASSES].bytes || own->bytes + m->taken[c].bytes + n >= m->frees[c]) {
    unlock(m);
    return 0;
  }
  set_slot(&m->slots[m->count], (uintptr_t)ptr, size, __atomic_load_n(&m->epoch, GO_LOOK), (uint32_t)(info >> MARK_AT));
  set_count(m, m->count + 1);
  own->blocks++;
  own->bytes += n;
  own->requested += (int64_t)size;
  unlock(m);
  return 1;
}

int magazine_put(void *ptr) {
  uint64_t turn = magazine_turn(), info = block_take((uintptr_t)ptr);
  return info != 0 && put(ptr, info, turn);
}

int magazine_put_on(void *ptr, void *stream) {
  uint64_t turn = magazine_turn(), info = block_take((uintptr_t)ptr);
  return info != 0 && __atomic_load_n(&magazines[info >> SIZE_BITS & MAGAZINE_MAX].stream, NAME_LOOK) == whose(stream) &&
         put(ptr, info, turn);
}

void magazine_forget(void *ptr) { block_take((uintptr_t)ptr); }

/* stable_key is the key of an entry once no thread writes or takes it, which one does for some nanoseconds unless it is
 * interrupted. */
static inline uint64_t stable_key(struct block_entry *e) {
  uint64_t key;
  for (int spins = 0; (key = __atomic_load_n(&e->key, KEY_SCAN)) == BUSY; spins++)
    if (spins < 64)
      pause_cpu();
    else
      nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
  return key;
}

void magazine_forget_all(void) {
  for (size_t i = 0; i < (size_t)1 << SET_BITS; i++)
    for (int k = 0; k < SET_SIZE; k++) {
      uint64_t key = stable_key(&blocks[i][k]);
      if (key != 0) /* where it has changed since, the block was taken, or forgotten by another thread */
        __atomic_compare_exchange_n(&blocks[i][k].key, &key, 0, 0, KEY_FORGET, FAILED);
    }
}

void magazine_know(void *ptr, uint64_t size, uint32_t token, uint64_t turn) {
  block_add((uintptr_t)ptr, size, token & 0xffff, token >> 16, turn);
}

void magazine_know_stream(int device, void *stream, uint32_t token) { stream_add(device, (uintptr_t)stream, token & 0xffff); }
