package resource

import (
	"errors"

	"github.com/cistern-gpu/cistern/cuda"
)

// enablePeer opens what cuMemAlloc gives out on dev to work of the peer; that it is open already is no failure.
func enablePeer(drv cuda.Driver, peer, dev cuda.Device) error {
	if err := drv.RetainContext(peer); err != nil {
		return err
	}
	err := drv.EnablePeerAccess(peer, dev)
	if errors.Is(err, cuda.ErrPeerAccessAlreadyEnabled) {
		return nil
	}
	return err
}
