package resource

import "syscall"

// threadID is the number of the operating system's thread.
func threadID() int { return syscall.Gettid() }
