/* The kernel's limits on threads and on address space, and a library that is closed while it is in use. */
#define _GNU_SOURCE
#include "hosts.h"

#include <dirent.h>
#include <dlfcn.h>
#include <grp.h>
#include <sys/resource.h>

static void *nothing(void *arg) { return arg; }

static rlim_t own_threads(void) {
  rlim_t n = 0;
  DIR *d = opendir("/proc/self/task");
  CHECK(d != NULL);
  for (struct dirent *e; (e = readdir(d)) != NULL;)
    n += e->d_name[0] != '.';
  closedir(d);
  return n;
}

static void limit(int resource, rlim_t most) {
  struct rlimit r = {most, most};
  CHECK(setrlimit(resource, &r) == 0);
}

/* Whether the limit on threads holds for this user. */
static int threads_end(void) {
  pthread_t thread;
  int code = pthread_create(&thread, NULL, nothing, NULL);
  return code != 0 || (pthread_join(thread, NULL), 0);
}

/* With fewer threads than Go's runtime needs to start, which it does when the library is loaded, the process ends: it has started when
 * there are no new threads. */
static void await_runtime(void) {
  rlim_t before = 0;
  for (int same = 0; same < 20; usleep(5000)) {
    rlim_t now = own_threads();
    same = now == before ? same + 1 : 0;
    before = now;
  }
}

/* As threads, with the limit of a user (RLIMIT_NPROC), which counts all that user's processes: as root, those of a user made up for
 * this one, so that each number of threads beyond those that there are can be tried. */
void nproc(void) {
  if (argument[0] == NULL) {
    double end = seconds() + duration;
    do {
      again("nproc", "early", "0");
      for (int more = 6; more <= 28 && geteuid() == 0; more++)
        again("nproc", "early", (char[]){(char)('0' + more / 10), (char)('0' + more % 10), 0});
      again("nproc", "late", "0");
    } while (seconds() < end);
    return;
  }
  int late = strcmp(argument[0], "late") == 0;
  uid_t user = (uid_t)(20000 + getpid() % 30000);
  if (geteuid() == 0)
    CHECK(setgroups(0, NULL) == 0 && setresgid(user, user, user) == 0 && setresuid(user, user, user) == 0);
  pthread_t worker_of[WORKERS];
  if (late) {
    prepare();
    for (uintptr_t i = 0; i < WORKERS; i++)
      CHECK(pthread_create(&worker_of[i], NULL, work, (void *)i) == 0);
    each_op(1);
  }
  rlim_t more = (rlim_t)atoi(argument[1]);
  if (more < 6)
    await_runtime();
  limit(RLIMIT_NPROC, more == 0 ? 1 : own_threads() + more);
  CHECK(more > 0 || threads_end());
  for (double end = seconds() + duration / 4; late && seconds() < end;) {
    each_op(1);
    collected();
  }
  if (late) {
    stop = 1;
    for (int i = 0; i < WORKERS; i++)
      CHECK(pthread_join(worker_of[i], NULL) == 0);
  } else if (cistern_init(NULL) == CISTERN_OK) {
    each_op(1);
    collected();
  } else {
    CHECK_WORDS(CISTERN_UNSUPPORTED, "threads");
    each_op(0);
  }
}

/* What the scenario dlclose needs of a copy of the library. */
struct library {
  int (*alloc)(void **, size_t, int, void *, const uint64_t *);
  int (*release)(void *);
  int (*pool_create)(int, const uint64_t *, const cistern_pool_options *);
  void *(*base)(const void *, size_t *);
};

static struct library copy;
static const uint64_t copy_pool[2] = {77, 1};

static void lookup(void *handle) {
  *(void **)&copy.alloc = dlsym(handle, "cistern_alloc");
  *(void **)&copy.release = dlsym(handle, "cistern_release");
  *(void **)&copy.pool_create = dlsym(handle, "cistern_pool_create");
  *(void **)&copy.base = dlsym(handle, "cistern_base");
  CHECK(copy.alloc != NULL && copy.release != NULL && copy.pool_create != NULL && copy.base != NULL);
}

static uint64_t *block_of(uint64_t with, size_t words) {
  void *p;
  CHECK(copy.alloc(&p, 8 * words, 0, NULL, copy_pool) == 0);
  for (size_t i = 0; i < words; i++)
    ((uint64_t *)p)[i] = with + i;
  return p;
}

