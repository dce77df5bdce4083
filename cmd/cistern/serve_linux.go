package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda/open"
	"github.com/cistern-gpu/cistern/internal/environ"
	"github.com/cistern-gpu/cistern/internal/node/broker"
	"github.com/cistern-gpu/cistern/internal/node/client"
	"github.com/cistern-gpu/cistern/internal/node/metrics"
	"github.com/cistern-gpu/cistern/internal/node/objects"
)

const (
	// brokerHeap is the limit of the broker's Go heap. A thousand clients need a third of it.
	brokerHeap = 80 << 20
	// lookAtPolicy is how often the policy's file is looked at.
	lookAtPolicy = 2 * time.Second
)

// nodeSockets are where commands look for a broker.
func nodeSockets() []string { return client.Sockets() }

// serve runs the broker. SIGHUP reads the policy again; the signals that end every command end it.
func (a *app) serve(ctx context.Context, f *serveFlags) error {
	log := a.logger(f)
	figures := metrics.New(buildVersion().Version)
	n := newNotifier()
	l, stored, err := passed()
	if err != nil {
		return err
	}
	before, err := f.takeOver(l, n)
	if err != nil {
		return err
	}
	b, err := broker.New(broker.Options{Policy: f.policy, DryRun: f.dryRun, Log: log, Observer: figures,
		Objects: broker.ObjectOptions{Open: objectDriver, Most: f.objects, MostBytes: f.objectBytes, Keep: n.keeper()}})
	if err != nil {
		return err
	}
	defer b.Close()
	if len(stored) > 0 {
		log.Info("objects of an earlier broker are there", "objects", b.Restore(stored))
	}
	var lock *os.File
	if before != nil {
		l, lock, err = succeed(b, before, log)
	} else {
		l, lock, err = listen(l, f.socket)
	}
	if err != nil {
		return err
	}
	if lock != nil {
		defer lock.Close()
		b.HandsOver(lock)
	}
	endMetrics, err := serveMetrics(f.metrics, figures, b, log)
	if err != nil && before == nil {
		l.Close()
		return err
	}
	if err != nil { // objects would go with this broker
		log.Error("no metrics are served", "error", err)
		endMetrics = func() {}
	}
	defer endMetrics()
	debug.SetMemoryLimit(brokerHeap)
	again := make(chan os.Signal, 1)
	signal.Notify(again, syscall.SIGHUP)
	defer signal.Stop(again)
	ctx, stop := heedless(ctx, syscall.SIGHUP)
	defer stop()
	log.Info("the broker serves", "socket", l.Addr().String(), "policy", f.policy, "dry_run", f.dryRun, "version", buildVersion().Version)
	n.say("READY=1")
	defer n.say("STOPPING=1")
	go a.tend(ctx, b, f.policy, again, n, log)
	if err := b.Serve(ctx, l); err != nil {
		return err
	}
	log.Info("the broker has ended")
	return nil
}

// objectDriver is the driver that CISTERN_CONF names, for named objects.
func objectDriver() (objects.Driver, error) {
	o, err := config.Parse(environ.Get("CISTERN_CONF"))
	if err != nil {
		return nil, fmt.Errorf("CISTERN_CONF: %w", err)
	}
	drv, err := open.Open(o.Driver)
	if err != nil {
		return nil, err
	}
	return drv, nil
}

// serveMetrics serves the broker's metrics at an address; "" is none.
func serveMetrics(address string, m *metrics.Metrics, b *broker.Broker, log *slog.Logger) (end func(), err error) {
	if address == "" {
		return func() {}, nil
	}
	if err := m.Collect(b); err != nil {
		return nil, err
	}
	l, err := metrics.Listen(address)
	if err != nil {
		return nil, fmt.Errorf("--metrics: %w", err)
	}
	s := m.NewServer()
	go func() {
		if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Error("the metrics are not served any more", "error", err)
		}
	}()
	log.Info("metrics are served", "address", l.Addr().String())
	return func() { _ = s.Close() }, nil
}

// heedless is a context that ends with ctx unless that ends by a signal which is not to end the command.
func heedless(ctx context.Context, sig syscall.Signal) (context.Context, func()) {
	inner, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	ends := func() {
		var s stopSignal
		if !errors.As(context.Cause(ctx), &s) || s.Signal != sig {
			cancel(context.Cause(ctx))
		}
	}
	stop := context.AfterFunc(ctx, ends)
	// Once one signal has come, nothing waits for another: those that end the command are waited for here.
	end := make(chan os.Signal, 1)
	signal.Notify(end, heeded(os.Interrupt, syscall.SIGTERM)...)
	go func() {
		select {
		case s := <-end:
			n, _ := s.(syscall.Signal)
			cancel(stopSignal{n})
		case <-inner.Done():
		}
	}()
	return inner, func() {
		stop()
		signal.Stop(end)
		cancel(nil)
	}
}

