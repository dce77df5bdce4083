//go:build unix

package main

import (
	"os/signal"
	"runtime"
	"syscall"
)

// execve replaces the process. What is handled or ignored here is as it was when this process started.
func execve(path string, args, env []string) error {
	if runtime.GOOS != "linux" {
		return errNotLinux
	}
	signal.Reset()
	return syscall.Exec(path, args, env)
}
