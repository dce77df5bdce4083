/* Descriptors and files: none left, all closed, and their numbers used for others. */
#define _GNU_SOURCE
#include "hosts.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

/* leave makes the table of descriptors full but for so many. */
static void leave(int left) {
  int taken[4096], n = 0;
  struct rlimit few = {64, 64};
  CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
  while (n < 4096 && (taken[n] = open("/dev/null", O_RDONLY)) >= 0)
    n++;
  CHECK(n >= left);
  while (left-- > 0)
    CHECK(close(taken[--n]) == 0);
}

/* A process that does one thing first, with few descriptors left: an error is right, and with enough it works. */
static void descriptors_one(const char *op, const char *left) {
  if (strcmp(op, "stacks") == 0) { /* the error blames what is missing, and nothing else */
    leave(0);
    char why[512] = "";
    if (cistern_stacks(CISTERN_STACKS_NATIVE, 0) != CISTERN_OK)
      cistern_last_error(why, sizeof why);
    CHECK(why[0] == 0 || strstr(why, "no file descriptor left") != NULL); /* 0 where the program has the unwinder already */
    CHECK(close(10) == 0 && close(11) == 0);
    OK(cistern_stacks(CISTERN_STACKS_NATIVE, 0));
    return;
  }
  if (strcmp(left, "warm") == 0) {
    each_op(1);
    leave(0);
    each_op(0);
    collected();
    return;
  }
  leave(atoi(left));
  one_op(op);
  each_op(0);
  for (int fd = 3; fd < 64; fd++)
    close(fd);
  one_op("memory");
  struct rlimit many = {64, 64};
  CHECK(getrlimit(RLIMIT_NOFILE, &many) == 0);
}

static void with_few(const char *op) {
  for (int left = 0; left < 4; left++)
    again("descriptors", op, (char[]){(char)('0' + left), 0});
}

void descriptors(void) {
  if (argument[0] != NULL) {
    descriptors_one(argument[0], argument[1]);
    return;
  }
  char handle[CISTERN_HANDLE_MAX];
  void *p = cistern_malloc(MIB, 0, NULL); /* what the others open */
  OK(cistern_share(p, handle, sizeof handle));
  CHECK(setenv("HOSTS_HANDLE", handle, 1) == 0);
  double end = seconds() + duration;
  do {
    every_op(with_few);
    again("descriptors", "", "warm");
    again("descriptors", "stacks", "0");
  } while (seconds() < end);
  OK(cistern_release(p));
}

/* Closes all descriptors, as programs that go into the background do, and opens files of its own under their numbers. A thread of the
 * library may open one meanwhile. */
enum { OWN = 40, FIRST = 3 };
static int own[OWN];
static const char mine[] = "contents of the program's own, which no library may touch or take for its own\n";

static void take_all(void) {
  for (int fd = FIRST; fd < 1024; fd++)
    close(fd);
  for (int i = 0; i < OWN; i++) {
    char name[] = "/tmp/cistern-hosts-XXXXXX";
    int fd = own[i] = mkstemp(name);
    CHECK(fd >= FIRST && unlink(name) == 0);
    for (int k = 0; k < 100; k++)
      CHECK(write(fd, mine, sizeof mine) == sizeof mine);
  }
}

static void untouched(void) {
  for (int i = 0; i < OWN; i++) {
    int fd = own[i];
    char text[sizeof mine];
    struct stat st;
    CHECK(fstat(fd, &st) == 0 && st.st_size == 100 * sizeof mine);
    for (int k = 0; k < 100; k++)
      CHECK(pread(fd, text, sizeof text, k * (off_t)sizeof text) == sizeof text && memcmp(text, mine, sizeof mine) == 0);
  }
}

void closeall(void) {
  double end = seconds() + duration;
  cistern_pause_options disk = {.size = sizeof disk, .keep = CISTERN_KEEP_DISK};
  char log[] = "/tmp/cistern-hosts-XXXXXX", words[100];
  do {
    each_op(1);
    const uint64_t pool[2] = {(uint64_t)(1e6 * seconds()), 9};
    memcpy(log + sizeof log - 7, "XXXXXX", 6);
    int fd = mkstemp(log);
    CHECK(fd >= 0 && close(fd) == 0);
    snprintf(words, sizeof words, "logging:file=%s|pinned", log);
    cistern_pool_options o = {.size = sizeof o, .upstream = words};
    OK(cistern_pool_create(0, pool, &o));
    void *shared, *p = cistern_malloc(5 * MIB, 0, NULL), *logged;
    char handle[CISTERN_HANDLE_MAX];
    OK(cistern_pause(0, &disk, NULL));
    CHECK((shared = cistern_malloc(MIB, 0, NULL)) != NULL);
    OK(cistern_share(shared, handle, sizeof handle));
    take_all();
    CHECK(cistern_resume(0, NULL, NULL) != CISTERN_OK); /* the contents are gone, and no others are taken for them */
    CHECK(cistern_last_error(NULL, 0) != CISTERN_INTERNAL);
    OK(cistern_release(p));
    OK(cistern_release(shared));
    OK(cistern_resume(0, NULL, NULL));
    OK(cistern_alloc(&logged, MIB, 0, NULL, pool)); /* without a log */
    OK(cistern_release(logged));
    cistern_pool_release(0, pool);
    each_op(1); /* there are descriptors: all works again */
    collected();
    untouched();
    for (int i = 0; i < OWN; i++)
      CHECK(close(own[i]) == 0);
    unlink(log);
  } while (seconds() < end);
}

/* Files may not grow: that is an error, and not the signal which ends the program. */
void filesize(void) {
  struct rlimit none = {0, RLIM_INFINITY}, was;
  cistern_init(NULL);
  CHECK(getrlimit(RLIMIT_FSIZE, &was) == 0);
  double end = seconds() + duration;
  do {
    CHECK(setrlimit(RLIMIT_FSIZE, &none) == 0);
    CHECK(one_op("disk") != CISTERN_OK);
    each_op(0);
    CHECK(setrlimit(RLIMIT_FSIZE, &was) == 0);
    each_op(1);
  } while (seconds() < end);
}