// tend reads the policy again when it is time to, and tells systemd that the broker lives.
func (a *app) tend(ctx context.Context, b *broker.Broker, policy string, again <-chan os.Signal, n *notifier, log *slog.Logger) {
	reload := func() {
		n.say(fmt.Sprintf("RELOADING=1\nMONOTONIC_USEC=%d", monotonicUsec()))
		if err := b.Reload(); err != nil {
			log.Error("the policy stays as it was", "error", err)
		}
		n.say("READY=1")
	}
	watchdog := n.watchdog()
	look := time.NewTicker(lookAtPolicy)
	defer look.Stop()
	was := stamp(policy)
	for {
		select {
		case <-ctx.Done():
			return
		case <-again:
			was = stamp(policy)
			reload()
		case <-look.C:
			if now := stamp(policy); now != was {
				was = now
				reload()
			}
		case <-watchdog:
			if b.Alive() {
				n.say("WATCHDOG=1")
			}
		}
	}
}

// stamp tells one state of a file from another.
func stamp(path string) string {
	if path == "" {
		return ""
	}
	st, err := os.Stat(path)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprint(st.ModTime().UnixNano(), st.Size())
}

func monotonicUsec() int64 {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return ts.Nano() / 1000
}

// notifier tells systemd about the service (sd_notify); without systemd it does nothing.
type notifier struct{ socket string }

func newNotifier() *notifier {
	socket := environ.Get("NOTIFY_SOCKET")
	if rest, ok := strings.CutPrefix(socket, "@"); ok {
		socket = "\x00" + rest
	}
	return &notifier{socket}
}

func (n *notifier) say(text string) {
	if n.socket == "" {
		return
	}
	_ = n.tell(text, nil)
}

// keeper is systemd's file descriptor store, which ignores what it is not to keep (FileDescriptorStoreMax=); nil without systemd.
func (n *notifier) keeper() broker.Keeper {
	if n.socket == "" {
		return nil
	}
	return n
}

// Store has systemd keep a descriptor until Forget, or until the service is stopped. FDPOLL=0: it does not look whether the file hangs up.
func (n *notifier) Store(name string, fd int) error {
	return n.tell("FDSTORE=1\nFDNAME="+name+"\nFDPOLL=0", unix.UnixRights(fd))
}

// Forget has systemd close a descriptor.
func (n *notifier) Forget(name string) { _ = n.tell("FDSTOREREMOVE=1\nFDNAME="+name, nil) }

// tell sends a message, and waits a second at most.
func (n *notifier) tell(text string, oob []byte) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Sec: 1}); err != nil {
		return os.NewSyscallError("setsockopt", err)
	}
	for {
		err := unix.Sendmsg(fd, []byte(text), oob, &unix.SockaddrUnix{Name: n.socket}, unix.MSG_NOSIGNAL)
		if err != unix.EINTR {
			return os.NewSyscallError("sendmsg", err)
		}
	}
}

// watchdog ticks twice in the time within which systemd wants to hear of the service; nil: it does not.
func (n *notifier) watchdog() <-chan time.Time {
	usec, err := strconv.ParseInt(environ.Get("WATCHDOG_USEC"), 10, 64)
	if err != nil || usec <= 0 || n.socket == "" {
		return nil
	}
	if pid := environ.Get("WATCHDOG_PID"); pid != "" && pid != strconv.Itoa(os.Getpid()) {
		return nil
	}
	return time.Tick(time.Duration(usec) * time.Microsecond / 2)
}

// takeOver asks the broker that runs for what it has; nil where none does, or without --replace.
func (f *serveFlags) takeOver(passed *net.UnixListener, n *notifier) (*broker.Handover, error) {
	switch {
	case !f.replace:
		return nil, nil
	case passed != nil || n.keeper() != nil:
		return nil, errors.New("--replace: systemd keeps objects already: restart the service")
	}
	path, err := socketPath(f.socket)
	if err != nil {
		return nil, err
	}
	h, err := broker.TakeOver(path)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) {
		return nil, nil
	}
	return h, err
}

// endsWithin is how long the broker before may take to end.
const endsWithin = 30 * time.Second

