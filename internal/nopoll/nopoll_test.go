package nopoll

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

func TestFiles(t *testing.T) {
	name := filepath.Join(t.TempDir(), "x")
	f, err := OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o640)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString("text"); err != nil {
		t.Error(err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	if text, err := ReadFile(name); err != nil || string(text) != "text" {
		t.Errorf("%q, %v", text, err)
	}
	if st, err := os.Stat(name); err != nil || runtime.GOOS != "windows" && st.Mode().Perm()&^0o640 != 0 {
		t.Errorf("%v, %v", st, err)
	}
	_, err = OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o640)
	if !errors.Is(err, os.ErrExist) || !strings.Contains(err.Error(), name) {
		t.Error(err)
	}
	if _, err := ReadFile(name + ".none"); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// TestKept: a file that stays open is read and written as long as its descriptor is the file's, and nothing else is.
func TestKept(t *testing.T) {
	dir := t.TempDir()
	f, err := TempFile(dir, "x")
	if err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) != 0 {
		t.Errorf("it has a name: %v", left)
	}
	b := make([]byte, 5)
	if _, err := f.WriteAt([]byte("contents"), 100); err != nil {
		t.Fatal(err)
	}
	if _, err := f.ReadAt(b, 103); err != nil || string(b) != "tents" {
		t.Errorf("%q, %v", b, err)
	}
	if _, err := f.ReadAt(b, 105); err == nil {
		t.Error("it was read beyond its end")
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

// In a child of TestNoPoller this is all that happens, as package testing polls.
func init() {
	if os.Getenv("NOPOLL_CHILD") == "" {
		return
	}
	fail := func(words ...any) {
		fmt.Println(words...)
		os.Exit(1)
	}
	if polls() {
		fail("the runtime polls from the start")
	}
	if _, err := ReadFile("/proc/self/cmdline"); err != nil || polls() {
		fail("polls after this package has read a file:", err)
	}
	if _, err := os.ReadFile("/proc/self/cmdline"); err != nil || !polls() {
		fail("package os does not poll, so this package is for nothing:", err)
	}
	os.Exit(0)
}

// polls reports whether the process has an epoll descriptor.
func polls() bool {
	for fd := range 64 {
		if to, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd)); err == nil && strings.Contains(to, "eventpoll") {
			return true
		}
	}
	return false
}

func TestNoPoller(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("looks into /proc")
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "NOPOLL_CHILD=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
