/* A process that shares memory or opens it, by commands on standard input: one command a line, one line of answer.
 * Blocks and what is open are known by number. */
#define _GNU_SOURCE
#include "check.h"

#include <dirent.h>
#include <sys/resource.h>
#include <sys/wait.h>

enum { MOST = 4096 };
static void *things[MOST];
static size_t sizes[MOST];
static int num;

static int keep(void *p, size_t size) {
  CHECK(num < MOST);
  things[num] = p;
  sizes[num] = size;
  return num++;
}

static int failed(void) {
  char why[2048];
  int code = cistern_last_error(why, sizeof why);
  return printf("error %d %s\n", code, why);
}

static int descriptors(const char *only) {
  char path[300], to[300];
  int n = 0;
  DIR *d = opendir("/proc/self/fd");
  CHECK(d != NULL);
  for (struct dirent *e; (e = readdir(d)) != NULL;) {
    snprintf(path, sizeof path, "/proc/self/fd/%s", e->d_name);
    ssize_t len = readlink(path, to, sizeof to - 1);
    if (len < 0)
      continue;
    to[len] = 0;
    n += strncmp(to, only, strlen(only)) == 0;
  }
  closedir(d);
  return n;
}

static void child(void) {
  char p[CISTERN_HANDLE_MAX];
  void *q;
  printf("%d sockets, %d chunks\n", descriptors("socket:"), descriptors("/memfd:cistern-sim"));
  fflush(stdout);
  CHECK(cistern_share(things[0], p, sizeof p) == CISTERN_FORKED);
  CHECK(cistern_open("x", 0, &q) == CISTERN_FORKED);
  CHECK(cistern_close(things[0]) == CISTERN_FORKED);
  close(0); /* the pipes are the parent's */
  close(1);
  close(2);
  sleep(30);
  _exit(0);
}

