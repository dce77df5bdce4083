package sim

import "github.com/cistern-gpu/cistern/cuda"

// CanAccessPeer is true for every two devices unless Options.Isolated.
func (d *Driver) CanAccessPeer(dev, peer cuda.Device) (bool, error) {
	d.mu.Lock()
	defer d.leave()
	if err := d.begin(callDeviceCanAccessPeer, dev, 0, d.costs.Attribute); err != nil {
		return false, err
	}
	if uint(peer) >= uint(len(d.devices)) {
		return false, d.errorOf(callDeviceCanAccessPeer, peer, 0, cuda.ErrInvalidDevice)
	}
	return dev != peer && !d.opt.Isolated, nil
}

// EnablePeerAccess lets work of one device's primary context use the cuMemAlloc blocks of another. What it costs was
// not measured: programs do it once.
func (d *Driver) EnablePeerAccess(dev, peer cuda.Device) error {
	d.mu.Lock()
	defer d.leave()
	const c = callCtxEnablePeerAccess
	if err := d.beginContext(c, dev, 0, 0); err != nil {
		return err
	}
	v := d.devices[dev]
	switch {
	case uint(peer) >= uint(len(d.devices)):
		return d.errorOf(c, peer, 0, cuda.ErrInvalidDevice)
	case peer == dev || d.devices[peer].primary == nil:
		return d.errorOf(c, dev, 0, cuda.ErrInvalidContext)
	case d.poisoned(peer) != cuda.Success:
		return d.errorOf(c, dev, 0, d.poisoned(peer))
	case d.opt.Isolated:
		return d.errorOf(c, dev, 0, cuda.ErrPeerAccessUnsupported)
	case v.peers>>peer&1 != 0:
		return d.errorOf(c, dev, 0, cuda.ErrPeerAccessAlreadyEnabled)
	}
	v.peers |= 1 << peer
	return nil
}
