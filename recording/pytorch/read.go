package pytorch

import (
	"io"

	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/input"
)

// Is reports whether a file that begins with head may be a snapshot: whether it is a pickle.
func Is(head []byte) bool { return len(head) > 0 && head[0] == opProto }

// Read reads a snapshot; path is how errors and traces name it. r is not used after Read has returned.
func Read(r io.Reader, path string) (*recording.File, error) {
	return input.File(r, path, func(in *input.Input) (*recording.File, error) {
		m := newMachine(in)
		if err := m.run(); err != nil {
			return nil, err
		}
		if err := in.Ended("the pickle's end"); err != nil {
			return nil, err
		}
		traces, err := m.traces(path)
		return &recording.File{Format: recording.FormatPyTorch, Traces: traces}, err
	})
}
