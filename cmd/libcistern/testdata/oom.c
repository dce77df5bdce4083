/* Requests that fail, with cistern_report on. The arguments: a folder, and what is to be tried. Prints ok. */
#define _GNU_SOURCE
#include "check.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

static const char *dir;

__attribute__((noinline)) static void *load_model(size_t n) {
  void *p = cistern_malloc((ssize_t)n, 0, NULL);
  __asm__ volatile("" ::: "memory");
  return p;
}

static int fails(void) {
  void *p;
  return cistern_alloc(&p, 900 * MIB, 0, NULL, NULL) == CISTERN_OUT_OF_MEMORY;
}

/* files counts those of the folder that end so. */
static int files(const char *end) {
  DIR *d = opendir(dir);
  int n = 0;
  for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) {
    size_t len = strlen(e->d_name);
    n += e->d_name[0] != '.' && len > strlen(end) && strcmp(e->d_name + len - strlen(end), end) == 0;
  }
  if (d != NULL)
    closedir(d);
  return n;
}

static void *failing(void *arg) {
  for (int i = 0; i < 20; i++)
    CHECK(fails());
  return arg;
}

int main(int argc, char **argv) {
  CHECK(argc == 3);
  dir = argv[1];
  const char *what = argv[2];
  OK(cistern_set_limit(0, 512 * MIB));
  if (strcmp(what, "function") == 0)
    OK(cistern_stacks(CISTERN_STACKS_NATIVE, 0));
  OK(cistern_tag_push("weights"));
  void *p = load_model(300 * MIB);
  CHECK(p != NULL);
  OK(cistern_tag_pop());
  if (strcmp(what, "settings") == 0) { /* report: said where */
    CHECK(fails() && files(".cistern") == 1);
  } else if (strcmp(what, "function") == 0) {
    CHECK(fails() && files("") == 0);
    OK(cistern_report(dir, 0));
    /* Null that the caller asked for is no failure. */
    cistern_alloc_options o = {.size = sizeof o, .flags = CISTERN_ALLOC_CACHED};
    void *q;
    CHECK(cistern_alloc_with(&q, 900 * MIB, 0, NULL, &o) == CISTERN_OUT_OF_MEMORY && files("") == 0);
    CHECK(cistern_malloc(900 * MIB, 0, NULL) == NULL);
    CHECK_WORDS(CISTERN_OUT_OF_MEMORY, "load_model in oom_c"); /* the largest */
    CHECK(files(".cistern") == 1);
    char file[4096], cut[8], want[4096];
    snprintf(want, sizeof want, "%s/oom-%d-1.cistern", dir, (int)getpid());
    CHECK(cistern_last_report(file, sizeof file) == strlen(want) && strcmp(file, want) == 0);
    CHECK(cistern_last_report(cut, sizeof cut) == strlen(want) && strlen(cut) == 7 && cistern_last_report(NULL, 0) == strlen(want));
    /* A failure without a file has none. */
    CHECK(cistern_release(&file) != CISTERN_OK && cistern_last_report(file, sizeof file) == 0 && file[0] == 0);
    cistern_source s = {NULL, {.size = sizeof s.options}};
    CHECK(cistern_source_malloc(&s, 900 * MIB, 0) == NULL && files(".cistern") == 2);
    /* What is kept for the reports ends with them; what is asked for beside stays. */
    cistern_event e[8];
    size_t n;
    OK(cistern_history_drain(0, e, 8, &n, NULL));
    CHECK(n > 0);
    OK(cistern_report(NULL, 0));
    CHECK(fails() && files("") == 2);
    OK(cistern_history_drain(0, e, 8, &n, NULL));
    CHECK(n == 0);
    OK(cistern_report(dir, 0));
    OK(cistern_history(-1, 10));
    OK(cistern_report(NULL, 0));
    CHECK(fails());
    OK(cistern_history_drain(0, e, 8, &n, NULL));
    CHECK(n > 0);
  } else if (strcmp(what, "threads") == 0) {
    OK(cistern_report(dir, 0));
    pthread_t t[8];
    for (int i = 0; i < 8; i++)
      pthread_create(&t[i], NULL, failing, NULL);
    for (int i = 0; i < 8; i++)
      pthread_join(t[i], NULL);
    int n = files(".cistern"); /* fewer where a machine is so slow that some give up */
    CHECK(n > 0 && n <= 5 && files("") == n);
  } else if (strcmp(what, "again") == 0) { /* five files, the last written anew after a while */
    OK(cistern_report(dir, 0));
    for (int i = 0; i < 5; i++)
      CHECK(fails());
    CHECK(files(".cistern") == 5);
    char name[4096];
    snprintf(name, sizeof name, "%s/oom-%d-5.cistern", dir, (int)getpid());
    struct stat fifth, now;
    CHECK(stat(name, &fifth) == 0);
    double begin = seconds();
    do {
      usleep(1000);
      CHECK(fails());
      CHECK(stat(name, &now) == 0); /* it is there all the time */
    } while (now.st_mtim.tv_sec == fifth.st_mtim.tv_sec && now.st_mtim.tv_nsec == fifth.st_mtim.tv_nsec && seconds() - begin < 300);
    CHECK(seconds() - begin < 300 && files("") == 5);
  } else if (strcmp(what, "trouble") == 0) { /* the folder cannot be made */
    OK(cistern_report(dir, 0));
    for (int i = 0; i < 20; i++)
      CHECK(fails());
  } else if (strcmp(what, "silent") == 0) { /* standard error has no reader, and a full pipe does no harm */
    int ends[2];
    CHECK(pipe(ends) == 0);
    dup2(ends[1], STDERR_FILENO);
    OK(cistern_report(dir, 0));
    char page[4096] = {0};
    fcntl(ends[1], F_SETFL, O_NONBLOCK);
    while (write(ends[1], page, sizeof page) > 0)
      ;
    fcntl(ends[1], F_SETFL, 0);
    CHECK(fails()); /* a write there never returns */
    close(ends[0]); /* SIGPIPE would end the process */
    CHECK(fails() && files(".cistern") == 2);
  } else if (strcmp(what, "limit") == 0) { /* the kernel ends a process that writes more to a file than it may */
    struct rlimit small = {100, RLIM_INFINITY};
    OK(cistern_report(dir, 0));
    CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
    CHECK(fails() && files("") == 0);
    char name[4096];
    snprintf(name, sizeof name, "%s/x", dir);
    CHECK(cistern_trace_write(name) != CISTERN_OK && files("") == 0);
    CHECK(cistern_snapshot_write(name) != CISTERN_OK && files("") == 0);
    small.rlim_cur = RLIM_INFINITY;
    CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
    CHECK(fails() && files(".cistern") == 1);
  } else if (strcmp(what, "closing") == 0) { /* as a program does that goes into the background */
    OK(cistern_report(dir, 0));
    for (int n = 1; n <= 3; n++) {
      CHECK(fails() && files(".cistern") == n);
      for (int fd = 3; fd < 1024; fd++)
        close(fd);
      usleep(300000);
    }
  } else if (strcmp(what, "child") == 0) {
    int leak = open("/dev/null", O_RDONLY); /* without O_CLOEXEC */
    CHECK(leak >= 0);
    sigset_t blocked;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &blocked, NULL);
    OK(cistern_report(dir, 1));
    CHECK(fails());
    /* It is no child of a process here, also while it runs. */
    CHECK(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD);
    for (double begin = seconds(); files(".html") == 0; usleep(10000))
      CHECK(seconds() - begin < 300);
    CHECK(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD);
  } else if (strcmp(what, "fork") == 0) {
    OK(cistern_report(dir, 0));
    pid_t pid = fork();
    if (pid == 0) {
      CHECK(cistern_malloc(900 * MIB, 0, NULL) == NULL);
      CHECK_WORDS(CISTERN_FORKED, "child of fork");
      _exit(0);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0 && files("") == 0);
    CHECK(fails() && files(".cistern") == 1);
  } else {
    CHECK(0);
  }
  /* And all works as before. */
  OK(cistern_release(p));
  CHECK((p = cistern_malloc(400 * MIB, 0, NULL)) != NULL);
  OK(cistern_release(p));
  puts("ok");
  return 0;
}
