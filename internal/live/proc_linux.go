package live

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// What /proc says of a process, whose folder dir is there.

// readFile is os.ReadFile for /proc, without the runtime's poller (see Page.wait).
func readFile(name string) ([]byte, error) {
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	defer unix.Close(fd)
	var out []byte
	for {
		out = slices.Grow(out, 4<<10)
		n, err := unix.Read(fd, out[len(out):cap(out)])
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return nil, &os.PathError{Op: "read", Path: name, Err: err}
		case n <= 0:
			return out, nil
		}
		out = out[:len(out)+n]
	}
}

// startOf is when it started. A zombie has ended.
func startOf(dir string) (uint64, error) {
	text, err := readFile(dir + "/stat")
	if err != nil {
		return 0, err
	}
	// The name is in parentheses, and may contain any.
	i := bytes.LastIndexByte(text, ')')
	f := strings.Fields(string(text[i+1:]))
	const state, threads, start = 0, 20 - 3, 22 - 3
	if i < 0 || len(f) <= start {
		return 0, errors.New(dir + "/stat: not as the kernel writes it")
	}
	// One whose first thread has ended looks like a zombie as long as others go on.
	if (f[state] == "Z" || f[state] == "X") && (f[threads] == "0" || f[threads] == "1") {
		return 0, ErrEnded
	}
	return strconv.ParseUint(f[start], 10, 64)
}

// innerPID is the number by which it knows itself: the last one in its own PID namespace.
func innerPID(dir string) (int, error) {
	text, err := readFile(dir + "/status")
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

// Ended reports whether the process has ended that had this PID and started then, as Of says it. A zombie has.
func Ended(pid int, start uint64) bool {
	now, err := startOf(fmt.Sprintf("/proc/%d", pid))
	if err != nil {
		return errors.Is(err, ErrEnded) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH)
	}
	return now != start
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
	if name, err := readFile(dir + "/comm"); err == nil {
		p.Name = strings.TrimSuffix(string(name), "\n")
	}
	if line, err := readFile(dir + "/cmdline"); err == nil && len(line) > 0 {
		p.Args = strings.Split(strings.TrimSuffix(string(line), "\x00"), "\x00")
	}
	return p, nil
}
