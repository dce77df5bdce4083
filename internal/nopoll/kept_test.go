//go:build unix

package nopoll

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// TestKeptGone: where the program closed the descriptor, the file that has the number then is left alone, also one that would get
// the same inode.
func TestKeptGone(t *testing.T) {
	dir := t.TempDir()
	for range 20 {
		f, err := TempFile(dir, "x")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt([]byte("contents"), 0); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Close(f.fd); err != nil {
			t.Fatal(err)
		}
		name := filepath.Join(dir, "own")
		own, err := syscall.Open(name, syscall.O_RDWR|syscall.O_CREAT|syscall.O_EXCL|syscall.O_CLOEXEC, 0o600)
		if err != nil || own != f.fd {
			t.Fatal(own, f.fd, err)
		}
		if _, err := syscall.Write(own, []byte("the program's")); err != nil {
			t.Fatal(err)
		}
		var b [8]byte
		_, read := f.ReadAt(b[:], 0)
		_, written := f.WriteAt([]byte("x"), 0)
		_, added := f.Write([]byte("x"))
		closed := f.Close()
		for what, err := range map[string]error{"read": read, "write": written, "append": added, "close": closed} {
			if !errors.Is(err, ErrGone) {
				t.Errorf("%s: %v", what, err)
			}
		}
		if err := syscall.Close(own); err != nil {
			t.Errorf("the program's file: %v", err)
		}
		if text, err := os.ReadFile(name); err != nil || string(text) != "the program's" {
			t.Errorf("%q, %v", text, err)
		}
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
	}
}
