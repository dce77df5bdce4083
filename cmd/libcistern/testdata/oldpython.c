/* A program that shows the symbols of a Python of a version whose frames are not known. Native stacks are taken all the same.
 * The argument is what the settings said. */
#include "check.h"

uintptr_t PyCode_Type[64], PyUnicode_Type[64], PyBytes_Type[64], PyFrame_Type[64], PyType_Type[64];
void *PyGILState_GetThisThreadState(void) { return NULL; }
int Py_IsFinalizing(void) { return 0; }
const char *Py_GetVersion(void) { return "3.7.17 (default)"; }

__attribute__((noinline)) static void *ask(void) {
  void *p = cistern_malloc(MIB, 0, NULL);
  __asm__ volatile("" ::: "memory");
  return p;
}

int main(int argc, char **argv) {
  for (int i = 0; i < 64; i++)
    PyCode_Type[i] = UINTPTR_MAX; /* its flags say that it is ready */
  CHECK(argc == 2);
  void *p = ask();
  cistern_stack_use u;
  size_t n;
  OK(cistern_stack_usage(0, &u, 1, &n));
  int native = strcmp(argv[1], "all") == 0;
  CHECK(n == (size_t)native && (!native || u.stack != 0));
  FAILS(CISTERN_UNSUPPORTED, "from Python 3.10 to 3.14 only", cistern_stacks(CISTERN_STACKS_PYTHON, 0));
  FAILS(CISTERN_UNSUPPORTED, "stacks of Python's functions", cistern_stacks(CISTERN_STACKS_NATIVE | CISTERN_STACKS_PYTHON, 0));
  OK(cistern_stack_usage(0, &u, 1, &n));
  CHECK(n == (size_t)native); /* nothing has changed */
  OK(cistern_stacks(CISTERN_STACKS_NATIVE, 0));
  OK(cistern_release(p));
  puts("ok");
  return 0;
}
