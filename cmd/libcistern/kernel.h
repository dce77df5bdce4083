/* The kernel, asked without a C library and without errno: for pystack.c, and for the audit library, which is built with this
 * folder in its path. */
#ifndef CISTERN_KERNEL_H
#define CISTERN_KERNEL_H

#if defined(__x86_64__)

#ifndef SYS_getpid
enum { SYS_getpid = 39, SYS_rt_sigprocmask = 14, SYS_process_vm_readv = 310 };
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
enum { SYS_getpid = 172, SYS_rt_sigprocmask = 135, SYS_process_vm_readv = 270 };
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

/* read_self copies n bytes of this process's memory, which may not be mapped, and reports whether it could. Where a sandbox
 * forbids process_vm_readv, the kernel is asked for each 8 bytes whether they can be read: rt_sigprocmask reads a set of
 * signals (EFAULT where it cannot) before it refuses (EINVAL) to do with it what there is no number for. */
static inline int read_self(const void *from, void *to, unsigned long n) {
  struct { const void *p; unsigned long n; } here = {to, n}, there = {from, n};
  long r = sys6(SYS_process_vm_readv, sys6(SYS_getpid, 0, 0, 0, 0, 0, 0), (long)&here, 1, (long)&there, 1, 0);
  if (r >= 0 || r == -14) /* EFAULT */
    return r == (long)n;
  unsigned long at = (unsigned long)from, end = at + n;
  for (unsigned long word = at & ~7ul; word < end; word += 8)
    if (sys6(SYS_rt_sigprocmask, -1, (long)word, 0, 8, 0, 0) != -22) /* EINVAL */
      return 0;
  for (unsigned long i = 0; i < n; i++)
    ((char *)to)[i] = ((const char *)from)[i];
  return 1;
}

#endif
