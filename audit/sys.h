// The kernel, asked without a C library: the audit library has none, as it would be a second one in every process.

#ifndef CISTERN_AUDIT_SYS_H
#define CISTERN_AUDIT_SYS_H

#include <stdint.h>

#if defined(__x86_64__) && defined(__linux__)

enum { SYS_close = 3, SYS_mmap = 9, SYS_mprotect = 10, SYS_madvise = 28, SYS_read = 0, SYS_getpid = 39, SYS_getppid = 110, SYS_gettid = 186,
	SYS_clock_gettime = 228, SYS_openat = 257, SYS_readlinkat = 267, SYS_process_vm_readv = 310 };
enum { ADDRESS_BITS = 47 };

static inline long sys6(long n, long a, long b, long c, long d, long e, long f) {
	long r;
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;
	__asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
	return r;
}

#elif defined(__aarch64__) && defined(__linux__)

enum { SYS_close = 57, SYS_mmap = 222, SYS_mprotect = 226, SYS_madvise = 233, SYS_read = 63, SYS_getpid = 172, SYS_getppid = 173, SYS_gettid = 178,
	SYS_clock_gettime = 113, SYS_openat = 56, SYS_readlinkat = 78, SYS_process_vm_readv = 270 };
enum { ADDRESS_BITS = 48 };

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

#else
#error "the audit library is for Linux on x86-64 and on aarch64"
#endif

#define sys0(n) sys6(n, 0, 0, 0, 0, 0, 0)
#define sys1(n, a) sys6(n, (long)(a), 0, 0, 0, 0, 0)
#define sys2(n, a, b) sys6(n, (long)(a), (long)(b), 0, 0, 0, 0)
#define sys3(n, a, b, c) sys6(n, (long)(a), (long)(b), (long)(c), 0, 0, 0)

#endif
