package broker_test

import (
	"bytes"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cistern-gpu/cistern/internal/node/broker"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// logged is a log that can be read while it is written.
type logged struct {
	mu  sync.Mutex
	all bytes.Buffer
}

func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all.Write(b)
}

func (l *logged) has(words string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.all.String(), words)
}

// slowToClose is a descriptor whose last close waits for minutes, or for release: it is a connection with bytes that its other end does
// not take, and closing waits for those (SO_LINGER).
func slowToClose(t *testing.T) (fd int, release func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
		t.Fatal(err)
	}
	if err := unix.Connect(fd, &unix.SockaddrInet4{Port: l.Addr().(*net.TCPAddr).Port, Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	end, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	for chunk := make([]byte, 1<<16); ; {
		if _, err := unix.SendmsgN(fd, chunk, nil, nil, unix.MSG_DONTWAIT); err == unix.EAGAIN {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: 600}); err != nil {
		t.Fatal(err)
	}
	return fd, func() { end.Close() }
}

// A client that sends descriptors whose closing waits holds up its own connection, neither others nor the broker's end.
func TestSlowDescriptor(t *testing.T) {
	t.Parallel()
	log := &logged{}
	n := newNode(t, broker.Options{Log: slog.New(slog.NewTextHandler(log, nil))}, 10*gib)
	conn := friend(t, n)
	eventually(t, "hello came", func() bool { return n.b.Counts().Messages.Load() == 1 })
	send := func(fds ...int) {
		if _, _, err := conn.WriteMsgUnix((&protocol.Message{Kind: protocol.Done, ID: 1}).Append(nil), unix.UnixRights(fds...), nil); err != nil {
			t.Fatal(err)
		}
	}
	goOn := n.b.Hold() // until only the broker has the descriptors
	send()
	fd, release := slowToClose(t)
	defer release()
	send(fd)
	unix.Close(fd)
	fd, release = slowToClose(t) // stays in the queue
	defer release()
	send(fd)
	unix.Close(fd)
	goOn()
	eventually(t, "the first came, and waits to be closed", func() bool { return n.b.Counts().Messages.Load() == 3 })
	a, b := n.member(t, "a"), n.member(t, "b")
	n.unused(a, b, 10*gib)
	if ok, note := b.grow(gib, time.Minute); !ok {
		t.Error(note)
	}
	over := make(chan struct{})
	go func() {
		n.stop()
		close(over)
	}()
	select {
	case <-over:
	case <-time.After(time.Minute):
		t.Error("the broker does not end")
	}
	if n.b.Alive() || !log.has("connections did not end") {
		t.Error("the descriptor was closed at once: this test tests nothing")
	}
}
