/* The kernel, asked without a C library and without errno: for pystack.c, and for the audit library, which is built with this
 * folder in its path. */
#ifndef CISTERN_KERNEL_H
#define CISTERN_KERNEL_H

#if defined(__x86_64__)

#ifndef SYS_getpid
enum { SYS_getpid = 39, SYS_process_vm_readv = 310 };
#endif
enum { USER_BITS = 47 }; /* of an address that may be a program's */

static inline long sys6(long n, long a, long b, long c, long d, long e, long f) {
  long r;
  register long r10 __asm__("r10") = d;
  register long r8 __asm__("r8") = e;
  register long r9 __asm__("r9") = f;
  __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
  return r;
}

#elif defined(__aarch64__)

#ifndef SYS_getpid
enum { SYS_getpid = 172, SYS_process_vm_readv = 270 };
#endif
enum { USER_BITS = 52 };

static inline long sys6(long n, long a, long b, long c, long d, long e, long f) {
  register long x8 __asm__("x8") = n;
  register long x0 __asm__("x0") = a;
  register long x1 __asm__("x1") = b;
  register long x2 __asm__("x2") = c;
  register long x3 __asm__("x3") = d;
  register long x4 __asm__("x4") = e;
  register long x5 __asm__("x5") = f;
  __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
  return x0;
}

#endif

#endif
