// baseline.cpp: what compilers of today call and the libraries that PyTorch asks for need not have. Each adapter of the wheel has it
// for itself alone (adapters.py).
#include <new>

// Older than glibc 2.32: whether there was ever a second thread.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

namespace std {
// Older than GCC 11.
[[noreturn]] __attribute__((visibility("hidden"))) void __throw_bad_array_new_length() { throw bad_array_new_length(); }
} // namespace std

// Older than GCC 11, which counts references in functions of their own.
extern "C" {
void old_destroy(void* e) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");
void old_copy(void* to, const void* from) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");

__attribute__((visibility("hidden"))) void release(void* e) __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void release(void* e) { old_destroy(e); }

__attribute__((visibility("hidden"))) void add_reference(void* e) __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void add_reference(void* e) {
  void* other; // that is never destroyed
  old_copy(&other, e);
}
}
