package main

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"time"

	"github.com/cistern-gpu/cistern/internal/deadline"
	"github.com/cistern-gpu/cistern/internal/top"
)

// openTop is the source of `cistern top`: this machine, where that is possible at all, with the broker at a socket ("": the usual
// ones).
func openTop(socket string) (top.Source, error) {
	if runtime.GOOS != "linux" {
		return nil, errors.New("top: GPUs and their processes can be seen on Linux only")
	}
	sockets := nodeSockets()
	if socket != "" {
		sockets = []string{socket}
	}
	return &turns{source: top.NewMachine("", sockets...)}, nil
}

// turns is a source that may be closed while it is looked at: the view ends when the user wants it to, and a look takes a while,
// in another goroutine, which may begin it only then.
type turns struct {
	source top.Source
	mu     sync.Mutex
	// +checklocks:mu
	closed bool // as the source is
}

// closeTimeout is how long a look may take to end that is not wanted any more: one that waits for a /proc that does not answer,
// or for NVML, ends with the process.
const closeTimeout = time.Second

func (s *turns) Look(ctx context.Context, wanted top.Wanted) top.Look {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return top.Look{}
	}
	return s.source.Look(ctx, wanted)
}

// +checklocksignore: TryLock is not known to the analyser
func (s *turns) Close() {
	wait := deadline.Deadline{Limit: closeTimeout}
	if wait.Poll(s.mu.TryLock) {
		defer s.mu.Unlock()
		s.closed = true
		s.source.Close()
	}
}
