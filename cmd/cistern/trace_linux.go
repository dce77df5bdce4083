package main

import (
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// monotonic is the clock that the audit library reads, in ns.
func monotonic() int64 {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) != nil {
		return 0
	}
	return ts.Nano()
}

// passSignals has this process outlive what ends the program, and hands on what it is sent, until the function that it
// returns is called. What a terminal sends reaches the program by itself.
func (t *tracing) passSignals() func() {
	// The program starts with what was not ignored when this process did.
	signal.Reset(syscall.SIGPIPE)
	ch := make(chan os.Signal, 16)
	done := make(chan struct{})
	signal.Notify(ch, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGALRM)
	go func() {
		for {
			select {
			case s := <-ch:
				if (s == syscall.SIGINT || s == syscall.SIGQUIT) && foreground() {
					continue
				}
				if p := t.cmd.Process; p != nil {
					_ = p.Signal(s) // it may have ended
				}
			case <-done:
				return
			}
		}
	}()
	return func() {
		signal.Stop(ch)
		close(done)
		signal.Ignore(syscall.SIGPIPE)
	}
}

// foreground reports whether this process is in the group that its terminal sends signals to.
func foreground() bool {
	tty, err := os.OpenFile("/dev/tty", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		return false
	}
	defer tty.Close()
	group, err := unix.IoctlGetInt(int(tty.Fd()), unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}

// exitStatus is that of a program as shells say it.
func exitStatus(s *os.ProcessState) int {
	if w, ok := s.Sys().(syscall.WaitStatus); ok && w.Signaled() {
		return 128 + int(w.Signal())
	}
	return s.ExitCode()
}
