/* Sandboxes: system calls that are refused, all of the process's threads included. */
#define _GNU_SOURCE
#include "hosts.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

static const struct refusal {
  const char *name;
  int number, error;
} refusals[] = {
#ifdef SYS_epoll_create
    {"epoll_create", SYS_epoll_create, EPERM},
#endif
    {"epoll_create1", SYS_epoll_create1, EPERM},
    {"epoll_ctl", SYS_epoll_ctl, EPERM},
    {"epoll_pwait", SYS_epoll_pwait, EPERM},
    {"eventfd2", SYS_eventfd2, EPERM},
    {"memfd_create", SYS_memfd_create, EPERM},
    {"clone3", SYS_clone3, ENOSYS},
    {"membarrier", SYS_membarrier, EPERM},
    {"getrandom", SYS_getrandom, ENOSYS},
    {"socket", SYS_socket, EPERM},
    {"socketpair", SYS_socketpair, EPERM},
    {"getrlimit", SYS_prlimit64, EPERM},
    {"madvise", SYS_madvise, EPERM},
    {"sched_getaffinity", SYS_sched_getaffinity, EPERM},
};
enum { REFUSALS = sizeof refusals / sizeof *refusals };

static void install(const struct sock_filter *filter, unsigned short n) {
  struct sock_fprog program = {n, (struct sock_filter *)filter};
  CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0);
}

void refuse_call(int number, int error) {
  struct sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)number, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ((uint32_t)error & SECCOMP_RET_DATA)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  install(filter, sizeof filter / sizeof *filter);
}

/* refuse has a call of the list refused from now on, or all. */
static void refuse(const char *which) {
  int found = 0;
  for (int i = 0; i < REFUSALS; i++)
    if (strcmp(which, "all") == 0 || strcmp(which, refusals[i].name) == 0) {
      refuse_call(refusals[i].number, refusals[i].error);
      found++;
    }
  CHECK(found > 0);
}

/* A process that is refused calls before its first use of the library, or after. */
void seccomp(void) {
  if (argument[0] != NULL) {
    if (strcmp(argument[1], "late") == 0)
      each_op(1);
    refuse(argument[0]);
    each_op(0);
    OK(one_op("memory"));
    OK(one_op("pause"));
    if (strncmp(argument[0], "e", 1) == 0 || strcmp(argument[0], "all") == 0) { /* epoll, eventfd: what a collection might want */
      collected();
      each_op(0);
    }
    return;
  }
  double end = seconds() + duration;
  do {
    for (int i = 0; i < REFUSALS; i++) {
      again("seccomp", refusals[i].name, "early");
      again("seccomp", refusals[i].name, "late");
    }
    again("seccomp", "all", "early");
    again("seccomp", "all", "late");
  } while (seconds() < end);
}
