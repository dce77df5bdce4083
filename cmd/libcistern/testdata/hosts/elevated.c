/* A program that has more rights than its user (setuid), in an environment of that user's choice. */
#define _GNU_SOURCE
#include "hosts.h"

#include <fcntl.h>
#include <glob.h>
#include <grp.h>
#include <limits.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>

enum { OTHER = 65534 }; /* a user without rights */

static void copy_file(const char *from, const char *to) {
  char text[1 << 16];
  ssize_t n;
  int in = open(from, O_RDONLY), out = open(to, O_WRONLY | O_CREAT | O_EXCL, 0755);
  CHECK(in >= 0 && out >= 0);
  while ((n = read(in, text, sizeof text)) > 0)
    CHECK(write(out, text, (size_t)n) == n);
  CHECK(n == 0 && close(in) == 0 && close(out) == 0);
}

static char *within(const char *dir, const char *name) {
  static char paths[8][PATH_MAX];
  static int next;
  char *path = paths[next++ % 8];
  snprintf(path, PATH_MAX, "%s/%s", dir, name);
  return path;
}

static void set(const char *name, const char *format, const char *dir) {
  char value[PATH_MAX + 100];
  snprintf(value, sizeof value, format, dir);
  CHECK(setenv(name, value, 1) == 0);
}

/* An error that does not name the folder: nothing there was tried. */
static void unnamed(const char *dir) {
  char words[2048] = "";
  cistern_last_error(words, sizeof words);
  CHECK(strstr(words, dir) == NULL);
}

static int matches(const char *pattern) {
  glob_t found;
  int n = glob(pattern, 0, NULL, &found) == 0 ? (int)found.gl_pathc : 0;
  globfree(&found);
  return n;
}

/* With the rights of the file: what the environment names is not used, and what the program itself says is. */
static void elevated_program(const char *dir) {
  CHECK(getauxval(AT_SECURE) != 0 && geteuid() == 0 && getuid() == OTHER);
  cistern_init(NULL); /* succeeds where there is a GPU */
  unnamed(dir);
  OK(cistern_init("driver:sim:8GiB"));
  unnamed(dir);
  each_op(1);
  cistern_upstream_check(0, "nccl");
  unnamed(dir);
  OK(cistern_report(within(dir, "reports"), 1));
  void *p;
  CHECK(cistern_alloc(&p, (size_t)1 << 50, 0, NULL, NULL) == CISTERN_OUT_OF_MEMORY);
  OK(cistern_report(NULL, 0));
  CHECK(matches(within(dir, "reports/*.cistern")) == 1);
  CHECK(matches(within(dir, "reports/*.txt")) == 0); /* the output of the command, which lies in no trusted place */
}

static void as_other_user(const char *dir) {
  CHECK(setgroups(0, NULL) == 0 && setresgid(OTHER, OTHER, OTHER) == 0 && setresuid(OTHER, OTHER, OTHER) == 0);
  set("CISTERN_CONF", "driver:nvidia:%s/driver.so", dir);
  set("CISTERN_COMMAND", "%s/cistern", dir);
  set("PATH", "%s", dir);
  set("VIRTUAL_ENV", "%s", dir);
  set("XDG_RUNTIME_DIR", "%s", dir);
  execl(within(dir, "hosts"), "hosts", "elevated", "1", dir, NULL);
  _exit(127);
}

void elevated(void) {
  if (argument[0] != NULL) {
    elevated_program(argument[0]);
    return;
  }
  char dir[] = "/tmp/cistern-hosts-XXXXXX";
  struct statvfs fs;
  CHECK(mkdtemp(dir) != NULL && statvfs(dir, &fs) == 0);
  if (geteuid() != 0 || fs.f_flag & (ST_NOSUID | ST_NOEXEC) || prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1) {
    puts("not tried: it takes root, and a /tmp with setuid programs");
    rmdir(dir);
    return;
  }
  const char *library = "lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2";
  char command[2 * PATH_MAX];
  snprintf(command, sizeof command, "cd %s && mkdir -p reports $(dirname %s) && echo none >%s && echo '#!/bin/sh' >cistern && chmod 755 cistern", dir,
           library, library);
  CHECK(system(command) == 0);
  copy_file("/proc/self/exe", within(dir, "hosts"));
  CHECK(chmod(dir, 0755) == 0 && chmod(within(dir, "hosts"), 04755) == 0);
  int status;
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0)
    as_other_user(dir);
  CHECK(waitpid(child, &status, 0) == child);
  snprintf(command, sizeof command, "rm -rf %s", dir);
  CHECK(system(command) == 0);
  CHECK(status == 0);
}
