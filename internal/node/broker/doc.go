// Package broker is the daemon of a node (cistern serve): processes on its GPUs connect to it, and it moves unused memory from those
// that cache it to those whose requests would fail. Packages ledger and policy decide; this package talks.
//
// # Clients
//
// Each connection is a client. The kernel says which process it is: its user (SO_PEERCRED), a pidfd, when it started, its cgroup. A
// client sends the descriptor of its status segment (internal/live), from which the broker reads what the client has when it has to
// decide. So no message is sent while no client lacks memory. A client that ends, however it does, hangs up; one whose connection a
// child of fork has kept open is found by its pidfd.
//
// # A question
//
// Each question (protocol.Ask) has a goroutine (asking.go), which has the ledger decide, asks the victims, collects their answers for
// Options.Answer at most, and sends the asker what was released. While the ledger says Wait it decides again every 50 ms, until the
// asker's wait is over or the asker ends the question. A decision to pause memory in use (protocol.Pausable) is made only on answers
// to an inquiry, and has until the end of the asker's wait. What a grant is worth is in the shared segment (package grants) from the
// moment when victims are asked until the asker says Done, or for GrantLasts.
//
// # Locks
//
// Broker.mu guards the ledger, the clients and the policy. Nothing is sent, logged, read from a segment or waited for with it.
//
// # Failures
//
// A client that does not answer, sends what is no message or opens too many connections costs itself its place, and others the wait
// for one answer. Only a connection's own goroutine closes it, and descriptors that came on it, as closing those may wait for whatever
// the client likes; others have it do so (hangUp). Lines of the log that clients cause are limited (notes). The broker keeps nothing that it needs after a restart: clients connect again and tell it all. Without the broker
// clients work as if there had never been one.
//
// It runs on Linux.
package broker
