/* Memory for other processes, which simulated devices share as files. */
#define _GNU_SOURCE
#include "check.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

static char handle[CISTERN_HANDLE_MAX];

/* The process's own handles give the block itself. */
static void own(void) {
  char again[CISTERN_HANDLE_MAX], small[20];
  void *p = cistern_malloc(3 * MIB, 0, NULL), *q, *r;
  CHECK(p != NULL);
  OK(cistern_share(p, handle, sizeof handle));
  CHECK(strlen(handle) < CISTERN_HANDLE_MAX && strlen(handle) > 20);
  OK(cistern_share(p, again, sizeof again));
  CHECK(strcmp(handle, again) == 0);
  for (const char *c = handle; *c; c++)
    CHECK(*c > ' ' && *c < 127);
  FAILS(CISTERN_INVALID, "does not fit", cistern_share(p, small, sizeof small));
  CHECK(small[0] == 0);
  FAILS(CISTERN_INVALID, "not a live allocation", cistern_share((char *)p + 512, small, sizeof small));
  OK(cistern_open(handle, 0, &q));
  OK(cistern_open(handle, 0, &r));
  CHECK(q == p && r == p);
  OK(cistern_close(q));
  OK(cistern_close(r));
  FAILS(CISTERN_INVALID, "", cistern_close(q));
  size_t size;
  CHECK(cistern_base(p, &size) == p);
  OK(cistern_release(p));
  FAILS(CISTERN_INVALID, "freed", cistern_open(handle, 0, &q));
  CHECK(q == NULL);
  /* A block that is taken again at the same address is another. */
  CHECK((r = cistern_malloc(3 * MIB, 0, NULL)) == p);
  FAILS(CISTERN_INVALID, "freed", cistern_open(handle, 0, &q));
  OK(cistern_release(r));
}

static void nonsense(void) {
  void *q;
  static const char *const bad[] = {"", "x", "cistern-share:", "cistern-share:9:1:", "cistern-share:1:::::::/", "%n%n%s", "\xff\xfe\x80"};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    CHECK(cistern_open(bad[i], 0, &q) == CISTERN_INVALID && q == NULL);
    CHECK(cistern_last_error(NULL, 0) == CISTERN_INVALID);
  }
  char *endless = malloc(10 * MIB);
  memset(endless, 'a', 10 * MIB - 1);
  endless[10 * MIB - 1] = 0;
  CHECK(cistern_open(endless, 0, &q) == CISTERN_INVALID);
  free(endless);
  FAILS(CISTERN_INVALID, "device", cistern_open(handle, 7, &q));
}

static int sockets(pid_t pid) {
  char folder[64], prefix[32];
  snprintf(folder, sizeof folder, "/dev/shm/cistern-%d", (int)geteuid());
  snprintf(prefix, sizeof prefix, "%d-", (int)pid);
  DIR *d = opendir(folder);
  int n = 0;
  if (d != NULL) {
    for (struct dirent *e; (e = readdir(d)) != NULL;)
      n += strncmp(e->d_name, prefix, strlen(prefix)) == 0;
    closedir(d);
  }
  return n;
}

/* A process that shares, seen from this one, which must not have used the library before. */
static pid_t sharer(const char *how) {
  pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid != 0)
    return pid;
  execl(program_invocation_name, "sharing", how, NULL); /* under valgrind /proc/self/exe is valgrind */
  _exit(9);
}

static int share_and_wait(const char *how) {
  void *p = cistern_malloc(3 * MIB, 0, NULL);
  OK(cistern_share(p, handle, sizeof handle));
  CHECK(sockets(getpid()) == 1);
  pid_t left = 0;
  if (strcmp(how, "leaves a child") == 0 && (left = fork()) == 0) {
    CHECK(cistern_release(p) == CISTERN_FORKED);
    fclose(stdout), fclose(stderr); /* the reader of the output shall not wait for this */
    sleep(600); /* until the other process ends it */
    _exit(0);
  }
  printf("%s %d\n", handle, (int)left);
  fflush(stdout);
  char c;
  return read(0, &c, 1) < 0;
}

static void others(void) {
  for (int child = 0; child < 2; child++) {
    int in[2], out[2], status;
    CHECK(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0);
    int keep_in = fcntl(0, F_DUPFD_CLOEXEC, 3), keep_out = fcntl(1, F_DUPFD_CLOEXEC, 3);
    dup2(in[0], 0);
    dup2(out[1], 1);
    pid_t pid = sharer(child ? "leaves a child" : "stays");
    dup2(keep_in, 0);
    dup2(keep_out, 1);
    close(keep_in), close(keep_out), close(in[0]), close(out[1]);
    int left;
    FILE *said = fdopen(out[0], "r");
    CHECK(said != NULL && fscanf(said, "%511s %d", handle, &left) == 2 && strlen(handle) > 20 && (left != 0) == child);
    void *q;
    void *r;
    OK(cistern_open(handle, 0, &q)); /* it lives, and answers */
    OK(cistern_open(handle, 0, &r));
    CHECK(q != NULL && r == q && sockets(pid) == 1);
    CHECK(cistern_base(q, NULL) == NULL); /* not an allocation of this process */
    CHECK(cistern_release(q) == CISTERN_INVALID);
    OK(cistern_close(q));
    OK(cistern_close(r));
    CHECK(cistern_close(q) == CISTERN_INVALID);
    close(in[1]); /* it ends */
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(sockets(pid) == 0);
    double soonest = 1e9; /* of a few, as the machine may be busy; an exporter that does not answer is waited for ten seconds */
    for (int i = 0; i < 5 && soonest > 5; i++) {
      double begin = seconds();
      FAILS(CISTERN_INVALID, "has ended", cistern_open(handle, 0, &q));
      CHECK(q == NULL);
      double took = seconds() - begin;
      soonest = took < soonest ? took : soonest;
    }
    CHECK(soonest < 5);
    if (child)
      kill(left, SIGKILL);
    fclose(said);
  }
}

int main(int argc, char **argv) {
  if (argc > 1)
    return share_and_wait(argv[1]);
  others();
  own();
  nonsense();
  CHECK(sockets(getpid()) == 1);
  puts("ok");
  return 0;
}
