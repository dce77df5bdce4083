package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

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

// Collect copies the files of all processes to another folder, the summary last, and is how many processes are there. It reads and
// removes regular files below the folders that were loaded and no others, whoever writes there meanwhile: it may run as a user who may
// more than the one whose folder it is.
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

// files are those of a process: the root that they lie below, the folder in it, and the summary's own name.
type files struct {
	root          *os.Root
	folder, stem  string
	summary, path string
}

func (s *Summary) open() (*files, error) {
	folder := cmp.Or(s.Folder, filepath.Dir(s.Path))
	rel, err := filepath.Rel(folder, s.Path)
	if err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(folder)
	if err != nil {
		return nil, err
	}
	return &files{root: root, folder: filepath.Dir(rel), summary: filepath.Base(rel), stem: strings.TrimSuffix(filepath.Base(rel), Ending), path: s.Path}, nil
}

// regular opens a file that is no link, so that nothing outside of the folder is copied.
func (f *files) regular(name string) (*os.File, fs.FileInfo, error) {
	path := filepath.Join(f.folder, name)
	st, err := f.root.Lstat(path)
	if err != nil {
		return nil, nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, nil, fmt.Errorf("%s: not a file, but a link or something else", filepath.Join(filepath.Dir(f.path), name))
	}
	in, err := f.root.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe that takes its place does not make this wait
	if err != nil {
		return nil, nil, err
	}
	opened, err := in.Stat()
	if err == nil && !os.SameFile(st, opened) {
		err = fmt.Errorf("%s: another file took its place", filepath.Join(filepath.Dir(f.path), name))
	}
	if err != nil {
		in.Close()
		return nil, nil, err
	}
	return in, opened, nil
}

func (f *files) remove(name string) error { return f.root.Remove(filepath.Join(f.folder, name)) }

// collected is the name of a file where the files of many nodes are. That of a failed request (oom-PID-N.cistern) may be that of
// another process as well.
func (f *files) collected(name string) string {
	if strings.HasPrefix(name, f.stem+".") {
		return name
	}
	return f.stem + "." + name
}

func (s *Summary) collect(to string, o CollectOptions) error {
	f, err := s.open()
	if err != nil {
		return err
	}
	defer f.root.Close()
	// The summary was read by its path.
	own, _, err := f.regular(f.summary)
	if err != nil {
		return err
	}
	own.Close()
	same, err := samePlace(filepath.Dir(s.Path), to)
	if err != nil {
		return err
	}
	var copied []string
	if !o.Summaries && !same {
		if copied, err = s.copyRecordings(f, to); err != nil {
			return err
		}
	}
	if !o.AsIs {
		s.readExact(f, o.Warn)
	}
	if same {
		return s.Write(s.Path)
	}
	s.rename(f.collected)
	target := filepath.Join(to, f.summary)
	if err := noLink(target); err != nil {
		return err
	}
	if err := s.Write(target); err != nil {
		return err
	}
	if !o.Move || !s.gone() {
		return nil
	}
	for _, name := range copied {
		if err := f.remove(name); err != nil {
			return err
		}
	}
	return f.remove(f.summary)
}

// copyRecordings copies the recordings that are there, and is their names.
func (s *Summary) copyRecordings(f *files, to string) (names []string, err error) {
	for _, name := range s.files() {
		in, st, err := f.regular(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it may have been rotated out
		}
		if err != nil {
			return nil, err
		}
		err = copyFile(in, st, filepath.Join(to, f.collected(name)))
		in.Close()
		if err != nil {
			return nil, err
		}
		names = append(names, name)
	}
	return names, nil
}

// files are the recordings that a summary names, each once.
func (s *Summary) files() (names []string) {
	seen := map[string]bool{"": true}
	take := func(name string) {
		if !seen[name] {
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

// rename gives the recordings other names.
func (s *Summary) rename(name func(string) string) {
	for i := range s.Recordings {
		s.Recordings[i] = name(s.Recordings[i])
	}
	for i := range s.Devices {
		for k := range s.Devices[i].Failures {
			if r := &s.Devices[i].Failures[k].Recording; *r != "" {
				*r = name(*r)
			}
		}
	}
}

// readExact takes from the recordings what the process could only estimate.
func (s *Summary) readExact(f *files, warn func(error)) {
	for _, name := range s.Recordings {
		in, _, err := f.regular(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			warn(err)
			continue
		}
		found, err := open.Read(in, filepath.Join(filepath.Dir(s.Path), name))
		in.Close()
		if err != nil {
			warn(err)
			continue
		}
		for _, t := range found.Traces {
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

// noLink refuses a link in a place that is to be written: it would be followed.
func noLink(to string) error {
	if st, err := os.Lstat(to); err == nil && !st.Mode().IsRegular() {
		return fmt.Errorf("%s: exists and is not a file, but a link or something else", to)
	}
	return nil
}

// copyFile copies a file, whole or not at all. One of the same size and time is there already.
func copyFile(in io.Reader, st fs.FileInfo, to string) error {
	if there, err := os.Lstat(to); err == nil && there.Size() == st.Size() && there.ModTime().Equal(st.ModTime()) && there.Mode().IsRegular() {
		return nil
	}
	if err := noLink(to); err != nil {
		return err
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
