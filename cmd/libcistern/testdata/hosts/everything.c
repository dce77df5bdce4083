/* Everything of the library that needs more of a process than memory: files, sockets, threads. */
#define _GNU_SOURCE
#include "hosts.h"

#include <dirent.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>

extern char **environ;

/* an op returns a code of the library's. After a failure it leaves nothing behind. */
static int paused_to(uint32_t keep) {
  static const uint64_t pool[2] = {31, 31}; /* of its own, as threads use the others meanwhile */
  static int made;
  void *p;
  int code = made ? CISTERN_OK : cistern_pool_create(0, pool, NULL);
  if (code != CISTERN_OK)
    return code;
  made = 1;
  if ((code = cistern_alloc(&p, 3 * MIB, 0, NULL, pool)) != CISTERN_OK)
    return code;
  cistern_pause_options o = {.size = sizeof o, .keep = keep, .pool = pool};
  if ((code = cistern_pause(0, &o, NULL)) == CISTERN_OK)
    code = cistern_resume(0, &o, NULL);
  int freed = cistern_release(p);
  return code != CISTERN_OK ? code : freed;
}

static int op_pause(void) { return paused_to(CISTERN_KEEP_HOST); }
static int op_disk(void) { return paused_to(CISTERN_KEEP_DISK); }

static int op_share(void) {
  char handle[CISTERN_HANDLE_MAX];
  void *p;
  int code = cistern_alloc(&p, MIB, 0, NULL, NULL);
  if (code != CISTERN_OK)
    return code;
  code = cistern_share(p, handle, sizeof handle);
  int freed = cistern_release(p);
  return code != CISTERN_OK ? code : freed;
}

/* Opens memory of the process that the variable HOSTS_HANDLE names, if it is set. */
static int op_open(void) {
  const char *handle = getenv("HOSTS_HANDLE");
  void *p;
  if (handle == NULL)
    return CISTERN_OK;
  int code = cistern_open(handle, 0, &p);
  return code != CISTERN_OK ? code : cistern_close(p);
}

static int op_log(void) {
  static atomic_uint number;
  const uint64_t pool[2] = {1000 + number++, 7};
  char name[] = "/tmp/cistern-hosts-XXXXXX", words[100];
  int fd = mkstemp(name); /* the program's own need for a descriptor */
  if (fd >= 0)
    close(fd);
  else
    snprintf(name, sizeof name, "/tmp/cistern-hosts-%d", (int)getpid() % 100000);
  snprintf(words, sizeof words, "logging:file=%s|pinned", name);
  cistern_pool_options o = {.size = sizeof o, .upstream = words};
  int code = cistern_pool_create(0, pool, &o);
  if (code == CISTERN_OK) {
    void *p;
    if ((code = cistern_alloc(&p, MIB, 0, NULL, pool)) == CISTERN_OK) {
      memset(p, 7, MIB);
      code = cistern_release(p);
    }
    int released = cistern_pool_release(0, pool);
    code = code != CISTERN_OK ? code : released;
  }
  unlink(name);
  return code;
}

static int op_write(void) {
  char name[64];
  snprintf(name, sizeof name, "/tmp/cistern-hosts-%d.pickle", (int)getpid());
  int code = cistern_snapshot_write(name);
  unlink(name);
  return code;
}

static int op_memory(void) {
  void *p, *q;
  int code = cistern_alloc(&p, 20 * MIB, 0, NULL, NULL);
  if (code != CISTERN_OK)
    return code;
  if ((code = cistern_alloc(&q, 1000, 0, NULL, NULL)) == CISTERN_OK)
    code = cistern_release(q);
  int freed = cistern_release(p);
  code = code != CISTERN_OK ? code : freed;
  return code != CISTERN_OK ? code : cistern_trim(0);
}

static int op_statistics(void) {
  char *text = cistern_stats_json();
  int code = text != NULL ? CISTERN_OK : cistern_last_error(NULL, 0);
  cistern_string_free(text);
  return code;
}

static int op_oom(void) {
  void *p;
  int code = cistern_alloc(&p, (size_t)1 << 50, 0, NULL, NULL);
  return code == CISTERN_OUT_OF_MEMORY ? CISTERN_OK : code;
}

static const struct op {
  const char *name;
  int (*run)(void);
} ops[] = {
    {"memory", op_memory}, {"statistics", op_statistics}, {"oom", op_oom},   {"pause", op_pause}, {"disk", op_disk},
    {"share", op_share},   {"open", op_open},             {"log", op_log}, {"write", op_write},
};

int each_op(int must) {
  int failed = 0;
  for (size_t i = 0; i < sizeof ops / sizeof *ops; i++) {
    int code = ops[i].run();
    if (must)
      OK(code);
    CHECK(code != CISTERN_INTERNAL && code != CISTERN_FORKED);
    failed += code != CISTERN_OK;
  }
  return failed;
}

int one_op(const char *name) {
  for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
    if (strcmp(ops[i].name, name) == 0) {
      int code = ops[i].run();
      CHECK(code != CISTERN_INTERNAL && code != CISTERN_FORKED);
      return code;
    }
  fprintf(stderr, "hosts: there is no op %s\n", name);
  exit(2);
}

void every_op(void (*f)(const char *name)) {
  for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
    f(ops[i].name);
}

/* Snapshots of many blocks are garbage once they are taken; the pauses have it collected. */
void collected(void) {
  enum { BLOCKS = 3000 };
  static void *block[BLOCKS];
  for (int i = 0; i < BLOCKS; i++)
    CHECK((block[i] = cistern_malloc(512, 0, NULL)) != NULL);
  for (int i = 0; i < 100; i++) {
    cistern_snapshot *s;
    OK(cistern_snapshot_take(0, NULL, &s));
    cistern_snapshot_free(s);
    if (i % 20 == 19) {
      usleep(10000); /* for what goes on beside */
      OK(one_op("pause"));
    }
  }
  for (int i = 0; i < BLOCKS; i++)
    OK(cistern_release(block[i]));
}

int status_of(const char *scenario, const char *a, const char *b) {
  char *args[] = {"hosts", (char *)scenario, "1", (char *)a, (char *)b, NULL};
  pid_t child;
  int status;
  CHECK(posix_spawn(&child, "/proc/self/exe", NULL, NULL, args, environ) == 0);
  CHECK(waitpid(child, &status, 0) == child);
  return status;
}

void again(const char *scenario, const char *a, const char *b) {
  int status = status_of(scenario, a, b);
  if (status != 0) {
    fprintf(stderr, "hosts: %s %s %s ended with status %#x\n", scenario, a ? a : "", b ? b : "", status);
    exit(1);
  }
}
