/* The ends of a process, in the orders that programs know. Built without the library, which it loads when main has long
 * started and threads run. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static void *(*alloc)(ssize_t, int, void *);
static void (*give)(void *, ssize_t, int, void *);
static void *kept;
static atomic_int running, stop;
static pthread_key_t key;

static void fail(const char *what) {
  fprintf(stderr, "%s\n", what);
  _exit(1);
}

static void *churn(void *arg) {
  while (alloc == NULL)
    usleep(100);
  running++;
  while (!stop)
    give(alloc(4096, 0, arg), 4096, 0, arg);
  return NULL;
}

static void at_exit(void) {
  if (kept == NULL)
    fail("nothing to free at exit");
  give(kept, 0, 0, NULL);
  void *p = alloc(512, 0, NULL);
  if (p == NULL)
    fail("no memory at exit");
  give(p, 512, 0, NULL);
}

static void *leave(void *arg) {
  (void)arg;
  exit(0);
}

/* A destructor of the thread's that uses the library after the library's own has run. */
static void late(void *p) {
  give((void *)512, 0, 0, NULL); /* fails: its words are kept again */
  give(p, 0, 0, NULL);
}

static void *brief(void *arg) {
  void *p = alloc(512, 0, arg);
  give((void *)1024, 0, 0, NULL);
  pthread_setspecific(key, p);
  return NULL;
}

int main(int argc, char **argv) {
  if (argc != 3)
    return 2;
  const char *how = argv[2];
  pthread_t t[16];
  for (size_t i = 0; i < 4; i++)
    pthread_create(&t[i], NULL, churn, (void *)(0x1000 + 16 * i));
  if (strcmp(how, "handler first") == 0)
    atexit(at_exit); /* runs after what the library registers */
  void *lib = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (lib == NULL)
    fail(dlerror());
  void (*f)(void *, ssize_t, int, void *) = (void (*)(void *, ssize_t, int, void *))dlsym(lib, "cistern_free");
  void *(*a)(ssize_t, int, void *) = (void *(*)(ssize_t, int, void *))dlsym(lib, "cistern_malloc");
  give = f;
  alloc = a;
  kept = alloc(1 << 20, 0, NULL);
  if (kept == NULL)
    fail("no memory");
  while (running < 4)
    usleep(100);

  if (strcmp(how, "return") == 0)
    return 0;
  if (strcmp(how, "handler first") == 0)
    exit(0);
  if (strcmp(how, "handler last") == 0) {
    atexit(at_exit);
    return 0;
  }
  if (strcmp(how, "_exit") == 0)
    _exit(0);
  if (strcmp(how, "quick_exit") == 0)
    quick_exit(0);
  if (strcmp(how, "from a thread") == 0) {
    atexit(at_exit);
    pthread_create(&t[4], NULL, leave, NULL);
    pthread_join(t[4], NULL);
    fail("still there");
  }
  if (strcmp(how, "main thread first") == 0) {
    pthread_create(&t[4], NULL, leave, NULL);
    pthread_exit(NULL);
  }
  if (strcmp(how, "threads first") == 0) {
    pthread_key_create(&key, late);
    for (int round = 0; round < 50; round++) {
      for (int i = 4; i < 16; i++)
        pthread_create(&t[i], NULL, brief, NULL);
      for (int i = 4; i < 16; i++)
        pthread_join(t[i], NULL);
    }
    return 0;
  }
  if (strcmp(how, "dlclose") == 0) {
    stop = 1;
    for (int i = 0; i < 4; i++)
      pthread_join(t[i], NULL);
    dlclose(lib); /* does nothing: Go cannot be unloaded */
    lib = dlopen(argv[1], RTLD_NOW);
    a = (void *(*)(ssize_t, int, void *))dlsym(lib, "cistern_malloc");
    return a == NULL || a(512, 0, NULL) == NULL;
  }
  if (strcmp(how, "abort") == 0)
    abort();
  if (strcmp(how, "crash") == 0)
    *(volatile int *)8 = 1;
  return 2;
}
