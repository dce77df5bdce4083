//go:build !linux

package client

import (
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// Objects is a process's connection for named objects, on Linux.
type Objects struct{}

type conn struct{}

// NewObjects is a connection that finds no broker.
func NewObjects(ObjectsConfig) *Objects { return &Objects{} }

// Close does nothing.
func (*Objects) Close() {}

// Close does nothing.
func (*Parts) Close() {}

// Build finds no broker.
func (*Objects) Build([16]byte, uint64, protocol.ObjectSpec, []byte) (*Parts, error) {
	return nil, ErrNoBroker
}

// Commit finds no broker.
func (*Objects) Commit(*Parts, string) error { return ErrNoBroker }

// Abandon finds no broker.
func (*Objects) Abandon(*Parts) error { return ErrNoBroker }

// Get finds no broker.
func (*Objects) Get(protocol.ObjectName, uint64) (*Found, error) { return nil, ErrNoBroker }

// Unpin does nothing.
func (*Objects) Unpin(uint64) error { return nil }

// Remove finds no broker.
func (*Objects) Remove(protocol.ObjectName, uint64) error { return ErrNoBroker }

// List finds no broker.
func (*Objects) List(*protocol.ObjectName) ([]protocol.Object, error) { return nil, ErrNoBroker }
