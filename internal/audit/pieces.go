package audit

import "bytes"

// Pieces puts together what is too long for one record and so goes through several. Several threads may send the same
// at once: what has the same number is the same, so that a piece is taken from the first sender.
type Pieces struct {
	begun map[pieceKey]*Piece
}

type pieceKey struct {
	pid    uint32
	record uint8
	number uint64
}

// Piece is something whole: words, or text.
type Piece struct {
	Words []uint64
	Text  []byte
}

// mostBegun bounds what is kept of things whose last records never came: their process was killed, or they were dropped.
const mostBegun = 1024

// mostWhole bounds the length that is believed, of words or bytes, as a program may write over what the library wrote.
const mostWhole = 4096

// Add takes in a RecordStack or a RecordCode, and is the whole with its last piece, else nil.
func (p *Pieces) Add(r *Record) *Piece {
	if r.Handle > mostWhole {
		return nil
	}
	k := pieceKey{r.PID, r.Type, r.Addr}
	w := p.begun[k]
	if w == nil {
		if p.begun == nil || len(p.begun) >= mostBegun {
			p.begun = map[pieceKey]*Piece{}
		}
		w = &Piece{}
		p.begun[k] = w
	}
	var have int
	if r.Type == RecordCode {
		if int(r.Extra) == len(w.Text) {
			w.Text = append(w.Text, r.Text()...)
		}
		have = len(w.Text)
	} else {
		if int(r.Extra) == len(w.Words) {
			w.Words = append(w.Words, r.Words()...)
		}
		have = len(w.Words)
	}
	if uint64(have) < r.Handle {
		return nil
	}
	delete(p.begun, k)
	return w
}

// Names of a RecordCode that is whole: its file and its function.
func (w *Piece) Names() (file, function string) {
	f, g, _ := bytes.Cut(w.Text, []byte{0})
	return string(f), string(g)
}
