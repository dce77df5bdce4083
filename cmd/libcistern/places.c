//go:build linux && cgo

/* Places in Python source: a code object and a line, each with a number, the file and the function. The names are read
 * when a place is first seen, as the code object may be gone later; another one that is made where it was is
 * another place. The table has room for some fifty thousand places; those beyond share a number that says so. */
#define _GNU_SOURCE
#include "places.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PLACE_BITS = 16, PLACES = 1 << PLACE_BITS, PLACES_MOST = PLACES / 4 * 3, NAMES = 1 << 15, NAMES_MOST = NAMES / 4 * 3 };

struct place {
  const void *code;
  uint64_t id;
  uint32_t line, ready; /* ready is written last */
  const char *file, *function;
};

static struct place *places; /* open addressing; a place's number is where it is */
static const char **names;   /* likewise: each name is there once */
static pthread_mutex_t adding = PTHREAD_MUTEX_INITIALIZER;
static uint32_t num_places, num_names; /* changed under adding */

enum { FULL = PLACES }; /* the number of those for which there is no room */

/* Both tables are pages that come to be when they are first written to. */
static void *table(size_t bytes) {
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? NULL : p;
}

int places_open(void) {
  pthread_mutex_lock(&adding);
  if (names == NULL)
    names = table(NAMES * sizeof *names);
  if (places == NULL && names != NULL)
    __atomic_store_n(&places, table(PLACES * sizeof *places), __ATOMIC_RELEASE);
  int made = places != NULL;
  pthread_mutex_unlock(&adding);
  return made ? 0 : -1;
}

static inline uint64_t mixed(uint64_t x) {
  x ^= x >> 32;
  x *= 0x9e3779b97f4a7c15u;
  return x ^ x >> 29;
}

/* name is the one copy of a text. The caller holds adding. */
static const char *name(const char *text) {
  uint64_t h = 0xcbf29ce484222325u; /* FNV-1a */
  for (const char *c = text; *c != 0; c++)
    h = (h ^ (unsigned char)*c) * 0x100000001b3u;
  for (uint32_t i = (uint32_t)mixed(h);; i++) {
    const char **at = &names[i % NAMES];
    if (*at != NULL && strcmp(*at, text) == 0)
      return *at;
    if (*at == NULL) {
      if (num_names == NAMES_MOST || (*at = strdup(text)) == NULL)
        return "?";
      num_names++;
      return *at;
    }
  }
}

static struct place *find(const struct pyframe *f, uint32_t *empty) {
  uint32_t i = (uint32_t)mixed(mixed((uintptr_t)f->code ^ f->id) + f->line);
  for (;; i++) {
    struct place *at = &places[i % PLACES];
    if (!__atomic_load_n(&at->ready, __ATOMIC_ACQUIRE)) {
      *empty = i % PLACES;
      return NULL;
    }
    if (at->code == f->code && at->id == f->id && at->line == f->line)
      return at;
  }
}

uint64_t places_number(const struct pystack *p, const struct pyframe *f) {
  uint32_t empty;
  struct place *at = find(f, &empty);
  if (at != NULL)
    return (uint64_t)(at - places);
  if (__atomic_load_n(&num_places, __ATOMIC_RELAXED) == PLACES_MOST) /* then names are not worth reading */
    return FULL;
  char file[1024], function[512];
  if (!pystack_names(p, f, file, sizeof file, function, sizeof function))
    strcpy(file, "?"), strcpy(function, "?");
  uint64_t number = FULL;
  pthread_mutex_lock(&adding);
  if ((at = find(f, &empty)) != NULL) /* another thread has added it */
    number = (uint64_t)(at - places);
  else if (num_places < PLACES_MOST) {
    at = &places[empty];
    at->code = f->code;
    at->id = f->id;
    at->line = f->line;
    at->file = name(file);
    at->function = name(function);
    __atomic_store_n(&at->ready, 1, __ATOMIC_RELEASE);
    __atomic_store_n(&num_places, num_places + 1, __ATOMIC_RELAXED);
    number = empty;
  }
  pthread_mutex_unlock(&adding);
  return number;
}

int stack_place(uint64_t frame, stack_python_place *out) {
  uint64_t number = frame & ~STACK_PYTHON;
  struct place *table = __atomic_load_n(&places, __ATOMIC_ACQUIRE);
  if ((frame & STACK_PYTHON) == 0 || table == NULL || number > FULL)
    return 0;
  if (number == FULL) {
    *out = (stack_python_place){"", "[more places in Python than have numbers]", 0};
    return 1;
  }
  const struct place *at = &table[number];
  if (!__atomic_load_n(&at->ready, __ATOMIC_ACQUIRE))
    return 0;
  *out = (stack_python_place){at->file, at->function, (int32_t)at->line};
  return 1;
}
