//go:build linux && cgo

#define _GNU_SOURCE
#include "launch.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

void launch_say(const char *text, size_t n) {
  struct pollfd ready = {.fd = STDERR_FILENO, .events = POLLOUT};
  if (poll(&ready, 1, 200) != 1 || (ready.revents & (POLLOUT | POLLERR)) != POLLOUT)
    return;
  sigset_t pipe, before, pending;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  sigpending(&pending);
  int theirs = sigismember(&pending, SIGPIPE); /* was there before, and stays */
  pthread_sigmask(SIG_BLOCK, &pipe, &before);
  ssize_t written = write(STDERR_FILENO, text, n);
  if (written < 0 && errno == EPIPE && !theirs) {
    struct timespec none = {0, 0};
    sigtimedwait(&pipe, NULL, &none);
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

#ifndef SYS_close_range
#define SYS_close_range 436 /* on every architecture; Linux 5.9 */
#endif

/* set_files gives the calling process its output, and no other file. glibc has this for posix_spawn from 2.34 on. */
static int set_files(int output) {
  if (dup2(output, STDOUT_FILENO) < 0 || dup2(STDOUT_FILENO, STDERR_FILENO) < 0 || fcntl(STDOUT_FILENO, F_SETFD, 0) != 0 ||
      fcntl(STDERR_FILENO, F_SETFD, 0) != 0)
    return errno;
  if (syscall(SYS_close_range, STDERR_FILENO + 1, ~0U, 0) == 0)
    return 0;
  struct rlimit most;
  if (getrlimit(RLIMIT_NOFILE, &most) != 0)
    return errno;
  for (rlim_t fd = STDERR_FILENO + 1; fd < most.rlim_cur; fd++)
    close((int)fd);
  return 0;
}

/* spawn starts the program. The caller is a child that shares this process's memory, and not its files. */
static int spawn(char *const args[], char *const env[], int output) {
  posix_spawn_file_actions_t files;
  posix_spawnattr_t how;
  sigset_t none, all;
  pid_t pid;
  sigemptyset(&none);
  sigfillset(&all);
  int bad = set_files(output);
  if (bad != 0 || (bad = posix_spawn_file_actions_init(&files)) != 0)
    return bad;
  if ((bad = posix_spawnattr_init(&how)) == 0) {
    if ((bad = posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0)) == 0 &&
        (bad = posix_spawnattr_setsigmask(&how, &none)) == 0 && (bad = posix_spawnattr_setsigdefault(&how, &all)) == 0 &&
        (bad = posix_spawnattr_setflags(&how, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF)) == 0)
      bad = posix_spawn(&pid, args[0], &files, &how, args, env);
    posix_spawnattr_destroy(&how);
  }
  posix_spawn_file_actions_destroy(&files);
  return bad;
}

/* The program's parent is a process that ends at once, so that it becomes the child of the process that adopts orphans, and the host
 * program, which may wait for children of its own, is not surprised by one that it did not start. That process lives in
 * this one's memory and stack while this thread is stopped, and no handler of pthread_atfork runs. */
int launch_start(char *const args[], char *const env[], int output) {
  volatile int bad = 0;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before); /* no handler runs in both */
  pid_t between = vfork();
  if (between == 0) {
    bad = spawn(args, env, output);
    _exit(0);
  }
  if (between < 0)
    bad = errno;
  else
    while (waitpid(between, NULL, 0) < 0 && errno == EINTR)
      ;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return bad;
}

char **launch_environment(void) { return environ; }

const char *launch_folder(void) {
  Dl_info info;
  return dladdr((void *)(size_t)launch_folder, &info) != 0 ? info.dli_fname : "";
}