static void drop(uint64_t *p, uint64_t with, size_t words) {
  size_t wrong = 0, found;
  for (size_t i = 0; i < words; i++)
    wrong += p[i] != with + i;
  CHECK(wrong == 0 && copy.base(p, &found) == p && found >= 8 * words && copy.release(p) == 0);
}

static void *use_library(void *number) {
  uint64_t *p[20], with = (uint64_t)(uintptr_t)number << 32;
  do {
    for (uint64_t i = 0; i < 20; i++)
      p[i] = block_of(with + i, 64 * (i + 1));
    for (uint64_t i = 0; i < 20; i++)
      drop(p[i], with + i, 64 * (i + 1));
  } while (!stop);
  return NULL;
}

/* A library is closed while threads are within it, with blocks allocated, and opened again. It stays where it is: its blocks are what they
 * were, threads that used it end, and so does the process. */
void dlcloses(void) {
  char name[] = "/tmp/cistern-hosts-XXXXXX";
  copy_library(name);
  uint64_t *kept = NULL;
  struct library first = {0};
  double end = seconds() + duration;
  for (int round = 0; round < 3 || seconds() < end; round++) {
    void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    CHECK(handle != NULL);
    lookup(handle);
    if (round == 0) {
      first = copy;
      cistern_pool_options o = {.size = sizeof o, .upstream = "pinned"};
      CHECK(copy.pool_create(0, copy_pool, &o) == 0);
    } else {
      CHECK(memcmp(&first, &copy, sizeof copy) == 0); /* the same one */
      drop(kept, 5, 1000);
    }
    kept = block_of(5, 1000);
    pthread_t before, after;
    stop = 0;
    CHECK(pthread_create(&before, NULL, use_library, (void *)1) == 0);
    usleep(1000);
    CHECK(dlclose(handle) == 0);
    CHECK(pthread_create(&after, NULL, use_library, (void *)2) == 0);
    usleep(20000);
    stop = 1;
    CHECK(pthread_join(before, NULL) == 0 && pthread_join(after, NULL) == 0);
    each_op(1); /* of the copy that the program was linked to */
  }
  unlink(name);
}

static size_t address_space(void) {
  size_t pages = 0;
  FILE *f = fopen("/proc/self/statm", "r");
  CHECK(f != NULL && fscanf(f, "%zu", &pages) == 1 && fclose(f) == 0);
  return pages * (size_t)sysconf(_SC_PAGESIZE);
}

/* A limit on address space (RLIMIT_AS) that leaves so many MiB, from the start: an error, or all works; later all goes on, though what
 * takes addresses may fail. Snapshots are garbage by the hundred MiB. */
void space(void) {
  static const char *const left[] = {"4", "64", "400", "2000"};
  if (argument[0] == NULL) {
    double end = seconds() + duration;
    do {
      for (size_t i = 0; i < sizeof left / sizeof *left; i++) {
        again("space", "early", left[i]);
        again("space", "late", left[i]);
      }
    } while (seconds() < end);
    return;
  }
  enum { KEPT = 50, WORDS = 1000, BLOCKS = 3000 };
  uint64_t *kept[KEPT];
  void *block[BLOCKS];
  int late = strcmp(argument[0], "late") == 0, many = strcmp(argument[1], "2000") == 0;
  if (late) {
    each_op(1);
    prepare();
    for (uint64_t i = 0; i < KEPT; i++) {
      OK(cistern_alloc((void **)&kept[i], 8 * WORDS, 0, NULL, (uint64_t[2]){100, 1}));
      fill(kept[i], 8 * WORDS, i << 32);
    }
    for (int i = 0; i < BLOCKS; i++)
      CHECK((block[i] = cistern_malloc(512, 0, NULL)) != NULL);
  } else {
    await_runtime();
  }
  limit(RLIMIT_AS, address_space() + ((size_t)atol(argument[1]) << 20));
  int code = cistern_init(NULL);
  if (code != CISTERN_OK) {
    CHECK(!late && !many);
    CHECK_WORDS(CISTERN_UNSUPPORTED, "address space");
  }
  each_op(many);
  for (int i = 0; i < 200; i++) {
    cistern_snapshot *s;
    if (cistern_snapshot_take(0, NULL, &s) == CISTERN_OK)
      cistern_snapshot_free(s);
    if (i % 100 == 0)
      one_op("pause");
  }
  for (int i = 0; late && i < BLOCKS; i++)
    OK(cistern_release(block[i]));
  for (uint64_t i = 0; late && i < KEPT; i++) {
    compare(kept[i], 8 * WORDS, i << 32);
    OK(cistern_release(kept[i]));
  }
}
