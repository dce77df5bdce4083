package client

import (
	"errors"

	"github.com/cistern-gpu/cistern/internal/node/protocol"
	"github.com/cistern-gpu/cistern/internal/socket"
)

// ObjectsConfig is what a connection for named objects needs.
type ObjectsConfig struct {
	Socket string       // "": the usual ones, tried in turn
	Guard  socket.Guard // nil: the process does not fork
}

// ObjectError is what the broker answered instead of doing what it was asked for.
type ObjectError struct {
	Code uint64 // protocol.CodeNotFound and so on
	Text string
}

func (e *ObjectError) Error() string { return "the node's broker: " + e.Text }

// ErrNoBroker is that no broker answers.
var ErrNoBroker = errors.New("no broker for named objects")

// ObjectChunk is a part of an object's memory.
type ObjectChunk struct {
	FD   int // of the exported chunk; closed by Parts.Close
	Size uint64
}

// Parts are the memory of a generation.
type Parts struct {
	Generation uint64
	Chunks     []ObjectChunk
	conn       // by which it came
}

// Found is a generation that was opened.
type Found struct {
	Parts
	Object protocol.Object
	UUID   [16]byte
	Layout []byte
}
