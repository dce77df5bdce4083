package protocol

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

func random(r *rand.Rand) Message {
	some := func() uint64 {
		if r.IntN(3) == 0 {
			return 0
		}
		return r.Uint64() >> r.IntN(64)
	}
	m := Message{Kind: Kind(r.IntN(40)), ID: some(), Slot: some(), Bytes: some(), Keep: some(), Hold: time.Duration(some() >> 2), Wait: time.Duration(some() >> 2),
		Limit: some(), Total: some(), Object: some(), Label: strings.Repeat("é", r.IntN(MaxLabel/2)), Version: "1.2", Text: strings.Repeat("words ", r.IntN(100))}
	if r.IntN(2) == 0 {
		m.UUID[3] = byte(r.Uint32())
		for _, w := range m.Status.words() {
			*w = some()
		}
	}
	return m
}

func TestRoundTrip(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 10_000 {
		m := random(r)
		b := m.Append(nil)
		got, err := Parse(b)
		if err != nil || got != m {
			t.Fatalf("%+v became %+v, %v", m, got, err)
		}
		if cut := b[:len(b)-1-r.IntN(len(b)-1)]; len(cut) > 0 {
			if _, err := Parse(cut); err == nil {
				t.Fatalf("%d of %d bytes were a message", len(cut), len(b))
			}
		}
	}
}

// The longest message fits.
func TestLongest(t *testing.T) {
	m := Message{Kind: Item, ID: 1, Slot: 1, Bytes: 1, Keep: 1, Hold: 1, Wait: 1, Limit: 1, Total: 1, Object: 1, UUID: [16]byte{1}, Status: Status{Peaks: [Windows]uint64{1}},
		Label: strings.Repeat("x", 2*MaxLabel), Version: strings.Repeat("y", 2*MaxLabel), Text: strings.Repeat("z", 2*MaxText)}
	b := m.Append(nil)
	got, err := Parse(b)
	if err != nil || len(b) > MaxMessage || len(got.Text) != MaxText || len(got.Label) != MaxLabel || len(got.Version) != MaxLabel {
		t.Fatalf("%d bytes, %v", len(b), err)
	}
}

// A peer of a later version sends more: fields, words of a status, kinds of messages.
func TestLaterPeer(t *testing.T) {
	m := Message{Kind: Gave, ID: 7, Bytes: 5, Status: Status{Reserved: 9}}
	b := m.Append(nil)
	status := len(b) - 8*len(m.Status.words()) - 4
	b = append(b[:status], field(nil, tagStatus, 8*len(m.Status.words())+8)...)
	for i := range len(m.Status.words()) + 1 {
		b = le.AppendUint64(b, uint64(9+i))
	}
	b = append(field(b, 999, 3), "new"...)
	b = field(b, 1000, 0)
	b[5] = 200
	le.PutUint32(b[8:], uint32(len(b)-headerSize))
	got, err := Parse(b)
	if err != nil || got.ID != 7 || got.Bytes != 5 || got.Status.Reserved != 9 || got.Status.Peaks[Windows-1] != 9+5+Windows || got.Kind != 200 {
		t.Errorf("%+v, %v", got, err)
	}
}

// A peer of an earlier version sends less.
func TestEarlierPeer(t *testing.T) {
	b := (&Message{Kind: Gave}).Append(nil)
	b = le.AppendUint64(field(b, tagStatus, 8), 5)
	le.PutUint32(b[8:], uint32(len(b)-headerSize))
	if got, err := Parse(b); err != nil || got.Status != (Status{Reserved: 5}) {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestRefuses(t *testing.T) {
	good := (&Message{Kind: Ask, ID: 1, UUID: [16]byte{1}}).Append(nil)
	change := func(f func(b []byte) []byte) []byte { return f(bytes.Clone(good)) }
	for want, b := range map[string][]byte{
		"0 bytes":             nil,
		"begins with":         change(func(b []byte) []byte { b[0]++; return b }),
		"version":             change(func(b []byte) []byte { b[4]++; return b }),
		"bytes follow":        append(bytes.Clone(good), 0),
		"middle of a field":   change(func(b []byte) []byte { b[headerSize+2] = 200; return b }),
		"expected 8":          change(func(b []byte) []byte { b[headerSize+12] = tagBytes; return b }),
		"expected from 12 to": make([]byte, MaxMessage+1),
	} {
		if _, err := Parse(b); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

func TestNames(t *testing.T) {
	for k := Hello; k <= Pausable; k++ {
		if strings.HasPrefix(k.String(), "kind") || k.String() == "" {
			t.Errorf("message %d has no name", k)
		}
	}
	if Kind(0).String() != "kind 0" || Kind(99).String() != "kind 99" {
		t.Error(Kind(0), Kind(99))
	}
}

func FuzzParse(f *testing.F) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 20 {
		m := random(r)
		f.Add(m.Append(nil))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := Parse(b)
		if err != nil {
			return
		}
		again, err := Parse(m.Append(nil))
		if err != nil || again != m {
			t.Fatalf("%+v became %+v, %v", m, again, err)
		}
	})
}