int main(void) {
  char line[1024], word[32], text[600];
  setvbuf(stdout, NULL, _IOLBF, 0);
  signed char value;
  long a, b;
  while (fgets(line, sizeof line, stdin) != NULL) {
    line[strcspn(line, "\n")] = 0;
    CHECK(sscanf(line, "%31s", word) == 1);
#define IS(name, count, format, ...) (strcmp(word, name) == 0 && sscanf(line, name format, __VA_ARGS__) == count)
    if (IS("alloc", 1, " %ld", &a)) {
      void *p = cistern_malloc(a, 0, NULL);
      p ? printf("%d\n", keep(p, (size_t)a)) : failed();
    } else if (IS("pool", 1, " %599s", text)) { /* of an upstream, for what is allocated from here on */
      static uint64_t pool[2] = {5, 0};
      cistern_pool_options o = {.size = sizeof o, .upstream = text};
      pool[1]++;
      cistern_pool_create(0, pool, &o) == CISTERN_OK && cistern_pool_begin(0, pool, NULL) == CISTERN_OK ? puts("ok") : failed();
    } else if (IS("fill", 2, " %ld %hhd", &a, &value)) { /* only where device memory is the host's */
      memset(things[a], value, sizes[a]);
      puts("ok");
    } else if (IS("check", 2, " %ld %hhd", &a, &value)) {
      size_t i = 0;
      while (i < sizes[a] && ((signed char *)things[a])[i] == value)
        i++;
      i == sizes[a] ? puts("ok") : printf("byte %zu of %zu differs\n", i, sizes[a]);
    } else if (IS("share", 1, " %ld", &a)) {
      char handle[CISTERN_HANDLE_MAX];
      cistern_share(things[a], handle, sizeof handle) == CISTERN_OK ? puts(handle) : failed();
    } else if (IS("free", 1, " %ld", &a)) {
      cistern_release(things[a]) == CISTERN_OK ? puts("ok") : failed();
    } else if (IS("open", 2, " %ld %599[^\n]", &a, text)) {
      void *p;
      cistern_open(text, 0, &p) == CISTERN_OK ? printf("%d\n", keep(p, (size_t)a)) : failed();
    } else if (IS("close", 1, " %ld", &a)) {
      cistern_close(things[a]) == CISTERN_OK ? puts("ok") : failed();
    } else if (IS("same", 2, " %ld %ld", &a, &b)) {
      printf("%d\n", things[a] == things[b]);
    } else if (IS("cycle", 2, " %ld %599[^\n]", &a, text)) {
      void *first = NULL, *p;
      int before = 0;
      for (long i = 0; i < a; i++) {
        OK(cistern_open(text, 0, &p));
        OK(cistern_close(p));
        if (i == 0) {
          first = p;
          before = descriptors("");
        }
        CHECK(p == first);
      }
      printf("%d more descriptors\n", descriptors("") - before);
    } else if (IS("limit", 1, " %ld", &a)) {
      struct rlimit r = {(rlim_t)a, (rlim_t)a};
      CHECK(setrlimit(RLIMIT_NOFILE, &r) == 0);
      puts("ok");
    } else if (strcmp(word, "descriptors") == 0) {
      printf("%d\n", descriptors(""));
    } else if (strcmp(word, "reserved") == 0) {
      printf("%lld\n", (long long)stats_of(0).reserved.all.current);
    } else if (strcmp(word, "fork") == 0) {
      fflush(stdout);
      pid_t pid = fork();
      if (pid == 0)
        child();
      CHECK(pid > 0);
    } else if (strcmp(word, "pairs") == 0) { /* pairs that go through a magazine, with what is shared among them */
      OK(cistern_stream_durable(0, NULL));
      char handle[CISTERN_HANDLE_MAX], before[CISTERN_HANDLE_MAX] = "";
      for (int i = 0; i < 100; i++) {
        void *p = cistern_malloc(4096, 0, NULL), *q;
        CHECK(p != NULL);
        if (i % 2) {
          OK(cistern_share(p, handle, sizeof handle));
          CHECK(strcmp(handle, before) != 0);
          strcpy(before, handle);
          OK(cistern_open(handle, 0, &q));
          CHECK(q == p);
          OK(cistern_close(q));
        }
        cistern_free(p, 4096, 0, NULL);
        if (i % 2)
          FAILS(CISTERN_INVALID, "was freed", cistern_open(handle, 0, &q));
      }
      puts("ok");
    } else if (strcmp(word, "arguments") == 0) {
      char handle[CISTERN_HANDLE_MAX], small[10] = "untouched";
      void *p = cistern_malloc(512, 0, NULL), *q = p;
      FAILS(CISTERN_INVALID, "not a live allocation", cistern_share(NULL, handle, sizeof handle));
      CHECK(handle[0] == 0);
      FAILS(CISTERN_INVALID, "not a live allocation", cistern_share((char *)p + 512, handle, sizeof handle));
      FAILS(CISTERN_INVALID, "handle is NULL", cistern_share(p, NULL, 512));
      FAILS(CISTERN_INVALID, "does not fit into 10 bytes", cistern_share(p, small, sizeof small));
      CHECK(small[0] == 0 && memcmp(small + 1, "ntouched", 8) == 0);
      FAILS(CISTERN_INVALID, "does not fit into 0 bytes", cistern_share(p, small, 0));
      OK(cistern_share(p, handle, sizeof handle));
      FAILS(CISTERN_INVALID, "handle is NULL", cistern_open(NULL, 0, &q));
      FAILS(CISTERN_INVALID, "not a handle that Cistern made", cistern_open("", 0, &q));
      CHECK(q == NULL);
      FAILS(CISTERN_INVALID, "ptr is NULL", cistern_open(handle, 0, NULL));
      FAILS(CISTERN_INVALID, "device", cistern_open(handle, 99, &q));
      char endless[4096];
      memset(endless, 'x', sizeof endless);
      memcpy(endless, "cistern-share:1:", 16);
      FAILS(CISTERN_INVALID, "damaged", cistern_open(endless, 0, &q));
      FAILS(CISTERN_INVALID, "close", cistern_close(p));
      FAILS(CISTERN_INVALID, "close", cistern_close(NULL));
      OK(cistern_release(p));
      puts("ok");
    } else {
      printf("what is %s?\n", line);
    }
    fflush(stdout);
  }
  return 0;
}
