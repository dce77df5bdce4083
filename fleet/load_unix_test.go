//go:build unix

package fleet

import (
	"context"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A pipe among the summaries is an error; no reader waits for what comes out of it.
func TestLoadPipe(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mkfifo(filepath.Join(dir, "rank00000"+Ending), 0o600); err != nil {
		t.Fatal(err)
	}
	loaded := make(chan *Folder)
	go func() {
		f, err := Load(context.Background(), dir)
		if err != nil {
			t.Error(err)
		}
		loaded <- f
	}()
	select {
	case f := <-loaded:
		if len(f.Bad) != 1 || !strings.Contains(f.Bad[0], "not a file") {
			t.Errorf("%q", f.Bad)
		}
	case <-time.After(time.Minute):
		t.Fatal("Load waits for the pipe")
	}
}
