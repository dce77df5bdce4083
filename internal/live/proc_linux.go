package live

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// What /proc says of a process, whose folder dir is there.

// startOf is when it started. A zombie has ended.
func startOf(dir string) (uint64, error) {
	text, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return 0, err
	}
	// The name is in parentheses, and may contain any.
	i := bytes.LastIndexByte(text, ')')
	f := strings.Fields(string(text[i+1:]))
	const state, start = 0, 22 - 3
	if i < 0 || len(f) <= start {
		return 0, errors.New(dir + "/stat: not as the kernel writes it")
	}
	if f[state] == "Z" || f[state] == "X" {
		return 0, ErrEnded
	}
	return strconv.ParseUint(f[start], 10, 64)
}

// innerPID is the number by which it knows itself: the last one in its own PID namespace.
func innerPID(dir string) (int, error) {
	text, err := os.ReadFile(dir + "/status")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "NSpid:"); ok {
			f := strings.Fields(rest)
			if len(f) == 0 {
				break
			}
			return strconv.Atoi(f[len(f)-1])
		}
	}
	return strconv.Atoi(filepath.Base(dir)) // a kernel without PID namespaces
}

// Of describes a process by what /proc says of it, pid 0 this one: its PID, start, name and command line. The error is that
// there is no such process, or none that may be looked at.
func Of(pid int) (Process, error) {
	dir := "/proc/self"
	if pid != 0 {
		dir = fmt.Sprintf("/proc/%d", pid)
	} else {
		pid = os.Getpid()
	}
	start, err := startOf(dir)
	if err != nil {
		return Process{}, fmt.Errorf("process %d: %w", pid, err)
	}
	p := Process{PID: pid, Start: start}
	if name, err := os.ReadFile(dir + "/comm"); err == nil {
		p.Name = strings.TrimSuffix(string(name), "\n")
	}
	if line, err := os.ReadFile(dir + "/cmdline"); err == nil && len(line) > 0 {
		p.Args = strings.Split(strings.TrimSuffix(string(line), "\x00"), "\x00")
	}
	return p, nil
}
