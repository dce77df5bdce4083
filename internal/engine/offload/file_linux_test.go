package offload

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/cistern-gpu/cistern/internal/nopoll"
	"github.com/cistern-gpu/cistern/internal/testkit"
)

// descriptorOf is the descriptor of the file with contents.
func descriptorOf(t *testing.T) (fd int) {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		if name, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.Contains(name, "cistern-paused-") {
			fd, _ = strconv.Atoi(e.Name())
			return fd
		}
	}
	t.Fatal("no file with contents is open")
	return 0
}

// Whatever happens to the file, contents that are not the ones that were written are an error, and where they are intact they
// are loaded.
func TestFileIsNotTheSame(t *testing.T) {
	const size = 3 * mib
	for name, c := range map[string]struct {
		change func(t *testing.T, fd int) (undo func())
		want   error // nil: any
	}{
		"another file at the descriptor": {func(t *testing.T, fd int) func() {
			own, err := syscall.Dup(fd)
			if err != nil {
				t.Fatal(err)
			}
			other, err := os.Create(filepath.Join(t.TempDir(), "other"))
			if err != nil {
				t.Fatal(err)
			}
			defer other.Close()
			if err := syscall.Dup3(int(other.Fd()), fd, 0); err != nil {
				t.Fatal(err)
			}
			return func() {
				if err := syscall.Dup3(own, fd, 0); err != nil {
					t.Fatal(err)
				}
				syscall.Close(own)
			}
		}, nopoll.ErrGone},
		"a byte that another program wrote": {func(t *testing.T, fd int) func() {
			var b [1]byte
			if _, err := syscall.Pread(fd, b[:], size/2); err != nil {
				t.Fatal(err)
			}
			b[0] ^= 1
			write := func() {
				if _, err := syscall.Pwrite(fd, b[:], size/2); err != nil {
					t.Fatal(err)
				}
				b[0] ^= 1
			}
			write()
			return write
		}, errChanged},
		"a file that was cut off": {func(t *testing.T, fd int) func() {
			b := make([]byte, size)
			if _, err := syscall.Pread(fd, b, 0); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Ftruncate(fd, size-1); err != nil {
				t.Fatal(err)
			}
			return func() {
				if _, err := syscall.Pwrite(fd, b, 0); err != nil {
					t.Fatal(err)
				}
			}
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			before := testkit.Descriptors(t)
			w := newWorld(t, false)
			w.add(size)
			testkit.Must(w.t, w.save(true))
			w.wipe()
			undo := c.change(t, descriptorOf(t))
			if err := w.load(); err == nil || c.want != nil && !errors.Is(err, c.want) || w.store.Unsure() {
				t.Errorf("%v, unsure %v", err, w.store.Unsure())
			}
			undo()
			testkit.Must(w.t, w.load())
			w.check()
			w.drop()
			w.end()
			if n := testkit.Descriptors(t); n != before {
				t.Errorf("%d descriptors stay", n-before)
			}
		})
	}
}

// saveFails saves to a file that has too little room, and once more where there is enough.
func saveFails(t *testing.T, want error, enough func()) {
	t.Helper()
	before := testkit.Descriptors(t)
	w := newWorld(t, false)
	w.add(8*mib, 40*mib)
	if err := w.save(true); !errors.Is(err, want) || w.store.Unsure() {
		t.Errorf("%v, unsure %v", err, w.store.Unsure())
	}
	w.check()
	w.drop()
	if n := testkit.Descriptors(t); n != before {
		t.Errorf("%d descriptors stay", n-before)
	}
	enough()
	testkit.Must(w.t, w.save(true))
	w.wipe()
	testkit.Must(w.t, w.load())
	w.check()
	w.drop()
	w.end()
}

func TestFileSizeLimit(t *testing.T) {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &limit); err != nil {
		t.Fatal(err)
	}
	set := func(bytes uint64) {
		if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: bytes, Max: limit.Max}); err != nil {
			t.Fatal(err)
		}
	}
	defer set(limit.Cur)
	set(20 * mib)
	saveFails(t, syscall.EFBIG, func() { set(limit.Cur) })
}

// A file on a full disk: a tmpfs of the test's own, which a user namespace allows.
func TestFullDisk(t *testing.T) {
	const variable = "CISTERN_TEST_FULL_DISK"
	if dir := os.Getenv(variable); dir != "" {
		if err := syscall.Mount("none", dir, "tmpfs", 0, "size=20m"); err != nil {
			cannot(t, "no tmpfs: ", err)
		}
		t.Setenv("TMPDIR", dir)
		saveFails(t, syscall.ENOSPC, func() {
			if err := syscall.Mount("none", dir, "tmpfs", syscall.MS_REMOUNT, "size=200m"); err != nil {
				t.Fatal(err)
			}
		})
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), variable+"="+t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}, GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}}
	out, err := cmd.CombinedOutput()
	if _, ran := errors.AsType[*exec.ExitError](err); err != nil && !ran {
		cannot(t, "no user namespaces: ", err)
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if strings.Contains(string(out), "--- SKIP") {
		cannot(t, string(out))
	}
}

// cannot skips a test that this machine cannot run; in CI that is a failure.
func cannot(t *testing.T, why ...any) {
	t.Helper()
	if os.Getenv("CISTERN_TOOLS_TEST") == "1" {
		t.Fatal(why...)
	}
	t.Skip(why...)
}
