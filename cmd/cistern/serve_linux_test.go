package main

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// serving is a running `cistern serve`.
type serving struct {
	t   *testing.T
	cmd *exec.Cmd
	log *lines
}

// lines is what a program wrote so far.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// soon waits for what has to come.
func soon(t *testing.T, what string, so func() bool) {
	t.Helper()
	for end := time.Now().Add(longest); !so(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it did not come to be that %s", what)
		}
	}
}

// shortFolder is one in which the path of a socket is short enough.
func shortFolder(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "serve")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func (s *serving) start(vars []string, files []*os.File, args ...string) {
	s.t.Helper()
	// The shell names the process to itself, as systemd does.
	s.cmd = exec.Command("sh", append([]string{"-c", `LISTEN_PID=$$ exec "$0" "$@"`, os.Args[0], "serve"}, args...)...)
	s.cmd.Env = append(append(os.Environ(), "CISTERN_TEST_AS_COMMAND=1"), vars...)
	s.cmd.ExtraFiles = files
	s.log = &lines{}
	s.cmd.Stderr = io.MultiWriter(s.log, s.t.Output())
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
	})
	soon(s.t, "the broker serves", func() bool { return strings.Contains(s.log.String(), "the broker serves") })
}

// ends sends a signal, and waits for the end with this status.
func (s *serving) ends(sig syscall.Signal, status int) {
	s.t.Helper()
	if err := s.cmd.Process.Signal(sig); err != nil {
		s.t.Fatal(err)
	}
	err := s.cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == status || err == nil && status == 0 {
		return
	}
	s.t.Errorf("%v, want status %d", err, status)
}

// TestServe: one broker at a place, found by the other commands; rules by command and from a file that is read again; a clean end, and
// a start after an unclean one.
func TestServe(t *testing.T) {
	dir := shortFolder(t)
	socket, policy := filepath.Join(dir, "run", "s"), filepath.Join(dir, "policy")
	write := func(text string) {
		if err := os.WriteFile(policy, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("[rule]\nmax = 4GiB\n")
	s := &serving{t: t}
	s.start(nil, nil, "--socket", socket, "--policy", policy)
	node := func(args ...string) (string, string, int) {
		return asCommand(t, nil, append(args, "--socket", socket)...)
	}
	if out, errs, code := node("node", "ls"); code != 0 || out != "no process is connected\n" {
		t.Error(out, errs, code)
	}
	if out, errs, code := node("node", "ls", "--json"); code != 0 || !strings.Contains(out, `"clients": []`) {
		t.Error(out, errs, code)
	}
	if out, errs, code := node("node", "set", "label=x", "max=1GiB"); code != 0 {
		t.Error(out, errs, code)
	}
	if _, errs, code := node("node", "set", "label=x", "maxi=1GiB"); code != exitBad || !strings.Contains(errs, `unknown key "maxi": did you mean max?`) {
		t.Error(errs, code)
	}
	if _, errs, code := node("serve"); code != exitBad || !strings.Contains(errs, "another broker serves at "+socket) {
		t.Error(errs, code)
	}
	write("[rule]\nmax = 4GiB\n[rule]\nweight = 0\n")
	soon(t, "the file was read", func() bool { return strings.Contains(s.log.String(), "line 4: weight = 0: expected a number") })
	write("[rule]\nmax = 5GiB\n")
	soon(t, "the file was read", func() bool { return strings.Contains(s.log.String(), "policy read") })
	for n := 2; n < 4; n++ {
		if err := s.cmd.Process.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		soon(t, "the file was read again", func() bool { return strings.Count(s.log.String(), "policy read") >= n })
	}
	s.ends(syscall.SIGTERM, 0)
	if _, err := os.Lstat(socket); !os.IsNotExist(err) {
		t.Errorf("the socket is left behind: %v", err)
	}
	if _, errs, code := node("node", "ls"); code != exitBad || !strings.Contains(errs, "no broker answers at "+socket) {
		t.Error(errs, code)
	}
	s.start(nil, nil, "--socket", socket)
	if err := s.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = s.cmd.Wait()
	s.start(nil, nil, "--socket", socket, "--dry-run", "--log", "json")
	if !strings.Contains(s.log.String(), `"dry_run":true`) {
		t.Error(s.log.String())
	}
	s.ends(syscall.SIGINT, 0)
}

// TestServeSystemd: the broker takes the socket that systemd passes, and says when it is ready, that it lives, and that it ends.
func TestServeSystemd(t *testing.T) {
	dir := shortFolder(t)
	socket, notify := filepath.Join(dir, "s"), filepath.Join(dir, "n")
	said, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: notify, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer said.Close()
	heard := make(chan string, 1000)
	go func() { // all the time: a queue of ten messages is full, and the broker's last one lost
		b := make([]byte, 1000)
		for {
			n, err := said.Read(b)
			if err != nil {
				close(heard)
				return
			}
			heard <- string(b[:n])
		}
	}()
	next := func(want string) {
		t.Helper()
		late := time.After(longest)
		for {
			select {
			case got, open := <-heard:
				if got == want {
					return
				}
				if !open {
					t.Fatalf("waiting for %s: the socket was closed", want)
				}
			case <-late:
				t.Fatalf("waiting for %s", want)
			}
		}
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	f, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	l.SetUnlinkOnClose(false)
	l.Close()
	s := &serving{t: t}
	s.start([]string{"LISTEN_FDS=1", "NOTIFY_SOCKET=" + notify, "WATCHDOG_USEC=100000"}, []*os.File{f})
	next("READY=1")
	next("WATCHDOG=1")
	if out, errs, code := asCommand(t, nil, "node", "ls", "--socket", socket); code != 0 {
		t.Error(out, errs, code)
	}
	s.ends(syscall.SIGTERM, 0)
	next("STOPPING=1")
	if _, err := os.Lstat(socket); err != nil {
		t.Errorf("the socket is systemd's: %v", err)
	}
}

// Bad usage is one line.
func TestServeRefuses(t *testing.T) {
	dir := shortFolder(t)
	bad := filepath.Join(dir, "bad")
	if err := os.WriteFile(bad, []byte("[rule]\nmin = much\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	for want, args := range map[string][]string{
		"expected an absolute path":          {"serve", "--socket", "x"},
		"choose text or json":                {"serve", "--log", "xml"},
		bad + ": line 2: min = much":         {"serve", "--policy", bad, "--socket", filepath.Join(dir, "s")},
		"no such file":                       {"serve", "--policy", bad + "2", "--socket", filepath.Join(dir, "s")},
		"at most 107 bytes":                  {"serve", "--socket", "/" + strings.Repeat("x", 200)},
		"address already in use":             {"serve", "--socket", filepath.Join(dir, "fifo")},
		"expected KEY=VALUE":                 {"node", "set"},
		`a value has no spaces here`:         {"node", "set", "name=a b"},
		"no broker answers at " + dir + "/x": {"node", "ls", "--socket", dir + "/x"},
	} {
		if _, errs, code := asCommand(t, nil, args...); code != exitBad || !strings.Contains(errs, want) || strings.Count(errs, "\n") != 1 {
			t.Errorf("%v: %q, %d, want %q", args, errs, code, want)
		}
	}
}
