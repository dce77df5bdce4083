/* What a program does with its process: threads that cannot be made, small stacks, fork, exec, other users' rights, copies of the
 * library, and its end. */
#define _GNU_SOURCE
#include "hosts.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static pthread_t worker_of[WORKERS];

static void start_workers(void) {
  stop = 0;
  prepare();
  for (uintptr_t i = 0; i < WORKERS; i++)
    CHECK(pthread_create(&worker_of[i], NULL, work, (void *)i) == 0);
}

static void end_workers(void) {
  stop = 1;
  for (int i = 0; i < WORKERS; i++)
    CHECK(pthread_join(worker_of[i], NULL) == 0);
}

/* No thread can be made, from the start or from some time on: an error is right at the start, and later all goes on. */
void threads(void) {
  if (argument[0] == NULL) {
    double end = seconds() + duration;
    do {
      again("threads", "early", NULL);
      again("threads", "late", NULL);
    } while (seconds() < end);
    return;
  }
  int late = strcmp(argument[0], "late") == 0;
  if (late) {
    start_workers();
    each_op(1);
  }
  refuse_call(SYS_clone, EAGAIN);
  refuse_call(SYS_clone3, EAGAIN);
  if (!late) {
    CHECK(cistern_init(NULL) == CISTERN_UNSUPPORTED);
    CHECK_WORDS(CISTERN_UNSUPPORTED, "threads");
    each_op(0);
    return;
  }
  for (double end = seconds() + duration / 2; seconds() < end;) {
    each_op(1);
    collected();
  }
  end_workers();
}

static void *on_little(void *arg) {
  each_op(1);
  unsigned seed = 3;
  turn((uintptr_t)arg, &seed);
  return NULL;
}

/* Stacks of 16 KiB, with a page that must not be touched below. */
void stacks(void) {
  enum { SMALL = 16 << 10, GUARD = 64 << 10 };
  double end = seconds() + duration;
  prepare();
  do {
    pthread_attr_t attr;
    pthread_t thread;
    char *stack = mmap(NULL, GUARD + SMALL, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(stack != MAP_FAILED && mprotect(stack, GUARD, PROT_NONE) == 0);
    CHECK(pthread_attr_init(&attr) == 0 && pthread_attr_setstack(&attr, stack + GUARD, SMALL) == 0);
    CHECK(pthread_create(&thread, &attr, on_little, (void *)1) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(munmap(stack, GUARD + SMALL) == 0);
  } while (seconds() < end);
}

/* Children while threads allocate: they get errors, and their parent's memory is left alone. */
void forks(void) {
  double end = seconds() + duration;
  start_workers();
  void *p = cistern_malloc(MIB, 0, NULL);
  char handle[CISTERN_HANDLE_MAX];
  OK(cistern_share(p, handle, sizeof handle));
  CHECK(setenv("HOSTS_HANDLE", handle, 1) == 0);
  do {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      if (cistern_malloc(512, 0, NULL) != NULL || cistern_last_error(NULL, 0) != CISTERN_FORKED)
        _exit(3);
      cistern_free(p, 0, 0, NULL);
      _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    again("execs", "other", NULL); /* which opens the memory */
  } while (seconds() < end);
  end_workers();
  OK(cistern_release(p));
}

/* The program becomes another one while its threads allocate. */
void execs(void) {
  if (argument[0] != NULL && strcmp(argument[0], "other") == 0) {
    each_op(1);
    return;
  }
  if (argument[0] != NULL) {
    start_workers();
    usleep(2000 * (useconds_t)atoi(argument[0]));
    execl("/proc/self/exe", "hosts", "execs", "1", "other", NULL);
    CHECK(0);
  }
  double end = seconds() + duration;
  for (int i = 0; i == 0 || seconds() < end; i++)
    again("execs", (char[]){(char)('0' + i % 10), 0}, NULL);
}

/* The program ends while its threads allocate, in each way. */
void exits(void) {
  static const char *const ways[] = {"return", "exit", "_exit", "quick_exit"};
  if (argument[0] != NULL) {
    start_workers();
    usleep(5000);
    switch (argument[0][0]) {
    case '1':
      exit(0);
    case '2':
      _exit(0);
    case '3':
      quick_exit(0);
    }
    return;
  }
  double end = seconds() + duration;
  do {
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
      again("exits", (char[]){(char)('0' + i), 0}, NULL);
  } while (seconds() < end);
}

/* The process gives up its rights, which the C library has every thread do. */
void setuids(void) {
  start_workers();
  each_op(1);
  for (double end = seconds() + duration; seconds() < end; usleep(1000)) {
    CHECK(setresuid((uid_t)-1, geteuid(), (uid_t)-1) == 0);
    CHECK(setresgid((gid_t)-1, getegid(), (gid_t)-1) == 0);
  }
  if (geteuid() == 0)
    CHECK(setgroups(0, NULL) == 0 && setresgid(65534, 65534, 65534) == 0 && setresuid(65534, 65534, 65534) == 0);
  each_op(0); /* files of the former user may be out of reach */
  OK(one_op("memory"));
  end_workers();
}

void copy_library(char *to) {
  Dl_info info;
  char text[1 << 16];
  ssize_t n;
  CHECK(dladdr((void *)cistern_malloc, &info) != 0);
  int from = open(info.dli_fname, O_RDONLY), fd = mkstemp(to);
  CHECK(from >= 0 && fd >= 0);
  while ((n = read(from, text, sizeof text)) > 0)
    CHECK(write(fd, text, (size_t)n) == n);
  CHECK(n == 0 && close(fd) == 0 && close(from) == 0);
}

typedef void *(*malloc_fn)(ssize_t, int, void *);
typedef void (*free_fn)(void *, ssize_t, int, void *);

struct copy {
  malloc_fn get;
  free_fn put;
};

static void *use_copy(void *arg) {
  struct copy *c = arg;
  while (!stop) {
    void *p[50];
    for (int i = 0; i < 50; i++)
      CHECK((p[i] = c->get(512 * (1 + i), 0, NULL)) != NULL);
    for (int i = 0; i < 50; i++)
      c->put(p[i], 0, 0, NULL);
  }
  return NULL;
}

/* A second copy of the library in the process, which is closed while the first goes on, and used all the same: it stays. */
void copies(void) {
  char name[] = "/tmp/cistern-hosts-XXXXXX";
  copy_library(name);
  void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  CHECK(library != NULL);
  unlink(name);
  struct copy c;
  *(void **)&c.get = dlsym(library, "cistern_malloc");
  *(void **)&c.put = dlsym(library, "cistern_free");
  CHECK(c.get != NULL && c.get != cistern_malloc);
  start_workers();
  pthread_t user;
  CHECK(pthread_create(&user, NULL, use_copy, &c) == 0);
  double end = seconds() + duration;
  while (seconds() < end - duration / 2)
    each_op(1);
  CHECK(dlclose(library) == 0);
  while (seconds() < end)
    each_op(1);
  end_workers();
  CHECK(pthread_join(user, NULL) == 0);
}
