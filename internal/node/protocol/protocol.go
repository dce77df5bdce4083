// Package protocol is the messages between the broker of a node and its clients.
//
// # Transport
//
// A Unix socket of type SOCK_SEQPACKET, so that a message comes whole or not at all. Descriptors travel beside a message
// (SCM_RIGHTS): the client's status segment with Hello, the broker's grants with Welcome.
//
// # A message
//
// Numbers are little-endian. A header of 12 bytes (magic, version, kind, two bytes of 0, length of what follows), then fields: tag
// (2 bytes), length (2), value. A field that is absent is zero.
//
// # Versions
//
// A reader skips fields that it does not know, takes as much of a Status as it knows, and ignores messages of a kind that it does
// not know. So a newer peer may send more, and an older one less. The version rises only when old peers would misunderstand; peers
// of different versions do not talk. Kinds and tags are never given to another use.
//
// # Who says what
//
//	Hello     client   Version, Label; with the descriptor of the status segment
//	Welcome   broker   ID of the client; with the descriptor of the grants
//	Join      client   ID, UUID, Total: the client uses a device
//	Joined    broker   ID, Slot in the grants, Limit
//	Limit     broker   Slot, Limit: the client's max, 0 for none
//	Ask       client   ID, Slot, Bytes, Wait: for memory of others; Keep: the driver's free memory that it leaves to their grants;
//	                   Limit (1: for unused memory only: nothing is paused for it), Total: bytes beside, if unused memory has both
//	Granted   broker   ID, Slot, Bytes, Text for the report of a failed request
//	Done      client   ID, Slot: the request that asked is over
//	GiveBack  broker   ID, Slot, Bytes, Keep, Hold: release unused memory; 0 bytes: only say what there is
//	Gave      client   ID, Slot, Bytes, Status, Text of an error
//	Query     client   ID, Slot: how much is available
//	Answer    broker   ID, Slot, Bytes that others would release now, Limit
//	List      control  ID
//	Item      broker   ID, Text: one of what is listed, as JSON
//	Set       control  ID, Text: a rule of the policy
//	End       broker   ID, Text of an error
//	Refused   broker   Text; the connection ends
//	Devices   control  ID: list devices
//	Pause     control  ID, Label (a pattern), Wait: pause what clients allow the node to pause; answered by items
//	Resume    control  ID, Label, Wait: likewise
//	Pausing   broker   ID, Slot, Keep (1: pause, 0: resume, 2: pause for another client, after Pausable only)
//	Paused    client   ID, Slot, Bytes, Status, Text of an error, Keep (1: the program does not allow it now)
//	Pausable  client   Slot, Bytes in use that the program lets the broker pause for other clients, from now on
//
// Named objects (internal/node/objects) have connections of their own, whose first message is one of these. Each message of the
// process is answered by End with the Text of an error, if not by what it asks for.
//
//	Build     process  ID, UUID, Bytes, Text (ObjectSpec as JSON); with the descriptor of the layout, a sealed file in memory
//	Built     broker   ID, Object, Slot: the number of chunks, which follow
//	Chunk     broker   ID, Object, Slot: the chunk's index, Bytes; with its descriptor
//	Commit    process  ID, Object, Text: the SHA-256 of the contents in hexadecimal, or none
//	Abandon   process  ID, Object: ends a build
//	Get       process  ID, Text (ObjectName as JSON), Object: the generation, 0 for the latest; it is kept until Unpin
//	Found     broker   ID, Object, Slot: the number of chunks, which follow; Text (Object as JSON); with the layout's descriptor
//	Unpin     process  ID, Object
//	Remove    process  ID, Text (ObjectName as JSON), Object: one generation, 0 for all
//	Objects   process  ID, Text (ObjectName as JSON, or none for all); answered by items, Objects as JSON
//
// A broker that takes over from the one that runs:
//
//	Handover  successor ID; it is answered by Kept for each descriptor, and End
//	Kept      broker    ID, Text: the name of a descriptor, which comes with it
//	TakenOver successor ID: it has all, and the broker ends
package protocol

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cistern-gpu/cistern/internal/text"
)

// Kind is what a message is about.
type Kind uint8

// The kinds of messages.
const (
	Hello Kind = iota + 1
	Welcome
	Join
	Joined
	Limit
	Ask
	Granted
	Done
	GiveBack
	Gave
	Query
	Answer
	List
	Item
	Set
	End
	Refused
	Devices
	Pause
	Resume
	Pausing
	Paused
	Build
	Built
	Chunk
	Commit
	Abandon
	Get
	Found
	Unpin
	Remove
	Objects
	Pausable
	Handover
	Kept
	TakenOver
)

