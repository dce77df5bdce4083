package live

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// A program that closed the page's descriptor and has a file of its own under the number keeps the locks of that file: they go where a
// descriptor of the file is closed.
func TestDescriptorOfTheProgram(t *testing.T) {
	page, err := PublishUnlisted(Process{}, func(into []Device) []Device { return into })
	if err != nil {
		t.Fatal(err)
	}
	defer page.Close()
	name := filepath.Join(t.TempDir(), "x")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	other, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	page.mu.Lock()
	fd := page.fd
	page.mu.Unlock()
	if err := unix.Dup3(int(f.Fd()), fd, unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	if err := unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Len: 1}); err != nil {
		t.Fatal(err)
	}
	if d, err := page.Descriptor(); err == nil { // the page is another already
		unix.Close(d)
	}
	lock := unix.Flock_t{Type: unix.F_WRLCK, Len: 1}
	if err := unix.FcntlFlock(other.Fd(), unix.F_OFD_GETLK, &lock); err != nil || lock.Type == unix.F_UNLCK {
		t.Errorf("the program's lock is gone (%v)", err)
	}
	unix.Close(fd)
}
