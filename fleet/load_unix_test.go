//go:build unix

package fleet

import (
	"context"
	"os"
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

// A folder that cannot be read, here as its path is too long, costs the others nothing.
func TestLoadUnreadableFolder(t *testing.T) {
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if err := root.MkdirAll(strings.Repeat(strings.Repeat("d", 250)+"/", 20), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := sample().Write(filepath.Join(dir, "rank00003"+Ending)); err != nil {
		t.Fatal(err)
	}
	f, err := Load(t.Context(), dir)
	if err != nil || len(f.Summaries) != 1 || len(f.Bad) != 1 {
		t.Errorf("%v, %+v", err, f)
	}
	var warned []error
	if paths, err := Find(func(err error) { warned = append(warned, err) }, dir); err != nil || len(paths) != 1 || len(warned) != 1 {
		t.Errorf("%v, %q, %v", err, paths, warned)
	}
	if _, err := Load(t.Context(), filepath.Join(dir, "none")); err == nil {
		t.Error("a folder that is not there is no error")
	}
}