// OnlyUnused is Limit of an Ask for which nothing is paused.
const OnlyUnused = 1

// What Pausing asks for, in Keep.
const (
	PauseResume    = 0
	PauseByCommand = 1
	PauseForOthers = 2
)

var kindNames = [...]string{"", "hello", "welcome", "join", "joined", "limit", "ask", "granted", "done", "give back", "gave", "query", "answer",
	"list", "item", "set", "end", "refused", "devices", "pause", "resume", "pausing", "paused", "build", "built", "chunk", "commit", "abandon", "get", "found", "unpin", "remove", "objects",
	"pausable", "handover", "kept", "taken over"}

func (k Kind) String() string {
	if int(k) < len(kindNames) && k != 0 {
		return kindNames[k]
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

const (
	magic      = 0x6e736963 // "cisn"
	version    = 1
	headerSize = 12

	// MaxMessage is the most bytes of a message.
	MaxMessage = 16 << 10
	// MaxText is the most bytes of a Text, MaxLabel of a label or a version.
	MaxText  = 12 << 10
	MaxLabel = 64
)

// Windows is the number of windows of Status.Peaks: the i-th is the last Window<<i.
const (
	Windows = 5
	Window  = 250 * time.Millisecond
)

// Status is what a client has of a device, in bytes.
type Status struct {
	Reserved  uint64
	Allocated uint64
	Active    uint64 // with physical memory
	Cached    uint64 // reserved, and in no use
	Paused    uint64
	Pinned    uint64          // of Cached: captured graphs use it
	Peaks     [Windows]uint64 // the most that was active in each window
}

func (s *Status) words() [6 + Windows]*uint64 {
	w := [6 + Windows]*uint64{&s.Reserved, &s.Allocated, &s.Active, &s.Cached, &s.Paused, &s.Pinned}
	for i := range s.Peaks {
		w[6+i] = &s.Peaks[i]
	}
	return w
}

// Message is one of any kind. The package comment lists the fields of each.
type Message struct {
	Kind    Kind
	ID      uint64
	Slot    uint64
	Bytes   uint64
	Keep    uint64
	Hold    time.Duration
	Wait    time.Duration
	Limit   uint64
	Total   uint64
	UUID    [16]byte
	Label   string
	Version string
	Text    string
	Status  Status
	Object  uint64 // generation of a named object
}

// The tags of fields.
const (
	tagID = iota + 1
	tagSlot
	tagBytes
	tagKeep
	tagHold
	tagWait
	tagLimit
	tagTotal
	tagUUID
	tagLabel
	tagVersion
	tagText
	tagStatus
	tagObject
)

var le = binary.LittleEndian

// numbers are the fields that are numbers, by tag from tagID on.
func (m *Message) numbers() [8]*uint64 {
	return [...]*uint64{&m.ID, &m.Slot, &m.Bytes, &m.Keep, nil, nil, &m.Limit, &m.Total}
}

// durations are those that are times.
func (m *Message) duration(tag int) *time.Duration {
	if tag == tagHold {
		return &m.Hold
	}
	return &m.Wait
}

func field(b []byte, tag, length int) []byte {
	b = le.AppendUint16(b, uint16(tag))
	return le.AppendUint16(b, uint16(length))
}

func words(b []byte, tag int, s string, most int) []byte {
	if s = Clean(s, most); s == "" {
		return b
	}
	return append(field(b, tag, len(s)), s...)
}

// Append appends the message's bytes. Texts that are too long are cut.
func (m *Message) Append(b []byte) []byte {
	at := len(b)
	b = le.AppendUint32(b, magic)
	b = append(b, version, byte(m.Kind), 0, 0, 0, 0, 0, 0)
	for i, p := range m.numbers() {
		tag, v := tagID+i, uint64(0)
		if p == nil {
			v = uint64(max(*m.duration(tag), 0))
		} else {
			v = *p
		}
		if v != 0 {
			b = le.AppendUint64(field(b, tag, 8), v)
		}
	}
	if m.UUID != [16]byte{} {
		b = append(field(b, tagUUID, 16), m.UUID[:]...)
	}
	b = words(b, tagLabel, m.Label, MaxLabel)
	b = words(b, tagVersion, m.Version, MaxLabel)
	b = words(b, tagText, m.Text, MaxText)
	if m.Status != (Status{}) {
		all := m.Status.words()
		b = field(b, tagStatus, 8*len(all))
		for _, w := range all {
			b = le.AppendUint64(b, *w)
		}
	}
	if m.Object != 0 {
		b = le.AppendUint64(field(b, tagObject, 8), m.Object)
	}
	le.PutUint32(b[at+8:], uint32(len(b)-at-headerSize))
	return b
}

// Parse reads a message, which is all of b.
func Parse(b []byte) (m Message, err error) {
	if len(b) < headerSize || len(b) > MaxMessage {
		return m, fmt.Errorf("a message of %d bytes: expected from %d to %d", len(b), headerSize, MaxMessage)
	}
	if got := le.Uint32(b); got != magic {
		return m, fmt.Errorf("a message begins with %#x: the other end does not use the protocol of Cistern's broker", got)
	}
	if b[4] != version {
		return m, fmt.Errorf("a message of version %d: expected %d", b[4], version)
	}
	if n := le.Uint32(b[8:]); int64(n) != int64(len(b)-headerSize) {
		return m, fmt.Errorf("a message says that %d bytes follow: %d do", n, len(b)-headerSize)
	}
	m.Kind = Kind(b[5])
	for b = b[headerSize:]; len(b) > 0; {
		if len(b) < 4 || len(b)-4 < int(le.Uint16(b[2:])) {
			return m, errors.New("a message ends in the middle of a field")
		}
		tag, n := int(le.Uint16(b)), int(le.Uint16(b[2:]))
		if err := m.set(tag, b[4:4+n]); err != nil {
			return m, err
		}
		b = b[4+n:]
	}
	return m, nil
}

// set takes a field.
func (m *Message) set(tag int, v []byte) error {
	switch {
	case tag >= tagID && tag <= tagTotal:
		if len(v) != 8 {
			return fmt.Errorf("field %d of %d bytes: expected 8", tag, len(v))
		}
		if p := m.numbers()[tag-tagID]; p != nil {
			*p = le.Uint64(v)
		} else {
			*m.duration(tag) = time.Duration(min(le.Uint64(v), 1<<62))
		}
	case tag == tagUUID:
		if len(v) != 16 {
			return fmt.Errorf("a UUID of %d bytes: expected 16", len(v))
		}
		m.UUID = [16]byte(v)
	case tag == tagLabel:
		m.Label = Clean(string(v), MaxLabel)
	case tag == tagVersion:
		m.Version = Clean(string(v), MaxLabel)
	case tag == tagText:
		m.Text = Clean(string(v), MaxText)
	case tag == tagStatus:
		for _, w := range m.Status.words() {
			if len(v) < 8 {
				break
			}
			*w, v = le.Uint64(v), v[8:]
		}
	case tag == tagObject:
		if len(v) != 8 {
			return fmt.Errorf("the number of an object of %d bytes: expected 8", len(v))
		}
		m.Object = le.Uint64(v)
	}
	return nil
}

// Clean is one harmless line of at most so many bytes.
func Clean(s string, most int) string {
	if s = text.Clean(s); len(s) > most {
		s = strings.ToValidUTF8(s[:most], "")
	}
	return s
}

// Entry is what is listed of a client on a device, as the JSON of an Item.
type Entry struct {
	Client   uint64 `json:"client"`
	PID      int    `json:"pid"`
	UID      uint32 `json:"uid"`
	Name     string `json:"name"`
	Label    string `json:"label,omitempty"`
	Cgroup   string `json:"cgroup,omitempty"`
	Version  string `json:"version"`
	Device   string `json:"device"` // UUID
	Total    uint64 `json:"total_bytes"`
	Reserved uint64 `json:"reserved_bytes"`
	Active   uint64 `json:"active_bytes"`
	Cached   uint64 `json:"cached_bytes"`
	Pinned   uint64 `json:"pinned_bytes"`
	Paused   uint64 `json:"paused_bytes"`
	Pausable uint64 `json:"pausable_bytes"` // in use, that the broker may pause for others
	Floor    uint64 `json:"floor_bytes"`    // that it keeps now
	Granted  uint64 `json:"granted_bytes"`
	Gave     uint64 `json:"gave_bytes"` // ever
	Got      uint64 `json:"got_bytes"`  // ever
	Refaults uint64 `json:"refaults"`
	Pauses   uint64 `json:"pauses"`  // for others
	Missed   uint64 `json:"missed"`  // questions that it did not answer
	Skipped  bool   `json:"skipped"` // it is not asked, as it did not answer
	Min      uint64 `json:"min_bytes"`
	High     uint64 `json:"high_bytes,omitempty"`
	Max      uint64 `json:"max_bytes,omitempty"`
	Weight   uint32 `json:"weight"`
	Priority int32  `json:"priority"`
	// Decay is the time after which unneeded cache is released without a request; 0: it stays.
	Decay float64 `json:"decay_s,omitempty"`
}
