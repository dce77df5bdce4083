/* Requests while libraries are loaded. A library's constructor, whose thread has the dynamic linker's lock, asks for what
 * two other threads have begun and cannot end without that lock. It is compiled as that library too. Prints ok. */
#define _GNU_SOURCE
#include "check.h"

#include <dlfcn.h>
#include <pthread.h>

#ifdef LIBRARY

__attribute__((constructor)) static void construct(void) {
  void (*loading)(void) = (void (*)(void))(uintptr_t)dlsym(RTLD_DEFAULT, "loading");
  loading();
}

#else

/* By its name a function of C++. */
__attribute__((noinline)) void *_Z7allocatev(void) {
  void *p = cistern_malloc(1 << 20, 0, NULL);
  __asm__ volatile("" ::: "memory");
  return p;
}

static uint32_t stack;

static void *asks_for_python(void *arg) {
  cistern_stacks(CISTERN_STACKS_PYTHON, 0); /* of which there is none, or nothing yet */
  return arg;
}

static void *asks_for_names(void *arg) {
  char text[4096];
  OK(cistern_stack_text(stack, text, sizeof text));
  return arg;
}

static pthread_t threads[2];

__attribute__((visibility("default"))) void loading(void) {
  CHECK(pthread_create(&threads[0], NULL, asks_for_python, NULL) == 0);
  CHECK(pthread_create(&threads[1], NULL, asks_for_names, NULL) == 0);
  usleep(300000); /* they wait for this thread by now, or will: it waits for neither */
  char text[4096];
  OK(cistern_stack_text(stack, text, sizeof text));
  CHECK(strstr(text, "allocate") != NULL);
  OK(cistern_stacks(CISTERN_STACKS_NATIVE, 0));
  cistern_free(_Z7allocatev(), 1 << 20, 0, NULL);
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  alarm(300); /* a deadlock ends */
  OK(cistern_stacks(CISTERN_STACKS_NATIVE, 0));
  void *p = _Z7allocatev();
  CHECK(p != NULL);
  cistern_stack_use use;
  size_t n;
  OK(cistern_stack_usage(0, &use, 1, &n));
  CHECK(n == 1);
  stack = use.stack;
  CHECK(dlopen(argv[1], RTLD_NOW) != NULL);
  for (int i = 0; i < 2; i++)
    CHECK(pthread_join(threads[i], NULL) == 0);
  cistern_free(p, 1 << 20, 0, NULL);
  puts("ok");
  return 0;
}

#endif
