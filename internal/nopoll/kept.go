package nopoll

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"

	"github.com/cistern-gpu/cistern/internal/environ"
)

// ErrGone is that a file which was to stay open is not: the program closed its descriptor, and the number may be another
// file's now.
var ErrGone = errors.New("the program closed the file's descriptor")

// TempFile makes a file without a name in a folder; "" is that of temporary files.
func TempFile(dir, prefix string) (*Kept, error) {
	if dir == "" {
		dir = environ.TempDir()
	}
	for try := 0; ; try++ {
		name := filepath.Join(dir, fmt.Sprintf("%s%x", prefix, rand.Uint64()))
		f, err := Keep(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if errors.Is(err, os.ErrExist) && try < 1000 {
			continue
		}
		if err != nil {
			return nil, err
		}
		if err := os.Remove(name); err != nil {
			f.Close()
			return nil, err
		}
		return f, nil
	}
}
