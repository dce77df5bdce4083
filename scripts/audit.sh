#!/bin/sh
# Builds the audit library: scripts/audit.sh OUT. It has no C library, so nothing of it may call one, and no thread-local
# storage, which the stack protector would use.
set -eu
out=$1
cd "$(dirname "$0")/../audit"
case $(uname -sm) in
"Linux x86_64" | "Linux aarch64") ;;
*) echo "the audit library is for Linux on x86-64 and on aarch64; it was not built" >&2; exit 0 ;;
esac
case $(${CC:-cc} -dumpmachine) in
x86_64-*) arch=-fcf-protection=none ;;
*) arch=-mno-outline-atomics ;; # which would be calls into a library
esac
${CC:-cc} -std=gnu11 -O2 -Wall -Wextra -Werror -fPIC -shared -ffreestanding -fno-builtin -fno-omit-frame-pointer -fno-stack-protector \
  -fno-asynchronous-unwind-tables -fno-tree-loop-distribute-patterns $arch -nostdlib -s -I../cmd/libcistern \
  -Wl,-soname,libcistern_audit.so -Wl,--version-script=audit.map -Wl,-z,now,-z,relro,--no-undefined -o "$out" audit.c calls.c events.c threadstorage.c stacks.c unwind.c ../cmd/libcistern/pystack.c
