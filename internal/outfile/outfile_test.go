//go:build unix

package outfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
)

// put writes text to path, whole.
func put(t *testing.T, path, text string, mode fs.FileMode) error {
	t.Helper()
	f, err := Create(path, mode)
	if err != nil {
		return err
	}
	defer f.Abandon()
	if _, err := f.Write([]byte(text)); err != nil {
		return err
	}
	return f.Commit()
}

func contains(t *testing.T, path, want string) {
	t.Helper()
	if got, err := os.ReadFile(path); err != nil || string(got) != want {
		t.Errorf("%s holds %q, %v; want %q", path, got, err, want)
	}
}

// alone checks that a folder has these files and no other.
func alone(t *testing.T, folder string, names ...string) {
	t.Helper()
	entries, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != len(names) {
		t.Errorf("%s has %v, want %v", folder, entries, names)
	}
}

func TestModes(t *testing.T) {
	for _, c := range []struct {
		umask    int
		mode     fs.FileMode
		existing fs.FileMode // 0: there is no file
		want     fs.FileMode
	}{
		{umask: 0o022, mode: Shared, want: 0o644},
		{umask: 0o002, mode: Shared, want: 0o664},
		{umask: 0o077, mode: Shared, want: 0o600},
		{umask: 0o022, mode: Private, want: 0o600},
		{umask: 0o000, mode: Private, want: 0o600},
		{umask: 0o277, mode: Shared, want: 0o400},
		{umask: 0o022, mode: Private, existing: 0o664, want: 0o664},
		{umask: 0o022, mode: Shared, existing: 0o600, want: 0o600},
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, "file")
		if c.existing != 0 {
			if err := errors.Join(os.WriteFile(path, nil, c.existing), os.Chmod(path, c.existing)); err != nil {
				t.Fatal(err)
			}
		}
		old := syscall.Umask(c.umask)
		err := put(t, path, "new", c.mode)
		syscall.Umask(old)
		if err != nil {
			t.Fatal(err)
		}
		st, err := os.Stat(path)
		if err != nil || st.Mode() != c.want {
			t.Errorf("%+v: mode %v, %v", c, st.Mode(), err)
		}
		alone(t, dir, "file")
	}
}

// TestLinks: a symbolic link stays, and its target is written, through several links and where the last leads nowhere yet.
func TestLinks(t *testing.T) {
	for _, exists := range []bool{true, false} {
		dir := t.TempDir()
		deep := filepath.Join(dir, "a", "b")
		target := filepath.Join(dir, "a", "target")
		if err := errors.Join(os.MkdirAll(deep, 0o755), os.Symlink("../target", filepath.Join(deep, "near")),
			os.Symlink(deep, filepath.Join(dir, "folder")), os.Symlink("folder/near", filepath.Join(dir, "link"))); err != nil {
			t.Fatal(err)
		}
		if exists {
			if err := os.WriteFile(target, []byte("old"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		link := filepath.Join(dir, "link")
		if err := put(t, link, "new", Shared); err != nil {
			t.Fatal(err)
		}
		contains(t, target, "new")
		for _, l := range []string{link, filepath.Join(deep, "near")} {
			if st, err := os.Lstat(l); err != nil || st.Mode()&fs.ModeSymlink == 0 {
				t.Errorf("%s is no link any more: %v, %v", l, st, err)
			}
		}
		alone(t, dir, "a", "folder", "link")
	}
	dir := t.TempDir()
	loop := filepath.Join(dir, "loop")
	if err := os.Symlink("loop", loop); err != nil {
		t.Fatal(err)
	}
	if err := put(t, loop, "new", Shared); err == nil {
		t.Error("a link to itself was written")
	}
	if err := os.Symlink(filepath.Join(dir, "no", "file"), filepath.Join(dir, "far")); err != nil {
		t.Fatal(err)
	}
	if err := put(t, filepath.Join(dir, "far"), "new", Shared); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a link into a folder that is not there: %v", err)
	}
	alone(t, dir, "loop", "far")
}

// TestInPlace: pipes, devices and open descriptors are written, not replaced.
func TestInPlace(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	reader, err := os.OpenFile(fifo, os.O_RDWR, 0) // so that opening it for writing does not wait
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	if err := put(t, fifo, "piped", Shared); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 5)
	if _, err := reader.Read(got); err != nil || string(got) != "piped" {
		t.Errorf("the pipe gave %q, %v", got, err)
	}
	if err := put(t, os.DevNull, "gone", Shared); err != nil {
		t.Error(err)
	}
	if st, err := os.Stat(os.DevNull); err != nil || st.Mode().IsRegular() {
		t.Errorf("%s became %v, %v", os.DevNull, st, err)
	}
	alone(t, dir, "fifo")

	// A shell's `{ echo before; cistern … -o /dev/fd/N; } N>file`.
	file, err := os.Create(filepath.Join(dir, "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if _, err := file.WriteString("before "); err != nil {
		t.Fatal(err)
	}
	if err := put(t, "/dev/fd/"+strconv.Itoa(int(file.Fd())), "after", Shared); err != nil {
		t.Fatal(err)
	}
	contains(t, file.Name(), "before after")
	now, _ := os.Stat(file.Name())
	if was, _ := file.Stat(); !os.SameFile(was, now) {
		t.Error("the file behind a descriptor was replaced")
	}
}

func TestAbandonAndFailure(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	if err := os.WriteFile(path, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := Create(path, Shared)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write([]byte("new")); err != nil {
		t.Fatal(err)
	}
	f.Abandon()
	f.Abandon()
	if _, err := f.Write([]byte("x")); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("a write after Abandon: %v", err)
	}
	if err := f.Commit(); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("Commit after Abandon: %v", err)
	}
	contains(t, path, "old")
	alone(t, dir, "file")
	if _, err := Create("", Shared); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no name: %v", err)
	}
}
