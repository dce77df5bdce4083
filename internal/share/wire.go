package share

import (
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/cistern-gpu/cistern/memory"
)

// The messages over the socket. Numbers are little-endian. A message is a header of 12 bytes (magic, version, kind, two
// bytes of 0, length) and as many bytes as its length says:
//
//	hello    importer   token (16), number of the export (8)
//	offer    exporter   UUID (16), size (8), offset (8), IPC handle (64), then size and serial (8 each) of every chunk; with a chunk,
//	                    the 64 bytes are the name in a stream-ordered pool, or 0
//	want     importer   first chunk, how many (4 each)
//	batch    exporter   first chunk, how many (4 each); with as many descriptors as are sent
//	refusal  exporter   why, in words; the connection ends
//
// The importer asks for descriptors as it can use them, so that neither side has more open than a batch, and a slow
// importer costs the exporter nothing but a goroutine.
type kind byte

const (
	kindHello kind = iota + 1
	kindOffer
	kindWant
	kindBatch
	kindRefusal
)

const (
	magic      = 0x68736963 // "cish"
	headerSize = 12
	helloSize  = 24
	offerSize  = 96
	chunkSize  = 16
	rangeSize  = 8
	maxWords   = 1024
	maxChunks  = 1 << 18 // 512 GiB in the smallest chunks
	// maxBatch is how many descriptors one message carries. The kernel's own bound is 253.
	maxBatch = 64
)

// bounds are the lengths that a message of each kind can have.
var bounds = map[kind][2]int{
	kindHello:   {helloSize, helloSize},
	kindOffer:   {offerSize, offerSize + maxChunks*chunkSize},
	kindWant:    {rangeSize, rangeSize},
	kindBatch:   {rangeSize, rangeSize},
	kindRefusal: {1, maxWords},
}

// message is a header and room for what follows.
func message(k kind, length int) []byte {
	b := make([]byte, headerSize, headerSize+length)
	binary.LittleEndian.PutUint32(b, magic)
	b[4], b[5] = version, byte(k)
	binary.LittleEndian.PutUint32(b[8:], uint32(length))
	return b
}

// parseHeader reads a header; what it announces is possible.
func parseHeader(b [headerSize]byte) (k kind, length int, err error) {
	if m := binary.LittleEndian.Uint32(b[:]); m != magic {
		return 0, 0, fmt.Errorf("a message begins with %#x: the other end does not use Cistern's protocol", m)
	}
	if b[4] != version {
		return 0, 0, fmt.Errorf("a message is of version %d, expected %d: both processes need the same version of Cistern", b[4], version)
	}
	k = kind(b[5])
	at, known := bounds[k]
	n := binary.LittleEndian.Uint32(b[8:])
	if !known || b[6] != 0 || b[7] != 0 || n < uint32(at[0]) || n > uint32(at[1]) {
		return 0, 0, fmt.Errorf("a message of kind %d with %d bytes: no such message", k, n)
	}
	return k, int(n), nil
}

func hello(token [16]byte, id uint64) []byte {
	b := append(message(kindHello, helloSize), token[:]...)
	return binary.LittleEndian.AppendUint64(b, id)
}

func parseHello(b []byte) (token [16]byte, id uint64) {
	copy(token[:], b)
	return token, binary.LittleEndian.Uint64(b[16:])
}

func offer(m memory.Shared) ([]byte, error) {
	if len(m.Chunks) > maxChunks {
		return nil, fmt.Errorf("the memory is made of %d chunks; at most %d can be shared", len(m.Chunks), maxChunks)
	}
	b := append(message(kindOffer, offerSize+len(m.Chunks)*chunkSize), m.UUID[:]...)
	b = binary.LittleEndian.AppendUint64(b, m.Size)
	b = binary.LittleEndian.AppendUint64(b, m.Offset)
	if len(m.Chunks) > 0 {
		b = append(b, m.Pool[:]...)
	} else {
		b = append(b, m.IPC[:]...)
	}
	for _, c := range m.Chunks {
		b = binary.LittleEndian.AppendUint64(b, c.Size)
		b = binary.LittleEndian.AppendUint64(b, c.Serial)
	}
	return b, nil
}

// parseOffer reads an offer of at least offerSize bytes. Whether it makes sense is for the engine to say.
func parseOffer(b []byte) (memory.Shared, error) {
	m := memory.Shared{
		UUID:   [16]byte(b),
		Size:   binary.LittleEndian.Uint64(b[16:]),
		Offset: binary.LittleEndian.Uint64(b[24:]),
	}
	name := [64]byte(b[32:])
	if b = b[offerSize:]; len(b) > 0 {
		m.Pool = name
	} else {
		m.IPC = name
	}
	if len(b)%chunkSize != 0 {
		return m, fmt.Errorf("an offer ends in the middle of a chunk")
	}
	for ; len(b) > 0; b = b[chunkSize:] {
		m.Chunks = append(m.Chunks, memory.SharedChunk{Size: binary.LittleEndian.Uint64(b), Serial: binary.LittleEndian.Uint64(b[8:])})
	}
	return m, nil
}

// span is the body of want and batch.
func span(k kind, first, n int) []byte {
	b := binary.LittleEndian.AppendUint32(message(k, rangeSize), uint32(first))
	return binary.LittleEndian.AppendUint32(b, uint32(n))
}

func parseSpan(b []byte) (first, n uint32) {
	return binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:])
}

func refusal(words string) []byte {
	words = oneLine(words)
	return append(message(kindRefusal, len(words)), words...)
}

// oneLine is the words as they may be shown: at most maxWords bytes, at least one, nothing that moves a cursor.
func oneLine(words string) string {
	words = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, words)
	if len(words) > maxWords {
		words = strings.ToValidUTF8(words[:maxWords], "") // the last character may have been cut
	}
	if words == "" {
		return "no reason given"
	}
	return words
}
