// Package control asks the broker of a node what an operator wants to know, and changes its policy.
package control

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// timeout is how long the broker may take for each message.
const timeout = 5 * time.Second

// Conn is a connection to a broker.
type Conn struct {
	path string
	c    *net.UnixConn
	last uint64
	wait time.Duration // beside timeout, for the answer
}

// Dial connects to the broker at the first of these sockets where one listens.
func Dial(paths ...string) (*Conn, error) {
	var first error
	for _, path := range paths {
		c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
		if err == nil {
			return &Conn{path: path, c: c}, nil
		}
		if first == nil || !errors.Is(err, os.ErrNotExist) {
			first = fmt.Errorf("no broker answers at %s: %w", path, cause(err))
		}
	}
	return nil, first
}

// cause is an error of package net without its words about addresses.
func cause(err error) error {
	var op *net.OpError
	if errors.As(err, &op) {
		return op.Err
	}
	return err
}

// Close ends the connection.
func (c *Conn) Close() { c.c.Close() }

func (c *Conn) send(m protocol.Message) error {
	c.last++
	m.ID = c.last
	_ = c.c.SetDeadline(time.Now().Add(timeout))
	if _, err := c.c.Write(m.Append(nil)); err != nil {
		return fmt.Errorf("the broker at %s: %w", c.path, cause(err))
	}
	return nil
}

// next receives a message that belongs to the last question.
func (c *Conn) next() (m protocol.Message, err error) {
	b := make([]byte, protocol.MaxMessage)
	for {
		_ = c.c.SetDeadline(time.Now().Add(timeout + c.wait))
		n, err := c.c.Read(b)
		if err != nil {
			return m, fmt.Errorf("the broker at %s: %w", c.path, cause(err))
		}
		if m, err = protocol.Parse(b[:n]); err != nil {
			return m, fmt.Errorf("the broker at %s: %w", c.path, err)
		}
		switch {
		case m.Kind == protocol.Refused:
			return m, fmt.Errorf("the broker at %s refused: %s", c.path, m.Text)
		case m.ID == c.last && (m.Kind == protocol.Item || m.Kind == protocol.End):
			return m, nil
		}
	}
}

// List are the clients that the user may see.
func (c *Conn) List() ([]protocol.Entry, error) {
	return items[protocol.Entry](c, protocol.Message{Kind: protocol.List})
}

// Devices are the devices that clients use, with sums over all clients.
func (c *Conn) Devices() ([]protocol.Device, error) {
	return items[protocol.Device](c, protocol.Message{Kind: protocol.Devices})
}

// Pause has clients whose label matches a pattern pause what they allow the node to pause, within a time, and returns what each
// did. Resume likewise.
func (c *Conn) Pause(label string, within time.Duration) ([]protocol.PauseResult, error) {
	return c.pause(protocol.Pause, label, within)
}

// Resume has clients resume what the node paused.
func (c *Conn) Resume(label string, within time.Duration) ([]protocol.PauseResult, error) {
	return c.pause(protocol.Resume, label, within)
}

func (c *Conn) pause(kind protocol.Kind, label string, within time.Duration) ([]protocol.PauseResult, error) {
	c.wait = within
	defer func() { c.wait = 0 }()
	return items[protocol.PauseResult](c, protocol.Message{Kind: kind, Label: label, Wait: within})
}

// Path is the broker's socket.
func (c *Conn) Path() string { return c.path }

// items are the answers to a question that asks for a list.
func items[T any](c *Conn, m protocol.Message) (all []T, err error) {
	if err := c.send(m); err != nil {
		return nil, err
	}
	for {
		m, err := c.next()
		if err != nil {
			return nil, err
		}
		if m.Kind == protocol.End {
			if m.Text != "" {
				return nil, errors.New(m.Text)
			}
			return all, nil
		}
		var item T
		if err := json.Unmarshal([]byte(m.Text), &item); err != nil {
			return nil, fmt.Errorf("the broker at %s describes an item as %q: %w", c.path, m.Text, err)
		}
		all = append(all, item)
	}
}

// Objects are the named objects that the user may read; with a name, the generations of that name.
func (c *Conn) Objects(name *protocol.ObjectName) ([]protocol.Object, error) {
	m := protocol.Message{Kind: protocol.Objects}
	if name != nil {
		text, err := json.Marshal(name)
		if err != nil {
			return nil, err
		}
		m.Text = string(text)
	}
	return items[protocol.Object](c, m)
}

// Remove removes a named object: its latest generation with 0, or one of its generations.
func (c *Conn) Remove(name protocol.ObjectName, generation uint64) error {
	text, err := json.Marshal(name)
	if err != nil {
		return err
	}
	c.wait = time.Minute // the driver releases memory
	defer func() { c.wait = 0 }()
	return c.done(protocol.Message{Kind: protocol.Remove, Text: string(text), Object: generation})
}

// Set adds a rule to the policy, written as policy.ParseRule reads it, until the broker ends.
func (c *Conn) Set(rule string) error {
	return c.done(protocol.Message{Kind: protocol.Set, Text: rule})
}

// done sends a message that is answered by an end alone.
func (c *Conn) done(m protocol.Message) error {
	if err := c.send(m); err != nil {
		return err
	}
	m, err := c.next()
	if err == nil && m.Text != "" {
		err = errors.New(m.Text)
	}
	return err
}
