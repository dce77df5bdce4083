package main

import (
	"bytes"
	"fmt"
	"os"
	"os/signal"
	"strings"
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

// catchSignals has this process outlive what ends the program, which it may be sent before there is a program.
func catchSignals() chan os.Signal {
	ch := make(chan os.Signal, 16)
	signal.Notify(ch, heeded(syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGALRM)...)
	return ch
}

// passSignals hands what this process is sent to the program, which has been started, until the function that it returns is
// called. What a terminal sends reaches the program by itself.
func (p *child) passSignals(ch chan os.Signal) func() {
	done := make(chan struct{})
	go func() {
		stopped := false
		for {
			select {
			case s := <-ch:
				if p.ended() { // only others are waited for, until a signal
					if s != syscall.SIGUSR1 && s != syscall.SIGUSR2 && s != syscall.SIGALRM && !stopped {
						stopped = true
						close(p.stop)
					}
					continue
				}
				if (s == syscall.SIGINT || s == syscall.SIGQUIT) && foreground() {
					continue
				}
				_ = p.cmd.Process.Signal(s) // it may have ended
			case <-done:
				return
			}
		}
	}()
	return func() {
		signal.Stop(ch)
		close(done)
	}
}

// ended reports whether the program takes no signal any more, also where it was not waited for yet: what comes in
// that moment would be lost.
func (p *child) ended() bool {
	select {
	case <-p.over:
		return true
	default:
	}
	var info unix.Siginfo
	for {
		switch err := unix.Waitid(unix.P_PID, p.cmd.Process.Pid, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil); err {
		case nil:
			return info.Signo != 0
		case unix.EINTR:
		default:
			return err == unix.ECHILD
		}
	}
}

// adopt makes this process the parent of those that a process below it leaves behind, so that they can be waited for.
func adopt() error { return unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }

// waitForOthers returns when no process is left that the program started, or with the first signal.
func (t *tracing) waitForOthers() {
	none := make(chan struct{})
	go func() {
		for {
			if _, err := unix.Wait4(-1, nil, 0, nil); err != nil && err != unix.EINTR {
				close(none) // ECHILD
				return
			}
		}
	}()
	select {
	case <-none:
	case <-t.stop:
	}
}

// running reports whether a process still runs, and is that program.
func running(pid uint32, program string) bool {
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil || program == "" || !strings.HasSuffix(exe, program) { // of a long name the end is known
		return false
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, state, _ := strings.Cut(string(stat[bytes.LastIndexByte(stat, ')')+1:]), " ")
	return !strings.HasPrefix(state, "Z")
}

// below reports whether the process with this PID is one that this process started, or one of those that it started.
func below(pid uint32) bool {
	self := uint32(os.Getpid())
	for range 100 {
		if pid == self {
			return true
		}
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return false
		}
		var state string
		if _, err := fmt.Sscan(string(stat[bytes.LastIndexByte(stat, ')')+1:]), &state, &pid); err != nil {
			return false
		}
	}
	return false
}

// hostNumbers reports whether processes have the numbers here that the driver knows them by.
func hostNumbers() bool {
	const initial = "pid:[4026531836]" // the namespace of the first process, in all versions of Linux
	ns, err := os.Readlink("/proc/self/ns/pid")
	return err == nil && ns == initial
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
