package broker

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
	"github.com/cistern-gpu/cistern/internal/text"
)

// process is what the kernel says of the process at the other end of a connection.
type process struct {
	pid    int // 0: of a PID namespace that the broker does not see
	uid    uint32
	pidfd  int // -1: the kernel has none
	start  uint64
	name   string
	cgroup string
}

// soPeerPidfd is SO_PEERPIDFD (Linux 6.5).
const soPeerPidfd = 77

// identify asks the kernel. What it does not say stays empty, as in a container whose /proc hides others.
func identify(c *net.UnixConn) (p process, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return p, err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		cred, e := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		if e != nil {
			failed = os.NewSyscallError("getsockopt", e)
			return
		}
		p.pid, p.uid = int(cred.Pid), cred.Uid
		if p.pidfd, e = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, soPeerPidfd); e == nil {
			return
		}
		if p.pidfd, e = unix.PidfdOpen(p.pid, 0); e != nil {
			p.pidfd = -1
		}
	})
	if err == nil {
		err = failed
	}
	if err != nil {
		return p, fmt.Errorf("identifying a client: %w", err)
	}
	p.look()
	return p, nil
}

// look takes what /proc says.
func (p *process) look() {
	if p.pid == 0 {
		return
	}
	if about, err := live.Of(p.pid); err == nil {
		p.start, p.name = about.Start, text.Clean(about.Name)
	}
	p.cgroup = cgroupOf(p.pid)
}

// cgroupOf is the path of a process in the unified hierarchy, "" where that is not known.
func cgroupOf(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return ""
	}
	for line := range bytes.Lines(b) {
		if rest, ok := strings.CutPrefix(string(line), "0::"); ok {
			return text.Clean(strings.TrimSuffix(rest, "\n"))
		}
	}
	return ""
}

// ended are the clients whose process has ended.
func ended(all []*client) (over []*client) {
	var fds []unix.PollFd
	var of []*client
	for _, c := range all {
		if c.pidfd >= 0 {
			fds, of = append(fds, unix.PollFd{Fd: int32(c.pidfd), Events: unix.POLLIN}), append(of, c)
		} else if c.start != 0 && live.Ended(c.pid, c.start) {
			over = append(over, c)
		}
	}
	if n, err := unix.Poll(fds, 0); err != nil || n == 0 {
		return over
	}
	for i, f := range fds {
		if f.Revents != 0 {
			over = append(over, of[i])
		}
	}
	return over
}

// status is what the client's status segment says of a device, and when that was.
func (c *client) status(uuid [16]byte) (s protocol.Status, at time.Time, ok bool) {
	c.reading.Lock()
	defer c.reading.Unlock()
	p, err := c.segment.Read()
	if err != nil {
		return s, at, false
	}
	for i := range p.Devices {
		if d := &p.Devices[i]; d.UUID == uuid {
			return protocol.Status{Reserved: d.Reserved, Allocated: d.Allocated, Active: d.Active - min(d.Active, d.Paused), Cached: d.Cached, Paused: d.Paused,
				Pinned: d.Pinned, Peaks: d.Recent}, p.Updated, true
		}
	}
	return s, at, false
}

var (
	_ [protocol.Windows - live.Windows]struct{}
	_ [live.Windows - protocol.Windows]struct{}
	_ [protocol.Window - live.Window]struct{}
	_ [live.Window - protocol.Window]struct{}
)
