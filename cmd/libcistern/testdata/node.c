/* A process on a GPU that it shares with others: it does what the lines that it reads say, and answers each with a line. */
#define _GNU_SOURCE
#include "check.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { NAMES = 64 };
static void *blocks[NAMES][64];

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static void gone(void *ctx, int device, void *addr, size_t size) {
  (void)ctx, (void)device, (void)addr, (void)size;
}

static void answer(int code, double took) {
  char words[4096] = "";
  if (code != CISTERN_OK) {
    cistern_last_error(words, sizeof words);
    for (char *c = words; *c != 0; c++)
      if (*c == '\n')
        *c = '|';
  }
  printf("%d %.3f %s\n", code, took, words);
  fflush(stdout);
}

int main(void) {
  char line[256], word[32];
  pid_t child = 0;
  answer(cistern_init(NULL), 0);
  while (fgets(line, sizeof line, stdin) != NULL) {
    unsigned name = 0, mib = 0, n = 0;
    int got = sscanf(line, "%31s %u %u %u", word, &name, &mib, &n), code = CISTERN_OK;
    double began = now();
    if (got < 1 || name >= NAMES || n > 64)
      return 2;
    if (strcmp(word, "alloc") == 0) { /* NAME MIB [N]: N blocks */
      for (unsigned i = 0; i < (n ? n : 1) && code == CISTERN_OK; i++)
        code = cistern_alloc(&blocks[name][i], mib * MIB, 0, NULL, NULL);
    } else if (strcmp(word, "free") == 0) {
      for (unsigned i = 0; i < 64 && code == CISTERN_OK; i++) {
        if (blocks[name][i] != NULL)
          code = cistern_release(blocks[name][i]);
        blocks[name][i] = NULL;
      }
    } else if (strcmp(word, "trim") == 0) {
      code = cistern_trim(0);
    } else if (strcmp(word, "limit") == 0) { /* the limit in force, in MiB */
      uint64_t bytes;
      code = cistern_get_limit(0, &bytes);
      printf("%llu ", (unsigned long long)(bytes / MIB));
    } else if (strcmp(word, "available") == 0) {
      uint64_t bytes;
      code = cistern_node_available(0, &bytes);
      printf("%llu ", (unsigned long long)(bytes / MIB));
    } else if (strcmp(word, "stats") == 0) { /* reserved and active MiB, requests met by other processes, out of memory */
      cistern_stats s = {.size = sizeof s};
      code = cistern_get_stats(0, &s);
      printf("%lld %lld %lld %lld ", (long long)(s.reserved.all.current / MIB), (long long)(s.active_bytes.all.current / MIB), (long long)s.by_node,
             (long long)s.ooms);
    } else if (strcmp(word, "pause") == 0) {
      code = cistern_pause(0, NULL, NULL);
    } else if (strcmp(word, "allow") == 0) { /* KEEP TAGGED [AUTO]: the node may pause all, or what has the tag t; by itself too */
      cistern_pause_options o = {.size = sizeof o, .keep = name, .tag = mib ? "t" : NULL, .flags = n ? CISTERN_PAUSE_AUTO : 0};
      code = cistern_node_allow_pause(0, &o);
    } else if (strcmp(word, "deny") == 0) {
      code = cistern_node_deny_pause(0);
    } else if (strcmp(word, "tag") == 0) {
      code = mib != 0 ? cistern_tag_push("t") : cistern_tag_pop();
    } else if (strcmp(word, "watch") == 0) { /* 0 1: a function for memory that goes; 0 0: none */
      code = cistern_on_unmap(0, mib ? gone : NULL, NULL);
    } else if (strcmp(word, "resume") == 0) {
      code = cistern_resume(0, NULL, NULL);
    } else if (strcmp(word, "capture") == 0) {
      const uint64_t pool[2] = {7, 7};
      cistern_pool_create(0, pool, NULL);
      code = cistern_capture_begin(0, pool, STREAM(5));
      for (int i = 0; i < 4 && code == CISTERN_OK; i++)
        code = cistern_alloc(&blocks[NAMES - 1][i], 100 * MIB, 0, STREAM(5), pool);
      for (int i = 0; i < 4 && code == CISTERN_OK; i++)
        code = cistern_release(blocks[NAMES - 1][i]);
    } else if (strcmp(word, "captured") == 0) {
      code = cistern_capture_end(0, STREAM(5));
    } else if (strcmp(word, "fork") == 0) {
      child = fork();
      if (child == 0) {
        uint64_t bytes;
        if (cistern_node_available(0, &bytes) == CISTERN_OK)
          _exit(1);
        for (;;)
          pause();
      }
      printf("%d ", (int)child);
    } else if (strcmp(word, "close") == 0) { /* every socket; the simulated device needs its file */
      struct stat st;
      for (int fd = 3; fd < 1024; fd++)
        if (fstat(fd, &st) == 0 && S_ISSOCK(st.st_mode))
          close(fd);
    } else if (strcmp(word, "steps") == 0) { /* NAME MIB N: N times allocate, work, free, pause, as training steps do */
      for (unsigned i = 0; i < n && code == CISTERN_OK; i++) {
        code = cistern_alloc(&blocks[name][0], mib * MIB, 0, NULL, NULL);
        usleep(20000);
        if (code == CISTERN_OK)
          code = cistern_release(blocks[name][0]);
        blocks[name][0] = NULL;
        usleep(20000);
      }
    } else if (strcmp(word, "fill") == 0) { /* take every descriptor */
      while (dup(0) >= 0)
        ;
    } else {
      return 2;
    }
    answer(code, now() - began);
  }
  if (child > 0) {
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
  }
  return 0;
}
