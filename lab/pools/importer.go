//go:build linux

package pools

import (
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/lab/cli"
	"github.com/cistern-gpu/cistern/resource"
)

// peer is the process that imports the pool.
type peer struct {
	*process
	pool   *resource.ImportedPool
	blocks map[int]*imported
}

// imported is a block as the importer knows it.
type imported struct {
	p            cuda.Ptr // 0 where it is not mapped
	mine, theirs cuda.Event
}

// importer answers the exporter's turns, which come from descriptor 3, until it hangs up. Descriptor 4 is the pool.
func importer(o options) (err error) {
	socket := os.NewFile(3, "socket")
	conn, err := net.FileConn(socket)
	if err != nil {
		return fmt.Errorf("this is not for users: %w", err)
	}
	socket.Close()
	defer conn.Close()
	say, hear := gob.NewEncoder(conn), gob.NewDecoder(conn)
	p, err := newPeer(o)
	if err != nil {
		return errors.Join(err, say.Encode(answer{Err: cli.Line(err)}))
	}
	for {
		var t turn
		if err := hear.Decode(&t); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		a := answer{Block: t.Block}
		if err := found(p.answer(&t, &a)); err != nil { // for the exporter to report, which hangs up then
			a.Err, a.Found = cli.Line(err), errors.As(err, new(errFound))
		}
		if err := say.Encode(a); err != nil {
			return err
		}
	}
}

func newPeer(o options) (*peer, error) {
	file := os.NewFile(4, "pool")
	defer file.Close()
	p, err := o.process(1)
	if err != nil {
		return nil, err
	}
	pool, err := resource.ImportAsync(p, p.dev, int(file.Fd()))
	if err != nil {
		return nil, err
	}
	return &peer{p, pool, map[int]*imported{}}, nil
}

func (p *peer) answer(t *turn, a *answer) (err error) {
	switch {
	case t.End:
		return p.end()
	case t.Event != cuda.EventHandle{}:
		b := &imported{}
		p.blocks[t.Block] = b
		if b.theirs, err = p.EventOpen(p.dev, t.Event); err != nil {
			return err
		}
		if b.mine, err = p.EventCreateShared(p.dev); err != nil {
			return err
		}
		a.Event, err = p.EventExport(p.dev, b.mine)
		return err
	}
	b, s := p.blocks[t.Block], p.rng.IntN(len(p.st))
	st := p.st[s]
	if (t.Name != cuda.PoolPtr{}) {
		if b.p, err = p.pool.ImportPtr(t.Name); err != nil {
			return err
		}
	}
	if err = p.after(s, b.theirs); err != nil {
		return err
	}
	if err = p.Check(p.dev, st, b.p, t.Size, t.Seed); err != nil {
		return err
	}
	if err = p.behind(s); err != nil {
		return err
	}
	if t.Free {
		err = p.pool.Free(b.p, st)
		b.p = 0
	} else {
		err = p.Fill(p.dev, st, b.p, t.Size, t.Next)
	}
	if err != nil {
		return err
	}
	return p.EventRecord(p.dev, b.mine, st)
}

// end gives everything back once the GPU is done, and returns what was wrong.
func (p *peer) end() error {
	for _, s := range p.st {
		if err := p.StreamSynchronize(p.dev, s); err != nil {
			return err
		}
	}
	for _, b := range p.blocks {
		if b.p != 0 {
			if err := p.pool.Free(b.p, p.st[0]); err != nil {
				return err
			}
			if err := p.EventRecord(p.dev, b.mine, p.st[0]); err != nil {
				return err
			}
		}
	}
	if err := p.finish(); err != nil {
		return err
	}
	return p.pool.Close()
}
