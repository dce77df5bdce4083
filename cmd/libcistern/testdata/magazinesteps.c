/* The steps of magazine.c, which is part of this program, against others that come between them. Without an argument: what
 * another thread does while one waits for a magazine's lock or for an entry, done by the waiting thread itself at that moment.
 * With a number: threads that request, free and pause, so often, for tools that watch every access. Go's side is played by
 * the functions go_. */
#include <stdint.h>

static void meanwhile(void);
#define __builtin_ia32_pause() meanwhile()
#include "../magazine.c"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(cond)                                           \
  do {                                                        \
    if (!(cond)) {                                            \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #cond); \
      _Exit(1);                                               \
    }                                                         \
  } while (0)

__thread shim_thread *shim_self;

enum { BLOCKS = 8, INDEX = 1, SIZE = 1000 };
static magazine m;
static magazine_flags flags;
static uint64_t at(int i) { return (uint64_t)(1 << 20) + (uint64_t)i * 1024; }
static void *pointer(int i) { return (void *)(uintptr_t)at(i); }
static int number(uint64_t addr) { return (int)((addr - at(0)) / 1024); }

/* What the heap knows of a block; guarded by the magazine's lock. */
static struct { int used, paused; } heap[BLOCKS];

static void go_lock(void) {
  for (uint32_t open = 0; !__atomic_compare_exchange_n(&m.word, &open, 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); open = 0)
    sched_yield();
}

static void go_unlock(void) { __atomic_store_n(&m.word, 0, __ATOMIC_SEQ_CST); }

static void go_drain(void) {
  for (uint32_t i = 0; i < m.count; i++) {
    int b = number(m.slots[i].addr);
    CHECK(m.slots[i].requested == SIZE && heap[b].used);
    CHECK(!heap[b].paused);
    heap[b].used = 0;
  }
  __atomic_store_n(&m.count, 0, __ATOMIC_SEQ_CST);
  memset(m.net, 0, sizeof m.net);
  memset(m.taken, 0, sizeof m.taken);
}

/* go_alloc hands a block out, -1 where none is left, with its token. */
static int go_alloc(uint32_t *token) {
  int got = -1;
  go_lock();
  go_drain();
  for (int i = 0; i < BLOCKS && got < 0; i++)
    if (!heap[i].used)
      got = i;
  if (got >= 0) {
    heap[got].used = 1;
    m.version = m.version % MARK_MASK + 1;
    *token = INDEX | m.version << 16;
  }
  go_unlock();
  return got;
}

static void go_free(int b) {
  go_lock();
  go_drain();
  CHECK(heap[b].used);
  heap[b].used = heap[b].paused = 0;
  go_unlock();
}

/* go_pause is what Device.Pause does with all locks held. */
static void go_pause(void) {
  go_lock();
  go_drain();
  for (int i = 0; i < BLOCKS; i++)
    heap[i].paused = heap[i].used;
  magazine_forget_all();
  go_unlock();
}

static void go_resume(void) {
  go_lock();
  go_drain();
  for (int i = 0; i < BLOCKS; i++)
    heap[i].paused = 0;
  go_unlock();
}

static void go_history(int on) {
  __atomic_store_n(&flags.quick, !on, __ATOMIC_SEQ_CST);
  go_lock();
  go_unlock();
}

/* ---- one thread ---- */

static void (*then)(void); /* done once, at the next wait */
static void meanwhile(void) {
  void (*now)(void) = then;
  if (now == NULL)
    return;
  then = NULL;
  now();
}

/* held is a block that was handed out and is known. */
static int held(void) {
  uint32_t token;
  uint64_t turn = magazine_turn();
  int b = go_alloc(&token);
  CHECK(b >= 0);
  magazine_know(pointer(b), SIZE, token, turn);
  return b;
}

static void paused_meanwhile(void) {
  go_unlock();
  magazine_hold();
  go_pause();
  magazine_release();
}

static void history_meanwhile(void) {
  go_unlock();
  go_history(1);
}

static int takes(void) {
  int known;
  return magazine_take(SIZE, 0, NULL, &known) != NULL;
}

static void a_pair_needs_no_go(void) {
  int b = held();
  CHECK(magazine_put(pointer(b)) && takes() && magazine_put(pointer(b)));
}

/* The block is taken out of the table, then comes a whole pause, then the lock. */
static void a_free_around_a_pause(void) {
  int b = held();
  go_lock();
  then = paused_meanwhile;
  CHECK(!magazine_put(pointer(b)));
  CHECK(then == NULL && heap[b].paused);
  go_free(b);
  go_resume();
}

