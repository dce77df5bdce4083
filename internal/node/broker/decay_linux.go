package broker

import (
	"context"
	"time"

	"github.com/cistern-gpu/cistern/internal/node/ledger"
)

// decay has clients release cache that they did not need for the time of their policy, so that processes outside the broker can use
// it. While no policy says so it reads nothing.
func (b *Broker) decay(ctx context.Context) {
	if b.opt.DryRun {
		return
	}
	for pause(ctx, ledger.DecayLook) {
		b.mu.Lock()
		n := ledger.Slot(len(b.slots))
		b.mu.Unlock()
		for slot := range n {
			b.decayOf(slot)
		}
	}
}

func (b *Broker) decayOf(slot ledger.Slot) {
	b.mu.Lock()
	any := b.ledger.Decays(slot)
	b.mu.Unlock()
	if !any {
		return
	}
	b.refresh(slot)
	b.mu.Lock()
	sent := b.put(b.ledger.Decay(b.now(), slot))
	b.mu.Unlock()
	if len(sent) > 0 {
		b.served.Go(func() {
			b.sendAll(sent)
			b.awaitAll(sent, time.NewTimer(b.opt.Answer))
		})
	}
}
