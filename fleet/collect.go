package fleet

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/cistern-gpu/cistern/internal/outfile"
	"github.com/cistern-gpu/cistern/recording/open"
)

// CollectOptions say how files are collected.
type CollectOptions struct {
	Move      bool // remove what was copied of processes that ended
	Summaries bool // and no recordings
	AsIs      bool // do not read recordings for what a process could only estimate
	// Warn is called with what went wrong with one process; the others are still collected.
	Warn func(error)
}

// Collect copies the files of all processes to another folder, the summary last, and is how many processes are there.
func (f *Folder) Collect(ctx context.Context, to string, o CollectOptions) (n int, err error) {
	for _, s := range f.Summaries {
		if err := ctx.Err(); err != nil {
			return n, err
		}
		if err := s.collect(to, o); err != nil {
			o.Warn(err)
			continue
		}
		n++
	}
	return n, nil
}

func (s *Summary) collect(to string, o CollectOptions) error {
	from := filepath.Dir(s.Path)
	same, err := samePlace(from, to)
	if err != nil {
		return err
	}
	var files []string
	for _, name := range s.files() {
		if st, err := os.Stat(filepath.Join(from, name)); err == nil && st.Mode().IsRegular() {
			files = append(files, name)
		}
	}
	if !o.AsIs {
		s.readExact(from, o.Warn)
	}
	if same {
		return s.Write(s.Path)
	}
	if !o.Summaries {
		for _, name := range files {
			if err := copyFile(filepath.Join(from, name), filepath.Join(to, name)); err != nil {
				return err
			}
		}
	}
	if err := s.Write(filepath.Join(to, filepath.Base(s.Path))); err != nil {
		return err
	}
	if !o.Move || s.Ended == EndNone {
		return nil
	}
	if !o.Summaries {
		for _, name := range files {
			if err := os.Remove(filepath.Join(from, name)); err != nil {
				return err
			}
		}
	}
	return os.Remove(s.Path)
}

// files are the recordings that a summary names, each once. Names with a folder are none.
func (s *Summary) files() (names []string) {
	seen := map[string]bool{"": true}
	take := func(name string) {
		if !seen[name] && name == filepath.Base(name) {
			seen[name] = true
			names = append(names, name)
		}
	}
	for _, name := range s.Recordings {
		take(name)
	}
	for i := range s.Devices {
		for k := range s.Devices[i].Failures {
			take(s.Devices[i].Failures[k].Recording)
		}
	}
	return names
}

// readExact takes from the recordings what the process could only estimate.
func (s *Summary) readExact(dir string, warn func(error)) {
	for _, name := range s.Recordings {
		if name != filepath.Base(name) {
			continue
		}
		path := filepath.Join(dir, name)
		if st, err := os.Stat(path); err != nil || !st.Mode().IsRegular() {
			continue // it may have been rotated out
		}
		f, err := open.File(path)
		if err != nil {
			warn(err)
			continue
		}
		for _, t := range f.Traces {
			for i := range s.Devices {
				if s.Devices[i].Ordinal == t.Device {
					s.Devices[i].Series.Exact(t)
				}
			}
		}
	}
}

func samePlace(a, b string) (bool, error) {
	x, err := os.Stat(a)
	if err != nil {
		return false, err
	}
	y, err := os.Stat(b)
	if err != nil {
		return false, err
	}
	return os.SameFile(x, y), nil
}

// copyFile copies a file, whole or not at all. One of the same size and time is there already.
func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	st, err := in.Stat()
	if err != nil {
		return err
	}
	if there, err := os.Stat(to); err == nil && there.Size() == st.Size() && there.ModTime().Equal(st.ModTime()) {
		return nil
	}
	out, err := outfile.Create(to, outfile.Private)
	if err != nil {
		return err
	}
	defer out.Abandon()
	if _, err := io.Copy(out, in); err != nil {
		return fmt.Errorf("%s: %w", to, err)
	}
	if err := out.Commit(); err != nil {
		return err
	}
	return os.Chtimes(to, st.ModTime(), st.ModTime())
}
