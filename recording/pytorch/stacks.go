package pytorch

import (
	"encoding/binary"
	"fmt"

	"github.com/cistern-gpu/cistern/internal/text"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/input"
	"github.com/cistern-gpu/cistern/recording/internal/tables"
)

// stackTable holds frames and stacks, each once.
type stackTable struct {
	b        *input.Budget
	frames   []recording.Frame
	frameIDs map[recording.Frame]uint32
	stacks   []recording.Stack
	stackIDs map[string]uint32 // little-endian frame ids → index in stacks
	key      []byte
	text     map[uint32]string // strings of frames, by id in strtab
	names    tables.NativeNames
}

func (t *stackTable) init(b *input.Budget) {
	t.b = b
	t.frameIDs = map[recording.Frame]uint32{}
	t.stacks = []recording.Stack{nil}
	t.stackIDs = map[string]uint32{"": 0}
	t.text = map[uint32]string{}
}

func (t *stackTable) str(strs *strtab, id uint32) (string, error) {
	if id == none {
		return "", nil
	}
	s, ok := t.text[id]
	if !ok {
		s = text.Clean(string(strs.get(uint64(id))))
		if err := t.b.Take(int64(len(s)) + 64); err != nil {
			return "", err
		}
		t.text[id] = s
	}
	return s, nil
}

func (t *stackTable) frame(strs *strtab, f *rawFrame) (uint32, error) {
	if f.file == none && f.name == none {
		return 0, fmt.Errorf("a frame has neither filename nor name")
	}
	file, err := t.str(strs, f.file)
	if err != nil {
		return 0, err
	}
	name, err := t.str(strs, f.name)
	if err != nil {
		return 0, err
	}
	read := recording.Frame{File: file, Func: name, Line: int(f.line)}
	if err := t.names.Demangle(&read, t.b); err != nil {
		return 0, err
	}
	return t.frameID(read)
}

func (t *stackTable) frameID(f recording.Frame) (uint32, error) {
	id, ok := t.frameIDs[f]
	if !ok {
		if err := t.b.Take(160); err != nil {
			return 0, err
		}
		id = uint32(len(t.frames))
		t.frames = append(t.frames, f)
		t.frameIDs[f] = id
	}
	return id, nil
}

// stack interns ids, which stay the caller's.
func (t *stackTable) stack(ids []uint32) (uint32, error) {
	t.key = t.key[:0]
	for _, id := range ids {
		t.key = binary.LittleEndian.AppendUint32(t.key, id)
	}
	id, ok := t.stackIDs[string(t.key)]
	if !ok {
		if err := t.b.Take(int64(8*len(ids)) + 128); err != nil {
			return 0, err
		}
		id = uint32(len(t.stacks))
		t.stacks = append(t.stacks, append(recording.Stack(nil), ids...))
		t.stackIDs[string(t.key)] = id
	}
	return id, nil
}