static void history_begins_before_a_free(void) {
  int b = held();
  go_lock();
  then = history_meanwhile;
  CHECK(!magazine_put(pointer(b)));
  CHECK(then == NULL && m.count == 0);
  go_free(b);
  go_history(0);
}

static void history_begins_before_a_request(void) {
  int b = held();
  CHECK(magazine_put(pointer(b)));
  go_lock();
  then = history_meanwhile;
  CHECK(!takes());
  CHECK(then == NULL && m.count == 1);
  go_history(0);
  CHECK(takes());
  go_free(b);
}

/* A block that was handed out before a pause and is remembered behind it. */
static void a_late_token(void) {
  uint32_t token;
  uint64_t turn = magazine_turn();
  int b = go_alloc(&token);
  magazine_hold();
  go_pause();
  magazine_release();
  magazine_know(pointer(b), SIZE, token, turn);
  CHECK(!magazine_put(pointer(b)));
  go_free(b);
  turn = magazine_turn();
  magazine_hold();
  magazine_know(pointer(b), SIZE, token, turn);
  magazine_know(pointer(b), SIZE, token, magazine_turn());
  magazine_release();
  CHECK(block_take(at(b)) == 0);
}

/* An entry whose thread has claimed it, and found the turn unchanged, when all are forgotten. */
static struct block_entry *claimed;
static void entry_meanwhile(void) { __atomic_store_n(&claimed->key, at(0), KEY_GIVE); }

static void an_entry_being_written(void) {
  claimed = block_set(at(0));
  claimed->key = BUSY;
  claimed->info = SIZE | (uint64_t)INDEX << SIZE_BITS;
  then = entry_meanwhile;
  magazine_forget_all();
  CHECK(then == NULL && block_take(at(0)) == 0);
}

/* ---- threads ---- */

static _Atomic int owner[BLOCKS];
static _Atomic int working;

static void give(int b, void *stream) {
  CHECK(atomic_exchange(&owner[b], 0) == 1);
  if (!(stream != NULL ? magazine_put_on(pointer(b), stream) : magazine_put(pointer(b))))
    go_free(b);
}

static void *works(void *arg) {
  int turns = *(int *)arg, mine[BLOCKS], n = 0;
  for (int i = 0; i < turns; i++) {
    if (n < 3 && (n == 0 || i % 3 != 0)) {
      int known, b;
      void *p = magazine_take(SIZE, 0, NULL, &known);
      if (p != NULL) {
        b = number((uintptr_t)p);
      } else {
        uint32_t token;
        uint64_t turn = magazine_turn();
        if ((b = go_alloc(&token)) < 0)
          continue;
        magazine_know(pointer(b), SIZE, token, turn);
        if (!known)
          magazine_know_stream(0, NULL, token);
      }
      CHECK(atomic_exchange(&owner[b], 1) == 0);
      mine[n++] = b;
    } else {
      give(mine[--n], i % 5 == 0 ? (void *)1 : NULL);
    }
  }
  while (n > 0)
    give(mine[--n], NULL);
  atomic_fetch_sub(&working, 1);
  return NULL;
}

static void *pauses(void *arg) {
  for (int i = 0; atomic_load(&working) > 0; i++) {
    int known;
    magazine_take(1 << 20, 0, NULL, &known); /* of no block's size, so it only looks */
    magazine_hold();
    go_pause();
    magazine_release();
    sched_yield();
    go_resume();
    go_history(i % 2);
  }
  return arg;
}

static void threads(int turns) {
  pthread_t t[3];
  working = 2;
  for (int i = 0; i < 3; i++)
    CHECK(pthread_create(&t[i], NULL, i < 2 ? works : pauses, &turns) == 0);
  for (int i = 0; i < 3; i++)
    pthread_join(t[i], NULL);
}

int main(int argc, char **argv) {
  magazine_amount many = {INT64_MAX / 4, INT64_MAX / 4, INT64_MAX / 4};
  for (int c = 0; c <= MAGAZINE_CLASSES; c++)
    m.puts[c] = m.takes[c] = many;
  m.frees[0] = m.frees[1] = INT64_MAX;
  m.mask = 511;
  m.small_max = 1 << 18;
  flags.quick = 1;
  magazine_add(INDEX, &m, &flags);
  if (argc > 1) {
    threads(atoi(argv[1]));
  } else {
    magazine_know_stream(0, NULL, INDEX);
    a_pair_needs_no_go();
    a_free_around_a_pause();
    history_begins_before_a_free();
    history_begins_before_a_request();
    a_late_token();
    an_entry_being_written();
  }
  puts("ok");
  return 0;
}
