package open

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"

	"github.com/cistern-gpu/cistern/internal/nopoll"
)

// logs are the files that this process writes logs to, by path: two pools with one name write to one file.
var logs = struct {
	sync.Mutex
	open map[string]*logFile // guarded by the mutex
}{open: map[string]*logFile{}}

// logFile is a file that several logs may share.
type logFile struct {
	*nopoll.Kept
	path  string
	users int // guarded by logs
}

// createLog opens a file for a log, empty unless another log writes to it.
func createLog(path string) (io.Writer, error) {
	full, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	logs.Lock()
	defer logs.Unlock()
	f := logs.open[full]
	if f == nil {
		file, err := nopoll.Keep(full, os.O_CREATE|os.O_TRUNC|os.O_WRONLY|os.O_APPEND, 0o644)
		if err != nil {
			var e *os.PathError
			if errors.As(err, &e) {
				err = e.Err // the path may have lines
			}
			return nil, fmt.Errorf("file %s: %w", quote(path), err)
		}
		f = &logFile{Kept: file, path: full}
		logs.open[full] = f
	}
	f.users++
	return f, nil
}

// Close closes the file with its last user.
func (f *logFile) Close() error {
	logs.Lock()
	defer logs.Unlock()
	if f.users--; f.users > 0 {
		return nil
	}
	delete(logs.open, f.path)
	return f.Kept.Close()
}
