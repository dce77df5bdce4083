package share

import (
	"encoding/hex"
	"errors"
	"fmt"
	"path"
	"strconv"
	"strings"
)

// version is of the handle and of the protocol.
const version = 1

// prefix begins every handle of every version.
const prefix = "cistern-share:"

// MaxHandle is how long a handle can be, in characters.
const MaxHandle = 511

// maxSocket is how long the name of a socket can be in bytes (sun_path holds 108 with the final 0).
const maxSocket = 107

// Handle is what a process hands to another one so that it can open memory: which process to ask, and for what.
type Handle struct {
	PID     int
	Process [16]byte // random: names the exporting process for all time
	Token   [16]byte // random: an importer that has it was given a handle
	ID      uint64   // of the export
	UUID    [16]byte // of the device that the memory lies on
	Size    uint64   // of the block in bytes
	Socket  string   // an absolute path
}

// String is the handle as text: printable characters without spaces, at most MaxHandle.
func (h Handle) String() string {
	return fmt.Sprintf("%s%d:%d:%x:%x:%d:%x:%d:%s", prefix, version, h.PID, h.Process, h.Token, h.ID, h.UUID, h.Size, h.Socket)
}

var errNotOurs = errors.New("not a handle that Cistern made: does the process that shared the memory run on Cistern?")

// Parse reads a handle. It accepts exactly what String writes.
func Parse(text string) (Handle, error) {
	var h Handle
	rest, ok := strings.CutPrefix(text, prefix)
	if !ok {
		return h, errNotOurs
	}
	v, rest, ok := strings.Cut(rest, ":")
	if n, err := strconv.ParseUint(v, 10, 16); !ok || err != nil {
		return h, errors.New("the handle is damaged: no version in it")
	} else if n != version {
		return h, fmt.Errorf("the handle is of version %d and this library reads version %d: both processes need the same version of Cistern", n, version)
	}
	f := strings.SplitN(rest, ":", 7)
	if len(text) > MaxHandle || len(f) != 7 {
		return h, fmt.Errorf("the handle is damaged: %d characters, %d fields", len(text), len(f))
	}
	pid, err := strconv.ParseUint(f[0], 10, 31)
	if err != nil {
		return h, fmt.Errorf("the handle is damaged: process %q", f[0])
	}
	h.PID = int(pid)
	for _, x := range []struct {
		what, text string
		to         *[16]byte
	}{{"process", f[1], &h.Process}, {"token", f[2], &h.Token}, {"device", f[4], &h.UUID}} {
		if len(x.text) != 32 {
			return h, fmt.Errorf("the handle is damaged: its %s has %d digits", x.what, len(x.text))
		}
		if _, err := hex.Decode(x.to[:], []byte(x.text)); err != nil {
			return h, fmt.Errorf("the handle is damaged: its %s: %w", x.what, err)
		}
	}
	if h.ID, err = strconv.ParseUint(f[3], 10, 64); err != nil {
		return h, fmt.Errorf("the handle is damaged: number %q", f[3])
	}
	if h.Size, err = strconv.ParseUint(f[5], 10, 64); err != nil {
		return h, fmt.Errorf("the handle is damaged: size %q", f[5])
	}
	if h.Socket = f[6]; !usable(h.Socket) {
		return h, fmt.Errorf("the handle is damaged: socket %q", f[6])
	}
	if h.String() != text {
		return h, errors.New("the handle is damaged: it is not as Cistern writes it")
	}
	return h, nil
}

// usable reports whether a handle can carry the name of the socket.
func usable(socket string) bool {
	if len(socket) > maxSocket || !path.IsAbs(socket) {
		return false
	}
	for i := range len(socket) {
		if socket[i] <= ' ' || socket[i] > '~' {
			return false
		}
	}
	return true
}
