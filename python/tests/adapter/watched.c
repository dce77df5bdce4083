/* libcistern.so with two functions that a test watches, and can make fail. The others are those of the library, which this
 * one is linked with: looking a name up here finds them there. */
#include <cistern.h>

#include <dlfcn.h>

int (*test_watch)(int ends, void *stream); /* called before the library; what it returns but 0 is the result */

static void *real(const char *name) { return dlsym(dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL), name); }

int cistern_capture_begin(int device, const uint64_t pool[2], void *stream) {
  int code = test_watch ? test_watch(0, stream) : 0;
  return code ? code : ((int (*)(int, const uint64_t *, void *))real("cistern_capture_begin"))(device, pool, stream);
}

int cistern_capture_end(int device, void *stream) {
  int code = test_watch ? test_watch(1, stream) : 0;
  return code ? code : ((int (*)(int, void *))real("cistern_capture_end"))(device, stream);
}
