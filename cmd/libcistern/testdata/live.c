/* A process that others look at: it allocates, says "ready", and goes on at each line that it reads. With "fork" it has a
 * child meanwhile; with "close" it closes every descriptor that it did not open; with "panic" it runs into the
 * bug that the library has for it. */
#define _GNU_SOURCE
#include "check.h"

#include <signal.h>
#include <sys/wait.h>

static void step(void) {
  printf("ready\n");
  fflush(stdout);
  char line[16];
  if (fgets(line, sizeof line, stdin) == NULL)
    _exit(0);
}

int main(int argc, char **argv) {
  const char *how = argc > 1 ? argv[1] : "";
  pid_t child = 0;
  CHECK(cistern_device_count() == 2);
  step(); /* no device is in use yet */
  void *weights, *rest;
  OK(cistern_library_default("training"));
  OK(cistern_tag_push("weights"));
  OK(cistern_alloc(&weights, 64 * MIB, 0, NULL, NULL));
  OK(cistern_tag_pop());
  OK(cistern_alloc(&rest, 8 * MIB, 0, NULL, NULL));
  if (strcmp(how, "fork") == 0) {
    child = fork();
    if (child == 0)
      for (;;)
        pause();
    printf("%d\n", (int)child);
  }
  if (strcmp(how, "close") == 0)
    for (int fd = 3; fd < 1024; fd++)
      close(fd);
  step();
  if (strcmp(how, "panic") == 0) {
    void *p;
    CHECK(cistern_alloc(&p, 1024 * MIB, 0, NULL, NULL) == CISTERN_INTERNAL);
    for (;;)
      step();
  }
  OK(cistern_release(weights));
  void *other;
  OK(cistern_alloc(&other, 2 * MIB, 1, NULL, NULL));
  step();
  if (child != 0) {
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
  }
  return 0;
}