// succeed makes b the successor of the broker before, which ends.
func succeed(b *broker.Broker, before *broker.Handover, log *slog.Logger) (*net.UnixListener, *os.File, error) {
	defer before.Close()
	count := b.TakeOver(before)
	ended, err := before.Confirm(endsWithin)
	if err != nil {
		before.Listener.Close()
		before.Lock.Close()
		return nil, nil, fmt.Errorf("--replace: the broker before does not answer any more: %w", err)
	}
	log.Info("this broker has taken over", "objects", count)
	if !ended {
		log.Warn("the broker before has not ended", "waited", endsWithin)
	}
	return before.Listener, before.Lock, nil
}

// socketPath is the path of --socket, or the default.
func socketPath(path string) (string, error) {
	var err error
	if path == "" {
		if path, err = defaultSocket(os.Geteuid() == 0); err != nil {
			return "", err
		}
	}
	return path, checkSocket(path)
}

// listen is the socket that systemd passes, or one at the path, with the file that makes this the only broker there.
func listen(passed *net.UnixListener, path string) (l *net.UnixListener, lock *os.File, err error) {
	if passed != nil {
		if path != "" {
			passed.Close()
			return nil, nil, errors.New("--socket: systemd passes a socket already")
		}
		return passed, nil, nil
	}
	if path, err = socketPath(path); err != nil {
		return nil, nil, err
	}
	folder, socket := os.FileMode(0o700), os.FileMode(0o600)
	if os.Geteuid() == 0 { // of all users
		folder, socket = 0o755, 0o666
	}
	if err := os.MkdirAll(filepath.Dir(path), folder); err != nil {
		return nil, nil, err
	}
	lock, err = lockBroker(path)
	if err != nil {
		return nil, nil, err
	}
	if st, err := os.Lstat(path); err == nil && st.Mode().Type() == os.ModeSocket {
		_ = os.Remove(path) // no process has the lock, so it is of a broker that was killed
	}
	l, err = net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err == nil {
		if err = os.Chmod(path, socket); err != nil {
			l.Close()
		}
	}
	if err != nil {
		lock.Close()
		return nil, nil, err
	}
	return l, lock, nil
}

// lockBroker makes this the only broker at a path.
func lockBroker(path string) (*os.File, error) {
	f, err := os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if err == unix.EWOULDBLOCK {
			return nil, fmt.Errorf("another broker serves at %s", path)
		}
		return nil, fmt.Errorf("%s.lock: %w", path, err)
	}
	return f, nil
}

// passed is the listening socket that systemd passes (LISTEN_FDS), nil for none, and the descriptors that an earlier broker stored, by
// name.
func passed() (l *net.UnixListener, stored map[string]int, err error) {
	count := environ.Get("LISTEN_FDS")
	if count == "" || environ.Get("LISTEN_PID") != strconv.Itoa(os.Getpid()) {
		return nil, nil, nil
	}
	n, err := strconv.Atoi(count)
	if err != nil || n < 0 || n > 1<<16 {
		return nil, nil, fmt.Errorf("systemd passes %q descriptors: expected a number", count)
	}
	const first = 3
	names := strings.Split(environ.Get("LISTEN_FDNAMES"), ":")
	var sockets []int
	stored = map[string]int{}
	for i := range n {
		unix.CloseOnExec(first + i)
		name := ""
		if i < len(names) {
			name = names[i]
		}
		if kind, err := unix.GetsockoptInt(first+i, unix.SOL_SOCKET, unix.SO_TYPE); err == nil && kind == unix.SOCK_SEQPACKET || name == "" || n == 1 {
			sockets = append(sockets, first+i)
			continue
		}
		if _, twice := stored[name]; twice {
			unix.Close(first + i)
			continue
		}
		stored[name] = first + i
	}
	if len(sockets) > 1 {
		return nil, nil, fmt.Errorf("systemd passes %d sockets: expected one", len(sockets))
	}
	if len(sockets) == 0 {
		return nil, stored, nil
	}
	l, err = passedSocket(sockets[0])
	return l, stored, err
}

// passedSocket is the listener of a descriptor.
func passedSocket(fd int) (*net.UnixListener, error) {
	f := os.NewFile(uintptr(fd), "the socket that systemd passes")
	defer f.Close()
	if kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE); err != nil || kind != unix.SOCK_SEQPACKET {
		return nil, errors.New("the socket that systemd passes: expected one of ListenSequentialPacket=")
	}
	l, err := net.FileListener(f)
	if err != nil {
		return nil, fmt.Errorf("the socket that systemd passes: %w", err)
	}
	u, ok := l.(*net.UnixListener)
	if !ok {
		l.Close()
		return nil, errors.New("the socket that systemd passes: expected a Unix socket")
	}
	u.SetUnlinkOnClose(false)
	return u, nil
}
