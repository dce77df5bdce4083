// The kernel, asked without a C library: the audit library has none, as it would be a second one in every process.

#ifndef CISTERN_AUDIT_SYS_H
#define CISTERN_AUDIT_SYS_H

#include <stdint.h>

#include "kernel.h"

#if defined(__x86_64__) && defined(__linux__)

enum { SYS_close = 3, SYS_mmap = 9, SYS_mprotect = 10, SYS_madvise = 28, SYS_read = 0, SYS_getppid = 110, SYS_gettid = 186,
	SYS_clock_gettime = 228, SYS_openat = 257, SYS_readlinkat = 267, SYS_execve = 59, SYS_kill = 62 };
enum { ADDRESS_BITS = 47 };

#elif defined(__aarch64__) && defined(__linux__)

enum { SYS_close = 57, SYS_mmap = 222, SYS_mprotect = 226, SYS_madvise = 233, SYS_read = 63, SYS_getppid = 173, SYS_gettid = 178,
	SYS_clock_gettime = 113, SYS_openat = 56, SYS_readlinkat = 78, SYS_execve = 221, SYS_kill = 129 };
enum { ADDRESS_BITS = 48 };

#else
#error "the audit library is for Linux on x86-64 and on aarch64"
#endif

#define sys0(n) sys6(n, 0, 0, 0, 0, 0, 0)
#define sys1(n, a) sys6(n, (long)(a), 0, 0, 0, 0, 0)
#define sys2(n, a, b) sys6(n, (long)(a), (long)(b), 0, 0, 0, 0)
#define sys3(n, a, b, c) sys6(n, (long)(a), (long)(b), (long)(c), 0, 0, 0)

#endif
