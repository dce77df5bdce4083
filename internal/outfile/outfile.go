// Package outfile writes the files that the command and the library are asked for: whole or not at all.
//
// A regular file is written under a temporary name beside its place and renamed, so that no reader finds half of one. A
// symbolic link keeps its place and its target is written, whether the target exists or not. What is no regular file (a pipe,
// a device, an open descriptor such as /dev/stdout) is written in place.
//
// A File has one lock, which Commit and Abandon hold: a command that is ended by a signal abandons files that other
// goroutines still write.
package outfile

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"

	"github.com/cistern-gpu/cistern/internal/nopoll"
)

// The permissions of new files. The umask always applies; a file that exists keeps the permissions that it has.
const (
	// Shared is for what a user derives from a recording and names: it is as private as the umask says.
	Shared fs.FileMode = 0o666
	// Private is for recordings: they hold command lines, paths and stacks of a program, as core dumps and files of perf do,
	// which are private too.
	Private fs.FileMode = 0o600
)

// File is an output that is being written.
type File struct {
	path string // its place
	temp string // its name until then; "" where path itself is written

	mu   sync.Mutex
	file *os.File // +checklocks:mu
}

// Create opens an output. Errors are of type *fs.PathError.
func Create(path string, mode fs.FileMode) (*File, error) {
	if path == "" {
		return nil, &fs.PathError{Op: "open", Path: path, Err: fs.ErrNotExist}
	}
	st, err := os.Stat(path)
	place, descriptor, rerr := resolve(path)
	if rerr != nil {
		return nil, rerr
	}
	if descriptor || err == nil && !st.Mode().IsRegular() {
		f, err := nopoll.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			return nil, err
		}
		return &File{path: path, file: f}, nil
	}
	exists := err == nil
	if exists {
		// A file that its owner made read-only is not to be replaced, though its folder would allow that.
		f, err := nopoll.OpenFile(place, os.O_WRONLY, 0)
		if err != nil {
			return nil, err
		}
		f.Close()
		mode = st.Mode().Perm()
	}
	f, err := beside(place, mode)
	if err != nil {
		return nil, err
	}
	o := &File{path: place, file: f, temp: f.Name()}
	if exists { // its permissions may be wider than the umask, as its owner made them so
		if err := f.Chmod(mode); err != nil && !errors.Is(err, errors.ErrUnsupported) {
			o.Abandon()
			return nil, err
		}
	}
	return o, nil
}

// beside creates a new file in the folder of place.
func beside(place string, mode fs.FileMode) (*os.File, error) {
	for try := 0; ; try++ {
		name := filepath.Join(filepath.Dir(place), fmt.Sprintf(".cistern-%016x", rand.Uint64()))
		f, err := nopoll.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
		if errors.Is(err, fs.ErrExist) && try < 100 {
			continue
		}
		return f, err
	}
}

// descriptors are the names of files that a process has open already.
var descriptors = regexp.MustCompile(`^/(?:dev|proc/(?:self|thread-self|[0-9]+))/fd/[0-9]+$`)

// resolve follows symbolic links, also to what does not exist yet; descriptor says that the way leads to an open descriptor.
// Names are joined as text: what ".." means behind a link is for the kernel to say.
func resolve(path string) (place string, descriptor bool, err error) {
	place = path
	for range 40 { // as many as the kernel follows
		if descriptors.MatchString(place) {
			return place, true, nil
		}
		to, err := os.Readlink(place)
		if err != nil {
			return place, false, nil // no link, or nothing yet
		}
		if !filepath.IsAbs(to) {
			to = place[:strings.LastIndexByte(filepath.ToSlash(place), '/')+1] + to
		}
		place = to
	}
	return "", false, &fs.PathError{Op: "open", Path: path, Err: errTooManyLinks}
}

var errTooManyLinks = errors.New("too many levels of symbolic links")

// Target is where the symbolic links lead that path may be, also to what does not exist yet.
func Target(path string) (string, error) {
	place, _, err := resolve(path)
	return place, err
}

// Replaces reports whether the output is a regular file, which appears when it is committed.
func (o *File) Replaces() bool { return o.temp != "" }

// Write writes to the file. It belongs to one goroutine.
func (o *File) Write(p []byte) (int, error) {
	o.mu.Lock()
	f := o.file
	o.mu.Unlock()
	if f == nil {
		return 0, fs.ErrClosed
	}
	return f.Write(p) // without the lock: a pipe may be full for long
}

// Commit puts the file in its place. What was written is gone if that fails.
func (o *File) Commit() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.file == nil {
		return fs.ErrClosed
	}
	err := o.file.Close()
	o.file = nil
	if o.temp == "" {
		return err
	}
	if err == nil {
		err = os.Rename(o.temp, o.path)
	}
	if err != nil {
		os.Remove(o.temp)
	}
	return err
}

// Abandon drops the output unless it was committed.
func (o *File) Abandon() {
	if o == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.file == nil {
		return
	}
	if o.temp != "" {
		os.Remove(o.temp)
	}
	o.file.Close()
	o.file = nil
}
